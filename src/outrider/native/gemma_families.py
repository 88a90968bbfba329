"""Plans of Gemma."""

from __future__ import annotations

from typing import Any

from outrider.native import parts
from outrider.native.plan import AttentionPlan, Families, LayerPlan, NormPlan, NotPlanned, PerLayerPlan, Plan

_NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _gemma(config: Any) -> Plan:
    """Gemma 1 to 3. Factors of norms are stored less 1, and embeddings are scaled in their own type."""
    if getattr(config, "use_bidirectional_attention", None):
        raise NotPlanned("its attention is bidirectional")
    has_kinds, is_third = config.model_type != "gemma", config.model_type == "gemma3_text"
    kinds = sorted(set(config.layer_types)) if is_third else []
    names = _NORMS if has_kinds else {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}

    def layer(at: str, i: int) -> LayerPlan:
        norms = {field: parts.rms(config, f"{at}.{name}", 1.0) for field, name in names.items()}
        others: dict[str, Any] = {}
        if has_kinds:
            cap = getattr(config, "attn_logit_softcapping", None)
            others = {"window": parts.window_of(config, i), "softcap": cap, "scale": config.query_pre_attn_scalar**-0.5}
        if is_third:
            others |= parts.head_norms(config, at, 1.0) | {"rope": kinds.index(config.layer_types[i])}
        return parts.layer_of(config, at, parts.attention_of(config, at, **others), **norms)

    return parts.decoder_of(
        config,
        layer,
        final_norm=parts.rms(config, "model.norm", 1.0),
        ropes=tuple(parts.rope_of(config, kind) for kind in kinds) or None,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def _gemma4(config: Any) -> Plan:
    """Gemma 4: heads and ropes by kind of layer, keys and values of earlier layers, embeddings for each layer."""
    if config.use_bidirectional_attention == "all":
        raise NotPlanned("its attention is bidirectional")
    kinds = sorted(set(config.layer_types))
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    if not {*config.layer_types[first_shared:]} <= {*config.layer_types[:first_shared]}:
        raise NotPlanned("no layer has keys and values for those that share them")
    width = config.hidden_size_per_layer_input

    def attention(at: str, i: int) -> AttentionPlan:
        kind, inputs, source = config.layer_types[i], "qkv", None
        values_are_keys = config.attention_k_eq_v and kind == "full_attention"
        if i >= first_shared:
            inputs, source = "q", max(j for j in range(first_shared) if config.layer_types[j] == kind)
        elif values_are_keys:
            inputs = "qk"
        norms = parts.head_norms(config, at)
        own = _of_kind(config, kind)
        return parts.attention_of(
            config,
            at,
            num_kv_heads=own["num_key_value_heads"],
            head_dim=own["head_dim"],
            scale=1.0,
            inputs=tuple(parts.linear(f"{at}.self_attn.{name}_proj", config.attention_bias) for name in inputs),
            source=source,
            values_are_keys=source is None and values_are_keys,
            query_norm=norms["query_norm"],
            key_norm=norms["key_norm"] if source is None else None,
            value_norm=NormPlan("rms", None, config.rms_norm_eps) if source is None else None,
            rope=kinds.index(kind),
            window=parts.window_of(config, i),
        )

    def experts(at: str) -> dict[str, Any]:
        norms = {
            field: parts.rms(config, f"{at}.{name}_2")
            for field, name in (("norm", "pre_feedforward_layernorm"), ("post_norm", "post_feedforward_layernorm"))
        }
        made = parts.experts_of(
            config,
            at,
            num_experts=config.num_experts,
            num_active=config.top_k_experts,
            router=parts.linear(f"{at}.router.proj"),
            router_norm=NormPlan("rms", f"{at}.router.scale", config.rms_norm_eps, factor=config.hidden_size**-0.5),
            scales=f"{at}.router.per_expert_scale",
            **norms,
        )
        return {
            "mlp": parts.mlp_of(config, f"{at}.mlp", post_norm=parts.rms(config, f"{at}.post_feedforward_layernorm_1")),
            "experts": made,
        }

    def layer(at: str, i: int) -> LayerPlan:
        others: dict[str, Any] = {field: parts.rms(config, f"{at}.{name}") for field, name in _NORMS.items()}
        if config.enable_moe_block:
            others |= experts(at)
        if width:
            gate, projection = parts.linear(f"{at}.per_layer_input_gate"), parts.linear(f"{at}.per_layer_projection")
            others |= {
                "per_layer_mlp": parts.mlp_of(config, at, ups=(gate,), down=projection),
                "per_layer_post_norm": parts.rms(config, f"{at}.post_per_layer_input_norm"),
            }
        return parts.layer_of(config, at, attention(at, i), scale=f"{at}.layer_scalar", **others)

    per_layer = PerLayerPlan(
        "model.embed_tokens_per_layer.weight",
        width**0.5,
        parts.linear("model.per_layer_model_projection"),
        config.hidden_size**-0.5,
        parts.rms(config, "model.per_layer_projection_norm"),
        2.0**-0.5,
    )
    return parts.decoder_of(
        config,
        layer,
        ropes=tuple(parts.rope_of(config, kind, head_dim=_of_kind(config, kind)["head_dim"]) for kind in kinds),
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=config.final_logit_softcapping,
        per_layer=per_layer if width else None,
    )


def _of_kind(config: Any, kind: str) -> dict[str, int]:
    """Sizes of Gemma 4's layers of a kind: those without a window have their own."""
    sizes: dict[str, int] = {name: getattr(config, name) for name in ("head_dim", "num_key_value_heads")}
    overrides: Any = getattr(config, "per_layer_config", None)
    if kind != "full_attention":
        return sizes
    if overrides is not None:  # as Transformers writes what a file states by the two names below
        sizes |= overrides[str(config.layer_types.index(kind))]
        return sizes
    sizes["head_dim"] = config.global_head_dim
    if config.attention_k_eq_v and (number := getattr(config, "num_global_key_value_heads", None)) is not None:
        sizes["num_key_value_heads"] = number
    return sizes


_GEMMA = "attention_bias mlp_bias hidden_activation"
_GEMMA2 = f"{_GEMMA} query_pre_attn_scalar final_logit_softcapping cache_implementation"
_GEMMA4 = (
    "attention_bias hidden_activation final_logit_softcapping use_bidirectional_attention vocab_size_per_layer_input "
    "hidden_size_per_layer_input attention_k_eq_v num_kv_shared_layers enable_moe_block use_double_wide_mlp "
    "num_experts top_k_experts moe_intermediate_size per_layer_config global_head_dim num_global_key_value_heads"
)
FAMILIES: Families = {
    "gemma": (_gemma, _GEMMA),
    "gemma2": (_gemma, f"{_GEMMA2} attn_logit_softcapping"),
    "gemma3_text": (_gemma, f"{_GEMMA2} _sliding_window_pattern sliding_window_pattern"),
    "gemma4_text": (_gemma4, _GEMMA4),
}
