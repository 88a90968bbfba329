"""Plans of model families, made from configurations of Transformers, whose modelling code they are tested against.

A configuration with a field that its family's plan does not know is refused, unless the field is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outrider.native.plan import Activation, LayerPlan, MatrixPlan, NormPlan, NotPlanned, Plan, RopePlan

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
# Fields that change no logits of a forward, or that all plans use.
_COMMON = frozenset(
    "architectures attention_dropout bos_token_id dtype embd_pdrop embedding_dropout eos_token_id head_dim hidden_act "
    "hidden_size id2label initializer_range intermediate_size label2id layer_types max_position_embeddings "
    "max_window_layers model_type name_or_path num_attention_heads num_hidden_layers num_key_value_heads pad_token_id "
    "pretraining_tp problem_type resid_pdrop residual_dropout return_dict rms_norm_eps rope_parameters sliding_window "
    "tie_word_embeddings transformers_version use_cache use_sliding_window vocab_size original_max_position_embeddings "
    "chunk_size_feed_forward output_attentions output_hidden_states is_encoder_decoder _name_or_path "
    "quantization_config auto_map transformers.js_config is_llama_config unsloth_fixed unsloth_version "
    "_num_labels".split()
)
_BIASES = frozenset({"attention_bias", "mlp_bias"})
_PARTLY_TURNED = frozenset({"phi3", "glm4"})  # whose code reads the factor


@dataclass(frozen=True, slots=True)
class _Family:
    """A family: its own fields, and what makes its plan."""

    make: Callable[[Any], Plan]
    fields: frozenset[str] = field(default_factory=frozenset)


def plan_of(config: Any) -> Plan:
    """Plan of a configuration.

    Raises:
        NotPlanned
    """
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise NotPlanned(f"{config.model_type} has no plan")
    for name, value in config.to_dict().items():
        if name not in _COMMON | family.fields and value not in (None, False):
            raise NotPlanned(f"its plan does not know {name}={value!r}")
    return family.make(config)


# Parts of plans


def _rms(config: Any, name: str, added: float = 0.0) -> NormPlan:
    return NormPlan("rms", f"{name}.weight", config.rms_norm_eps, added)


def _layer_norm(name: str, epsilon: float) -> NormPlan:
    return NormPlan("layer", f"{name}.weight", epsilon, bias=f"{name}.bias")


def _linear(name: str, has_bias: bool = False, part: int = 0, num_parts: int = 1) -> MatrixPlan:
    return MatrixPlan(f"{name}.weight", f"{name}.bias" if has_bias else None, part, num_parts)


def _activation(config: Any) -> Activation:
    # Gemma 1 states both, and reads the second.
    fields = {"gemma2": "hidden_activation", "gemma3_text": "hidden_activation", "gpt2": "activation_function"}
    name = getattr(config, fields.get(config.model_type, "hidden_act"))
    if name not in _ACTIVATIONS:
        raise NotPlanned(f"there is no activation {name}")
    return _ACTIVATIONS[name]


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _window(config: Any, layer: int) -> int | None:
    """Window of a layer whose configuration states the kinds of layers. (Some families' code does not read these.)"""
    kind = config.layer_types[layer]
    if kind == "sliding_attention":
        return config.sliding_window  # type: ignore[no-any-return]
    if kind != "full_attention":
        raise NotPlanned(f"its plan does not know layers of {kind}")
    return None


def _rope(config: Any, kind: str | None = None, *, is_interleaved: bool = False) -> RopePlan:
    """
    Args:
        kind: the kind of layers, if the configuration states several ropes.
    """
    stated = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if stated["rope_type"] == "default":
        width = _head_width(config)
        if config.model_type in _PARTLY_TURNED:
            width = int(width * (stated.get("partial_rotary_factor") or 1.0))
        powers = torch.arange(0, width, 2, dtype=torch.float) / width
        return RopePlan(tuple((1.0 / stated["rope_theta"] ** powers).tolist()), 1.0, is_interleaved)
    if stated["rope_type"] == "dynamic":
        raise NotPlanned("its rope depends on the length of the text")
    if stated["rope_type"] == "longrope" and stated["short_factor"] != stated["long_factor"]:
        raise NotPlanned("its rope depends on the length of the text")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    of_kind = {} if kind is None else {"layer_type": kind}
    frequencies, scale = ROPE_INIT_FUNCTIONS[stated["rope_type"]](config, torch.device("cpu"), **of_kind)
    return RopePlan(tuple(frequencies.tolist()), scale, is_interleaved)


# Families


def _llama(config: Any) -> Plan:
    """Llama, and those that differ from it by little."""
    bias, mlp_bias = bool(getattr(config, "attention_bias", False)), bool(getattr(config, "mlp_bias", False))
    layers = []
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        layers.append(
            LayerPlan(
                attention_norm=_rms(config, f"{at}.input_layernorm"),
                inputs=tuple(_linear(f"{at}.self_attn.{name}_proj", bias) for name in "qkv"),
                out=_linear(f"{at}.self_attn.o_proj", bias),
                mlp_norm=_rms(config, f"{at}.post_attention_layernorm"),
                ups=tuple(_linear(f"{at}.mlp.{name}_proj", mlp_bias) for name in ("gate", "up")),
                down=_linear(f"{at}.mlp.down_proj", mlp_bias),
            )
        )
    ropes = () if isinstance(next(iter(config.rope_parameters.values()), None), dict) else (_rope(config),)
    return _of_layers(config, layers, _rms(config, "model.norm"), ropes, _head_width(config))


def _of_layers(
    config: Any, layers: Sequence[LayerPlan], last_norm: NormPlan, ropes: tuple[RopePlan, ...], width: int
) -> Plan:
    """Plan whose parts besides its layers have Llama's names, with heads of this width."""
    embedding = "model.embed_tokens.weight"
    return Plan(
        layers=tuple(layers),
        num_heads=config.num_attention_heads,
        num_groups=config.num_key_value_heads,
        head_width=width,
        activation=_activation(config),
        embedding=embedding,
        last_norm=last_norm,
        head=MatrixPlan(embedding if config.tie_word_embeddings else "lm_head.weight"),
        attention_scale=width**-0.5,
        ropes=ropes,
    )


def _with_layers(plan: Plan, change: Callable[[int, LayerPlan], LayerPlan]) -> Plan:
    return replace(plan, layers=tuple(change(i, layer) for i, layer in enumerate(plan.layers)))


def _mistral(config: Any) -> Plan:
    return _with_layers(_llama(config), lambda i, layer: replace(layer, window=config.sliding_window))


def _qwen2(config: Any) -> Plan:
    def change(i: int, layer: LayerPlan) -> LayerPlan:
        inputs = tuple(_linear(f"model.layers.{i}.self_attn.{name}_proj", True) for name in "qkv")
        return replace(layer, inputs=inputs, window=_window(config, i))

    return _with_layers(_llama(config), change)


def _qwen3(config: Any) -> Plan:
    def change(i: int, layer: LayerPlan) -> LayerPlan:
        query, key = (_rms(config, f"model.layers.{i}.self_attn.{name}_norm") for name in "qk")
        return replace(layer, query_norm=query, key_norm=key, window=_window(config, i))

    return _with_layers(_llama(config), change)


def _smollm3(config: Any) -> Plan:
    def change(i: int, layer: LayerPlan) -> LayerPlan:
        return replace(layer, rope=0 if config.no_rope_layers[i] else None, window=_window(config, i))

    return _with_layers(_llama(config), change)


def _olmo2(config: Any) -> Plan:
    """OLMo 2: norms after the halves of a layer instead of before; those of queries and keys are of whole rows."""

    def change(i: int, layer: LayerPlan) -> LayerPlan:
        at = f"model.layers.{i}"
        query, key = (_rms(config, f"{at}.self_attn.{name}_norm") for name in "qk")
        post, mlp_post = (_rms(config, f"{at}.post_{name}_layernorm") for name in ("attention", "feedforward"))
        layer = replace(layer, attention_norm=None, mlp_norm=None, attention_post_norm=post, mlp_post_norm=mlp_post)
        return replace(layer, query_norm=query, key_norm=key, norms_whole_rows=True)

    return _with_layers(_llama(config), change)


def _granite(config: Any) -> Plan:
    return replace(
        _llama(config),
        embedding_scale=config.embedding_multiplier,
        attention_scale=config.attention_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _fused(config: Any, layer: LayerPlan, at: str, *, inputs: bool) -> LayerPlan:
    """Layer with one matrix for gate and up, and perhaps one for queries, keys and values."""
    layer = replace(layer, ups=tuple(_linear(f"{at}.mlp.gate_up_proj", part=part, num_parts=2) for part in range(2)))
    return replace(layer, inputs=(_linear(f"{at}.self_attn.qkv_proj"),)) if inputs else layer


def _phi3(config: Any) -> Plan:
    def change(i: int, layer: LayerPlan) -> LayerPlan:
        return replace(_fused(config, layer, f"model.layers.{i}", inputs=True), window=config.sliding_window)

    return _with_layers(_llama(config), change)


def _glm4(config: Any) -> Plan:
    def change(i: int, layer: LayerPlan) -> LayerPlan:
        at = f"model.layers.{i}"
        post, mlp_post = (_rms(config, f"{at}.post_{name}_layernorm") for name in ("self_attn", "mlp"))
        layer = replace(layer, attention_post_norm=post, mlp_post_norm=mlp_post, out=_linear(f"{at}.self_attn.o_proj"))
        return _fused(config, layer, at, inputs=False)

    return replace(_with_layers(_llama(config), change), ropes=(_rope(config, is_interleaved=True),))


def _gemma(config: Any) -> Plan:
    """Gemma 1 to 3. Factors of norms are stored less 1, and embeddings are scaled in their own type."""
    if getattr(config, "use_bidirectional_attention", None):
        raise NotPlanned("its attention is bidirectional")
    has_kinds, is_third = config.model_type != "gemma", config.model_type == "gemma3_text"

    def norm(name: str) -> NormPlan:
        return _rms(config, name, added=1.0)

    def change(i: int, layer: LayerPlan) -> LayerPlan:
        at = f"model.layers.{i}"
        layer = replace(
            layer, attention_norm=norm(f"{at}.input_layernorm"), mlp_norm=norm(f"{at}.post_attention_layernorm")
        )
        if has_kinds:
            layer = replace(
                layer,
                attention_post_norm=norm(f"{at}.post_attention_layernorm"),
                mlp_norm=norm(f"{at}.pre_feedforward_layernorm"),
                mlp_post_norm=norm(f"{at}.post_feedforward_layernorm"),
                window=_window(config, i),
            )
        if is_third:
            query, key = (norm(f"{at}.self_attn.{name}_norm") for name in "qk")
            layer = replace(layer, query_norm=query, key_norm=key, rope=kinds.index(config.layer_types[i]))
        return layer

    kinds = sorted(set(config.layer_types)) if is_third else []
    plan = _with_layers(_llama(config), change)
    return replace(
        plan,
        last_norm=norm("model.norm"),
        ropes=tuple(_rope(config, kind) for kind in kinds) or plan.ropes,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=config.query_pre_attn_scalar**-0.5 if has_kinds else plan.attention_scale,
        attention_cap=getattr(config, "attn_logit_softcapping", None),
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )


def _starcoder2(config: Any) -> Plan:
    bias, norm = config.use_bias, config.norm_epsilon
    layers = []
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        layers.append(
            LayerPlan(
                attention_norm=_layer_norm(f"{at}.input_layernorm", norm),
                inputs=tuple(_linear(f"{at}.self_attn.{name}_proj", bias) for name in "qkv"),
                out=_linear(f"{at}.self_attn.o_proj", bias),
                mlp_norm=_layer_norm(f"{at}.post_attention_layernorm", norm),
                ups=(_linear(f"{at}.mlp.c_fc", bias),),
                down=_linear(f"{at}.mlp.c_proj", bias),
                window=config.sliding_window,
            )
        )
    width = config.hidden_size // config.num_attention_heads
    return _of_layers(config, layers, _layer_norm("model.norm", norm), (_rope(config),), width)


def _gpt2(config: Any) -> Plan:
    if config.scale_attn_by_inverse_layer_idx or config.add_cross_attention:
        raise NotPlanned("its plan does not know this attention")
    layers = []
    for i in range(config.n_layer):
        at = f"transformer.h.{i}"
        layers.append(
            LayerPlan(
                attention_norm=_layer_norm(f"{at}.ln_1", config.layer_norm_epsilon),
                inputs=(_conv(f"{at}.attn.c_attn"),),
                out=_conv(f"{at}.attn.c_proj"),
                mlp_norm=_layer_norm(f"{at}.ln_2", config.layer_norm_epsilon),
                ups=(_conv(f"{at}.mlp.c_fc"),),
                down=_conv(f"{at}.mlp.c_proj"),
                rope=None,
            )
        )
    width = config.n_embd // config.n_head
    embedding = "transformer.wte.weight"
    return Plan(
        layers=tuple(layers),
        num_heads=config.n_head,
        num_groups=config.n_head,
        head_width=width,
        activation=_activation(config),
        embedding=embedding,
        place_embedding="transformer.wpe.weight",
        num_places=config.n_positions,
        last_norm=_layer_norm("transformer.ln_f", config.layer_norm_epsilon),
        head=MatrixPlan(embedding if config.tie_word_embeddings else "lm_head.weight"),
        attention_scale=width**-0.5 if config.scale_attn_weights else 1.0,
    )


def _conv(name: str) -> MatrixPlan:
    return MatrixPlan(f"{name}.weight", f"{name}.bias", is_transposed=True)


_FAMILIES = {
    "llama": _Family(_llama, _BIASES),
    "mistral": _Family(_mistral),
    "qwen2": _Family(_qwen2),
    "qwen3": _Family(_qwen3, _BIASES),
    "smollm3": _Family(_smollm3, _BIASES | {"no_rope_layers", "no_rope_layer_interval"}),
    "olmo2": _Family(_olmo2, _BIASES),
    "granite": _Family(
        _granite, _BIASES | {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
    ),
    "phi3": _Family(_phi3, frozenset({"full_attn_mod", "interpolate_factor", "partial_rotary_factor"})),
    "glm4": _Family(_glm4, _BIASES),
    "gemma": _Family(_gemma, _BIASES | {"hidden_activation"}),
    "gemma2": _Family(
        _gemma,
        _BIASES
        | {"hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
        | {"cache_implementation"},
    ),
    "gemma3_text": _Family(
        _gemma,
        _BIASES
        | {"hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping"}
        | {"_sliding_window_pattern", "sliding_window_pattern", "cache_implementation"},
    ),
    "starcoder2": _Family(_starcoder2, frozenset({"use_bias", "norm_epsilon", "norm_type", "mlp_type"})),
    "gpt2": _Family(
        _gpt2,
        frozenset(
            "activation_function attn_pdrop layer_norm_epsilon n_embd n_head n_inner n_layer n_positions n_ctx "
            "scale_attn_weights summary_activation summary_first_dropout summary_proj_to_labels summary_type "
            "summary_use_proj reorder_and_upcast_attn task_specific_params".split()
        ),
    ),
}
FAMILIES = tuple(_FAMILIES)
