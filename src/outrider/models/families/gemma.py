"""Gemma's families, in config.json, GGUF files and plans."""

from __future__ import annotations

import statistics
from typing import Any

from outrider.errors import ModelCorrupt
from outrider.models.families import parts
from outrider.models.families.family import Family, Fields, periodic
from outrider.models.gguf import keys
from outrider.models.gguf.keys import Stated
from outrider.models.gguf.tensors import FROM_ONE, GgufForm
from outrider.native.plan import AttentionPlan, LayerPlan, NormPlan, NotPlanned, PerLayerPlan, Plan

_NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

# Gemma 1 to 3. Factors of norms are stored less 1, and embeddings are scaled in their own type.


def _gemma_whole(config: Any) -> Fields:
    return {
        "final_norm": parts.rms(config, "model.norm", 1.0),
        "embedding_scale": config.hidden_size**0.5,
        "logit_softcap": getattr(config, "final_logit_softcapping", None),
    }


def _gemma2_attention(config: Any, at: str, i: int) -> Fields:
    cap = getattr(config, "attn_logit_softcapping", None)
    return {"window": parts.window_of(config, i), "softcap": cap, "scale": config.query_pre_attn_scalar**-0.5}


def _gemma2_layer(config: Any, at: str, i: int) -> Fields:
    return parts.rms_fields(config, at, _NORMS, 1.0)


def _gemma3_attention(config: Any, at: str, i: int) -> Fields:
    return _gemma2_attention(config, at, i) | parts.head_norms(config, at, 1.0) | parts.rope_of_kind(config, i)


def _gemma4(config: Any) -> Plan:
    """Gemma 4: heads and ropes by kind of layer, keys and values of earlier layers, embeddings for each layer."""
    if config.use_bidirectional_attention == "all":
        raise NotPlanned("its attention is bidirectional")
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
        norms, own = parts.head_norms(config, at), _of_kind(config, kind)
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
            value_norm=NormPlan("rms", None, config.epsilon) if source is None else None,
            **parts.rope_of_kind(config, i),
            window=parts.window_of(config, i),
        )

    def experts(at: str) -> Fields:
        names = {"norm": "pre_feedforward_layernorm_2", "post_norm": "post_feedforward_layernorm_2"}
        made = parts.experts_of(
            config,
            at,
            router=parts.linear(f"{at}.router.proj"),
            router_norm=NormPlan("rms", f"{at}.router.scale", config.epsilon, factor=config.hidden_size**-0.5),
            scales=f"{at}.router.per_expert_scale",
            **parts.rms_fields(config, at, names),
        )
        norm = parts.rms(config, f"{at}.post_feedforward_layernorm_1")
        return {"mlp": parts.mlp_of(config, f"{at}.mlp", post_norm=norm), "experts": made}

    def layer(at: str, i: int) -> LayerPlan:
        others = parts.rms_fields(config, at, _NORMS)
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
    sizes = {kind: _of_kind(config, kind)["head_dim"] for kind in sorted({*config.layer_types})}
    return parts.decoder_of(
        config,
        layer,
        ropes=tuple(parts.rope_of(config, kind, head_dim=size) for kind, size in sizes.items()),
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=config.final_logit_softcapping,
        per_layer=per_layer if width else None,
    )


def _of_kind(config: Any, kind: str) -> dict[str, int]:
    """Sizes of Gemma 4's layers of a kind: those without a window have their own."""
    sizes: dict[str, int] = {name: getattr(config, name) for name in ("head_dim", "num_key_value_heads")}
    overrides: Any = getattr(config, "per_layer_config", None)
    if kind == "full_attention" and overrides is not None:  # Transformers' form of the two fields below
        sizes |= overrides[str(config.layer_types.index(kind))]
    elif kind == "full_attention":
        sizes["head_dim"] = config.global_head_dim
        if config.attention_k_eq_v and (number := getattr(config, "num_global_key_value_heads", None)) is not None:
            sizes["num_key_value_heads"] = number
    return sizes


def _gemma2_gguf(stated: Stated) -> Fields:
    fields = keys.decoder_fields(stated)
    stated.check("rope.freq_base_swa", fields["rope_parameters"]["rope_theta"])
    return {
        **fields,
        **keys.query_scale(stated, fields, 46),
        "attn_logit_softcapping": stated.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0),
        "sliding_window": stated.take("attention.sliding_window", 4096),
        "layer_types": keys.layer_types(stated, 2),
    }


def _gemma3_gguf(stated: Stated) -> Fields:
    fields = keys.decoder_fields(stated)
    window, types = stated.take("attention.sliding_window", 0), keys.layer_types(stated, 6)
    return {
        **fields,
        **keys.query_scale(stated, fields, 62),
        **keys.two_ropes(stated, fields["rope_parameters"]),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 0.0) or None,
        "sliding_window": window,
        "layer_types": types if window else ["full_attention"] * len(types),
    }


def _num_shared(stated: Stated, default: int | None = None) -> int:
    """Number of the last layers, which read keys and values of layers before. Some checkpoints have matrices for their
    own, which are not used. Raises ModelCorrupt: no layer is before them."""
    number: int = stated.take("attention.shared_kv_layers", default)
    if not 0 <= number < stated.num_layers:
        raise ModelCorrupt(
            f"{stated.name}: the file states {stated.num_layers} layers, and that the last {number} of them read keys "
            "and values of others (attention.shared_kv_layers)"
        )
    for i in range(stated.num_layers - number, stated.num_layers):
        stated.read_tensors |= {f"blk.{i}.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")}
    return number


def _gemma4_assistant(stated: Stated) -> Fields:
    """An assistant, whose layers read keys and values of its target. Groups of tokens have no effect: the file does not
    state how many are chosen."""
    stated.check("attention.shared_kv_layers", stated.num_layers)
    stated.read_tensors |= {name for name in stated.file.tensors if name.startswith("masked_embd_")}
    fields = _gemma4_fields(stated) | {"num_kv_shared_layers": stated.num_layers, "vocab_size_per_layer_input": 0}
    num_heads, width = fields["num_attention_heads"], stated.take("embedding_length")
    for i, kind in enumerate(fields["layer_types"]):  # before anything is made that is as long as the keys state
        size = fields["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        stated.check_shape(f"blk.{i}.attn_q.weight", num_heads * size, width)
    return fields


def _gemma4_fields(stated: Stated) -> Fields:
    types = keys.layer_types(stated, 6)
    if types[-1] != "full_attention":
        raise stated.refusal("attention.sliding_window_pattern", types)
    sizes = {name: stated.take(f"attention.{name}") for name in ("key_length", "key_length_swa")}
    for name, size in sizes.items():
        stated.check(f"attention.{name.replace('key', 'value')}", size)
    stated.check("rope.dimension_count_swa", sizes["key_length_swa"])
    # Layers with a window have a number of heads, and those without have another.
    counts, widths = stated.each("attention.head_count_kv"), stated.each("feed_forward_length")
    heads = dict(zip(types, counts, strict=True))
    if [heads[kind] for kind in types] != counts:
        raise stated.refusal("attention.head_count_kv", counts)
    fields = {
        "num_attention_heads": stated.single("attention.head_count"),
        "num_key_value_heads": heads.get("sliding_attention", heads["full_attention"]),
        "num_global_key_value_heads": heads["full_attention"],
        "attention_k_eq_v": not stated.has(f"blk.{types.index('full_attention')}.attn_v.weight"),
        "head_dim": sizes["key_length_swa"],
        "global_head_dim": sizes["key_length"],
        "layer_types": types,
        "sliding_window": stated.take("attention.sliding_window"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": 2 * widths[0] in widths,
        **keys.two_ropes(stated, keys.proportional_rope(stated, sizes["key_length"])),
        "hidden_size_per_layer_input": stated.take("embedding_length_per_layer_input"),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0) or None,
    }
    if stated.has(per_layer := "per_layer_token_embd.weight"):
        fields["vocab_size_per_layer_input"] = stated.rows(per_layer)
    if stated.take("expert_count", 0):
        moe = keys.expert_fields(stated)
        fields |= {"enable_moe_block": True, "top_k_experts": moe.pop("num_experts_per_tok"), **moe}
    return fields


def _gemma3n_gguf(stated: Stated) -> Fields:
    fields, sparsity = keys.decoder_fields(stated), stated.each("activation_sparsity_scale")
    return {
        **fields,
        **keys.two_ropes(stated, fields["rope_parameters"]),
        "layer_types": keys.layer_types(stated, 5),
        "sliding_window": stated.take("attention.sliding_window"),
        "num_kv_shared_layers": _num_shared(stated),
        "hidden_size_per_layer_input": stated.take("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": stated.rows("per_layer_token_embd.weight"),
        "altup_active_idx": stated.take("altup.active_idx"),
        "altup_num_inputs": stated.take("altup.num_inputs"),
        "laurel_rank": stated.rows("blk.0.laurel_l.weight"),
        # The file has quantiles of the normal distribution, and the share of zeros is a probability.
        "activation_sparsity_pattern": [statistics.NormalDist().cdf(one) for one in sparsity],
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0) or None,
    }


_ALTUP = {
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}

_OWN = "attention_bias mlp_bias"
_USUAL: Fields = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256}

GEMMAS = {
    "gemma": Family(
        parts.like_llama(layer=lambda c, at, i: parts.norms_of(c, at, 1.0), whole=_gemma_whole),
        _OWN,
        _USUAL | {"hidden_act": "gelu_pytorch_tanh"},  # files state both activations
        # of the first files, whose models were trained with the other
        completed=lambda f: {"hidden_act": "gelu_pytorch_tanh"} if f["hidden_act"] == "gelu" else {},
        gguf={"gemma": GgufForm(keys.decoder_fields, changes=FROM_ONE)},
    ),
    "gemma2": Family(
        parts.like_llama(_gemma2_attention, _gemma2_layer, _gemma_whole),
        f"{_OWN} query_pre_attn_scalar cache_implementation",
        _USUAL | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        activation="hidden_activation",
        layer_types=periodic("sliding_attention", 2),
        gguf={"gemma2": GgufForm(_gemma2_gguf, changes=FROM_ONE)},
    ),
    "gemma3_text": Family(
        parts.like_llama(*(_gemma3_attention, _gemma2_layer), lambda c: _gemma_whole(c) | parts.ropes_of_kinds(c)),
        f"{_OWN} query_pre_attn_scalar final_logit_softcapping cache_implementation _sliding_window_pattern "
        "sliding_window_pattern",
        _USUAL | {"rope_theta": 1_000_000.0},
        activation="hidden_activation",
        layer_types=periodic("sliding_attention", 6, "sliding_window_pattern"),
        has_two_ropes=True,
        gguf={"gemma3": GgufForm(_gemma3_gguf, changes=FROM_ONE)},
    ),
    "gemma3n_text": Family(gguf={"gemma3n": GgufForm(_gemma3n_gguf, stacks=_ALTUP)}),
    "gemma4_text": Family(
        _gemma4,
        "final_logit_softcapping vocab_size_per_layer_input hidden_size_per_layer_input attention_k_eq_v "
        "num_kv_shared_layers use_double_wide_mlp num_experts moe_intermediate_size per_layer_config "
        "num_global_key_value_heads",
        _USUAL
        | {"attention_bias": False, "global_head_dim": 512, "use_bidirectional_attention": None}
        | {"enable_moe_block": False},
        {"num_experts_per_tok": "top_k_experts"},
        activation="hidden_activation",
        has_two_ropes=True,
        has_scaled_rope=True,
        gguf={
            "gemma4": GgufForm(lambda stated: _gemma4_fields(stated) | {"num_kv_shared_layers": _num_shared(stated, 0)})
        },
    ),
}
ASSISTANT = GgufForm(_gemma4_assistant)
"""A head, no model: its configuration is that of its layers."""
