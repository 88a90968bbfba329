"""Plans of model families, made from configurations of Transformers, whose modelling code they are tested against.

A configuration with a field that its family's plan does not know is refused, unless the field is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.native.plan import (
    Activation,
    AttentionPlan,
    LayerPlan,
    MatrixPlan,
    MlpPlan,
    NormPlan,
    NotPlanned,
    Plan,
    RopePlan,
)

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
_PARTLY_TURNED = frozenset({"phi3", "glm4"})  # whose code reads the factor


def plan_of(config: Any) -> Plan:
    """Plan of a configuration.

    Raises:
        NotPlanned
    """
    if config.model_type not in FAMILIES:
        raise NotPlanned(f"{config.model_type} has no plan")
    make, fields = FAMILIES[config.model_type]
    known = _COMMON | {*fields.split()}
    for name, value in config.to_dict().items():
        if name not in known and value not in (None, False):
            raise NotPlanned(f"its plan does not know {name}={value!r}")
    return make(config)


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


def _plan(
    config: Any,
    layer: Callable[[str, int], LayerPlan],
    *,
    at: str = "model.layers",
    last_norm: NormPlan | None = None,
    ropes: tuple[RopePlan, ...] | None = None,
    embedding: str = "model.embed_tokens.weight",
    **others: Any,
) -> Plan:
    """Plan with Llama's parts, unless they are stated.

    Args:
        layer: makes a layer of the beginning of its parameters' names and its number.
        at: the beginning of the names of all layers' parameters.
        others: fields of the plan.
    """
    fields: dict[str, Any] = {
        "embedding": embedding,
        "head": MatrixPlan(embedding if config.tie_word_embeddings else "lm_head.weight"),
        "layers": tuple(layer(f"{at}.{i}", i) for i in range(config.num_hidden_layers)),
        "last_norm": last_norm or _rms(config, "model.norm"),
        "ropes": (_rope(config),) if ropes is None else ropes,
    }
    return Plan(**(fields | others))


def _attention(config: Any, at: str, **others: Any) -> AttentionPlan:
    """Attention of Llama, but for other fields that are stated."""
    bias, width = bool(getattr(config, "attention_bias", False)), _head_width(config)
    fields: dict[str, Any] = {
        "num_heads": config.num_attention_heads,
        "num_groups": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_width": width,
        "scale": width**-0.5,
        "inputs": _inputs(at, bias),
        "out": _linear(f"{at}.self_attn.o_proj", bias),
    }
    return AttentionPlan(**(fields | others))


def _mlp(config: Any, at: str, **others: Any) -> MlpPlan:
    """MLP of Llama, but for other fields that are stated."""
    bias = bool(getattr(config, "mlp_bias", False))
    fields: dict[str, Any] = {
        "ups": tuple(_linear(f"{at}.mlp.{name}_proj", bias) for name in ("gate", "up")),
        "down": _linear(f"{at}.mlp.down_proj", bias),
        "activation": _activation(config),
    }
    return MlpPlan(**(fields | others))


def _layer(config: Any, at: str, mixer: AttentionPlan | None = None, **others: Any) -> LayerPlan:
    """Layer of Llama, but for other parts that are stated."""
    fields: dict[str, Any] = {
        "mlp": _mlp(config, at),
        "mixer_norm": _rms(config, f"{at}.input_layernorm"),
        "mlp_norm": _rms(config, f"{at}.post_attention_layernorm"),
    }
    return LayerPlan(mixer or _attention(config, at), **(fields | others))


def _inputs(at: str, has_bias: bool) -> tuple[MatrixPlan, ...]:
    return tuple(_linear(f"{at}.self_attn.{name}_proj", has_bias) for name in "qkv")


def _halves(name: str) -> tuple[MatrixPlan, ...]:
    """Gate and up in one matrix."""
    return tuple(_linear(name, part=part, num_parts=2) for part in range(2))


def _head_norms(config: Any, at: str, added: float = 0.0) -> dict[str, NormPlan]:
    names = {"query_norm": "q_norm", "key_norm": "k_norm"}
    return {field: _rms(config, f"{at}.self_attn.{name}", added) for field, name in names.items()}


def _llama(config: Any) -> Plan:
    return _plan(config, lambda at, i: _layer(config, at))


def _mistral(config: Any) -> Plan:
    return _plan(config, lambda at, i: _layer(config, at, _attention(config, at, window=config.sliding_window)))


def _qwen2(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        return _layer(config, at, _attention(config, at, inputs=_inputs(at, True), window=_window(config, i)))

    return _plan(config, layer)


def _qwen3(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        return _layer(config, at, _attention(config, at, window=_window(config, i), **_head_norms(config, at)))

    return _plan(config, layer)


def _smollm3(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        rope = 0 if config.no_rope_layers[i] else None
        return _layer(config, at, _attention(config, at, rope=rope, window=_window(config, i)))

    return _plan(config, layer)


def _olmo2(config: Any) -> Plan:
    """OLMo 2: norms after the halves of a layer instead of before; those of queries and keys are of whole rows."""

    def layer(at: str, i: int) -> LayerPlan:
        post, mlp_post = (_rms(config, f"{at}.post_{name}_layernorm") for name in ("attention", "feedforward"))
        norms = {"mixer_norm": None, "mlp_norm": None, "mixer_post_norm": post, "mlp_post_norm": mlp_post}
        return _layer(config, at, _attention(config, at, norms_whole_rows=True, **_head_norms(config, at)), **norms)

    return _plan(config, layer)


def _granite(config: Any) -> Plan:
    return _plan(
        config,
        lambda at, i: _layer(config, at, _attention(config, at, scale=config.attention_multiplier)),
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _phi3(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        inputs = (_linear(f"{at}.self_attn.qkv_proj"),)
        mixer = _attention(config, at, inputs=inputs, window=config.sliding_window)
        return _layer(config, at, mixer, mlp=_mlp(config, at, ups=_halves(f"{at}.mlp.gate_up_proj")))

    return _plan(config, layer)


def _glm4(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        post, mlp_post = (_rms(config, f"{at}.post_{name}_layernorm") for name in ("self_attn", "mlp"))
        mixer = _attention(config, at, out=_linear(f"{at}.self_attn.o_proj"))
        mlp = _mlp(config, at, ups=_halves(f"{at}.mlp.gate_up_proj"))
        return _layer(config, at, mixer, mlp=mlp, mixer_post_norm=post, mlp_post_norm=mlp_post)

    return _plan(config, layer, ropes=(_rope(config, is_interleaved=True),))


def _gemma(config: Any) -> Plan:
    """Gemma 1 to 3. Factors of norms are stored less 1, and embeddings are scaled in their own type."""
    if getattr(config, "use_bidirectional_attention", None):
        raise NotPlanned("its attention is bidirectional")
    has_kinds, is_third = config.model_type != "gemma", config.model_type == "gemma3_text"
    kinds = sorted(set(config.layer_types)) if is_third else []
    names = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if has_kinds:
        names |= {"mixer_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
        names |= {"mlp_post_norm": "post_feedforward_layernorm"}

    def layer(at: str, i: int) -> LayerPlan:
        norms = {field: _rms(config, f"{at}.{name}", 1.0) for field, name in names.items()}
        others: dict[str, Any] = {}
        if has_kinds:
            cap = getattr(config, "attn_logit_softcapping", None)
            others = {"window": _window(config, i), "cap": cap, "scale": config.query_pre_attn_scalar**-0.5}
        if is_third:
            others |= _head_norms(config, at, 1.0) | {"rope": kinds.index(config.layer_types[i])}
        return _layer(config, at, _attention(config, at, **others), **norms)

    return _plan(
        config,
        layer,
        last_norm=_rms(config, "model.norm", 1.0),
        ropes=tuple(_rope(config, kind) for kind in kinds) or None,
        embedding_scale=config.hidden_size**0.5,
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )


def _starcoder2(config: Any) -> Plan:
    bias, epsilon = config.use_bias, config.norm_epsilon

    def layer(at: str, i: int) -> LayerPlan:
        inputs, out = _inputs(at, bias), _linear(f"{at}.self_attn.o_proj", bias)
        return LayerPlan(
            _attention(config, at, inputs=inputs, out=out, window=config.sliding_window),
            _mlp(config, at, ups=(_linear(f"{at}.mlp.c_fc", bias),), down=_linear(f"{at}.mlp.c_proj", bias)),
            mixer_norm=_layer_norm(f"{at}.input_layernorm", epsilon),
            mlp_norm=_layer_norm(f"{at}.post_attention_layernorm", epsilon),
        )

    return _plan(config, layer, last_norm=_layer_norm("model.norm", epsilon))


def _gpt2(config: Any) -> Plan:
    if config.scale_attn_by_inverse_layer_idx or config.add_cross_attention:
        raise NotPlanned("its plan does not know this attention")
    epsilon = config.layer_norm_epsilon

    def conv(name: str) -> MatrixPlan:
        return MatrixPlan(f"{name}.weight", f"{name}.bias", is_transposed=True)

    def layer(at: str, i: int) -> LayerPlan:
        scale = {} if config.scale_attn_weights else {"scale": 1.0}
        inputs, out = (conv(f"{at}.attn.c_attn"),), conv(f"{at}.attn.c_proj")
        return LayerPlan(
            _attention(config, at, inputs=inputs, out=out, rope=None, **scale),
            _mlp(config, at, ups=(conv(f"{at}.mlp.c_fc"),), down=conv(f"{at}.mlp.c_proj")),
            mixer_norm=_layer_norm(f"{at}.ln_1", epsilon),
            mlp_norm=_layer_norm(f"{at}.ln_2", epsilon),
        )

    return _plan(
        config,
        layer,
        at="transformer.h",
        last_norm=_layer_norm("transformer.ln_f", epsilon),
        ropes=(),
        embedding="transformer.wte.weight",
        place_embedding="transformer.wpe.weight",
        num_places=config.n_positions,
    )


_BIASES = "attention_bias mlp_bias"
_GEMMA = f"{_BIASES} hidden_activation"
_GEMMA2 = f"{_GEMMA} query_pre_attn_scalar final_logit_softcapping cache_implementation"
# By Transformers' model_type: the function that makes a plan, and fields of the configuration that only it reads.
FAMILIES: dict[str, tuple[Callable[[Any], Plan], str]] = {
    "llama": (_llama, _BIASES),
    "mistral": (_mistral, ""),
    "qwen2": (_qwen2, ""),
    "qwen3": (_qwen3, _BIASES),
    "smollm3": (_smollm3, f"{_BIASES} no_rope_layers no_rope_layer_interval"),
    "olmo2": (_olmo2, _BIASES),
    "granite": (
        _granite,
        f"{_BIASES} embedding_multiplier attention_multiplier residual_multiplier logits_scaling",
    ),
    "phi3": (_phi3, "full_attn_mod interpolate_factor partial_rotary_factor"),
    "glm4": (_glm4, _BIASES),
    "gemma": (_gemma, _GEMMA),
    "gemma2": (_gemma, f"{_GEMMA2} attn_logit_softcapping"),
    "gemma3_text": (_gemma, f"{_GEMMA2} _sliding_window_pattern sliding_window_pattern"),
    "starcoder2": (_starcoder2, "use_bias norm_epsilon norm_type mlp_type"),
    "gpt2": (
        _gpt2,
        "activation_function attn_pdrop layer_norm_epsilon n_embd n_head n_inner n_layer n_positions n_ctx "
        "scale_attn_weights summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj reorder_and_upcast_attn task_specific_params",
    ),
}
