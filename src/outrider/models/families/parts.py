"""Parts of plans, made from configurations: those of Llama, unless others are stated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.models.families.family import Fields
from outrider.native import plan as plans
from outrider.native.rope import rope_plan

_ACTIVATIONS: dict[str, plans.Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def rms(config: Any, name: str, added: float = 0.0) -> plans.NormPlan:
    return plans.NormPlan("rms", f"{name}.weight", config.epsilon, added)


def layer_norm(config: Any, name: str, has_bias: bool = True) -> plans.NormPlan:
    return plans.NormPlan("layer", f"{name}.weight", config.epsilon, bias=f"{name}.bias" if has_bias else None)


def linear(name: str, has_bias: bool = False, part: int = 0, num_parts: int = 1) -> plans.MatrixPlan:
    return plans.MatrixPlan(f"{name}.weight", f"{name}.bias" if has_bias else None, part, num_parts)


def activation_of(config: Any) -> plans.Activation:
    name = getattr(config, config.family.activation)
    if name not in _ACTIVATIONS:
        raise plans.NotPlanned(f"there is no activation {name}")
    return _ACTIVATIONS[name]


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def window_of(config: Any, layer: int) -> int | None:
    """Window of a layer whose configuration states the kinds of layers. (Some families' code does not read these.)"""
    kind = config.layer_types[layer]
    if kind == "sliding_attention" and config.sliding_window is not None:
        return int(config.sliding_window)
    if kind != "full_attention":
        raise plans.NotPlanned(f"its plan does not know layers of {kind}")
    return None


def rope_of(config: Any, kind: str | None = None, *, head_dim: int = 0, is_interleaved: bool = False) -> plans.RopePlan:
    """Rope of the layers; of a kind of layers, if the configuration states several ropes, with the ``head_dim`` of that
    kind; 0 for that of all."""
    stated = config.rope_parameters if kind is None else config.rope_parameters[kind]
    # Scaled ropes rotate a share of a head in the code of all families, default ropes in that of a few.
    if stated["rope_type"] == "default" and "partial_rotary_factor" not in config.family.known:
        stated = stated | {"partial_rotary_factor": None}
    width, context_len = head_dim or head_dim_of(config), config.max_position_embeddings
    return rope_plan(stated, width, context_len, is_interleaved=is_interleaved)


def ropes_of_kinds(config: Any) -> Fields:
    """Field of a plan: ropes of the kinds of layers."""
    return {"ropes": tuple(rope_of(config, kind) for kind in sorted({*config.layer_types}))}


def rope_of_kind(config: Any, layer: int) -> Fields:
    """Field of a layer's attention: number of its rope among those of the kinds of layers."""
    return {"rope": sorted({*config.layer_types}).index(config.layer_types[layer])}


def decoder_of(
    config: Any,
    layer: Callable[[str, int], plans.LayerPlan],
    *,
    at: str = "model.layers",
    embedding: str = "model.embed_tokens.weight",
    ropes: tuple[plans.RopePlan, ...] | None = None,
    **others: Any,
) -> plans.Plan:
    """Plan with Llama's parts, unless they or ``others``, fields of the plan, are stated. ``layer`` makes a layer of
    the beginning of its parameters' names (``at`` and its number) and its number."""
    fields: Fields = {
        "embedding": embedding,
        "lm_head": plans.MatrixPlan(embedding if config.tie_word_embeddings else "lm_head.weight"),
        "layers": tuple(layer(f"{at}.{i}", i) for i in range(config.num_hidden_layers)),
        "ropes": (rope_of(config),) if ropes is None else ropes,
        "final_norm": rms(config, "model.norm"),
    }
    return plans.Plan(**(fields | others))


def _none(*_: Any) -> Fields:
    return {}


def like_llama(
    attention: Callable[[Any, str, int], Fields] = _none,
    layer: Callable[[Any, str, int], Fields] = _none,
    whole: Callable[[Any], Fields] = _none,
) -> Callable[[Any], plans.Plan]:
    """Function that makes plans with Llama's parts, but for the fields that are stated: of a layer's attention and of
    the layer, by the configuration, the beginning of its parameters' names and its number; and of the ``whole`` plan,
    by the configuration."""

    def plan(config: Any) -> plans.Plan:
        def one(at: str, i: int) -> plans.LayerPlan:
            return layer_of(config, at, attention_of(config, at, **attention(config, at, i)), **layer(config, at, i))

        return decoder_of(config, one, **whole(config))

    return plan


def has_bias(config: Any, field: str) -> bool:
    return bool(getattr(config, field, getattr(config, "use_bias", False)))


def attention_of(config: Any, at: str, **others: Any) -> plans.AttentionPlan:
    """Attention of Llama, but for other fields that are stated."""
    bias, width = has_bias(config, "attention_bias"), head_dim_of(config)
    fields: Fields = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": width,
        "scale": width**-0.5,
        "inputs": inputs_of(at, bias),
        "out": linear(f"{at}.self_attn.o_proj", bias),
    }
    return plans.AttentionPlan(**(fields | others))


def mlp_of(config: Any, at: str, **others: Any) -> plans.MlpPlan:
    """MLP of Llama with parameters' names that begin with ``at``, but for other fields that are stated."""
    bias = has_bias(config, "mlp_bias")
    fields: Fields = {
        "ups": tuple(linear(f"{at}.{name}_proj", bias) for name in ("gate", "up")),
        "down": linear(f"{at}.down_proj", bias),
        "activation": activation_of(config),
    }
    return plans.MlpPlan(**(fields | others))


def experts_of(config: Any, at: str, **others: Any) -> plans.ExpertsPlan:
    """Experts of Qwen3 with parameters' names that begin with ``at``, but for other fields that are stated."""
    fields: Fields = {
        "num_experts": getattr(config, "num_local_experts", None) or config.num_experts,
        "router": linear(f"{at}.gate"),
        "ups": tuple(plans.MatrixPlan(f"{at}.experts.gate_up_proj", part=i, num_parts=2) for i in range(2)),
        "down": plans.MatrixPlan(f"{at}.experts.down_proj"),
        "num_active": config.num_experts_per_tok,
        "activation": others.get("activation") or activation_of(config),
        "is_normalized": getattr(config, "norm_topk_prob", True),
    }
    return plans.ExpertsPlan(**(fields | others))


def routed_experts_of(config: Any, at: str, **others: Any) -> plans.ExpertsPlan:
    """Experts of DeepSeek-V3's router, in groups, but for other fields that are stated."""
    fields: Fields = {
        "is_sigmoid": True,
        "sum_epsilon": 1e-20,
        "scale": config.routed_scaling_factor,
        "correction_bias": f"{at}.gate.e_score_correction_bias",
        "num_groups": config.n_group,
        "num_active_groups": config.topk_group,
    }
    return experts_of(config, at, **(fields | others))


def rms_fields(config: Any, at: str, names: Mapping[str, str], added: float = 0.0) -> Fields:
    """Norms of these fields, by the names of their modules."""
    return {field: rms(config, f"{at}.{name}", added) for field, name in names.items()}


def norms_of(config: Any, at: str, added: float = 0.0) -> Fields:
    names = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return rms_fields(config, at, names, added)


def layer_of(config: Any, at: str, mixer: plans.Mixer | None = None, **others: Any) -> plans.LayerPlan:
    """Layer of Llama, but for other parts that are stated."""
    fields: Fields = {"mlp": mlp_of(config, f"{at}.mlp"), **norms_of(config, at)}
    return plans.LayerPlan(mixer or attention_of(config, at), **(fields | others))


def inputs_of(at: str, has_bias: bool) -> tuple[plans.MatrixPlan, ...]:
    return tuple(linear(f"{at}.self_attn.{name}_proj", has_bias) for name in "qkv")


def halves_of(name: str) -> tuple[plans.MatrixPlan, ...]:
    """Gate and up in one matrix."""
    return tuple(linear(name, part=part, num_parts=2) for part in range(2))


def head_norms(config: Any, at: str, added: float = 0.0) -> Fields:
    return rms_fields(config, f"{at}.self_attn", {"query_norm": "q_norm", "key_norm": "k_norm"}, added)
