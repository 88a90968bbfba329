"""Granite's families, in config.json, GGUF files and plans."""

from __future__ import annotations

from typing import Any

from outrider.models.families import decoders, mamba, parts
from outrider.models.families.family import Family, Fields
from outrider.models.gguf import keys
from outrider.models.gguf.keys import Stated
from outrider.models.gguf.tensors import GgufForm, pairs_to_halves
from outrider.native.plan import LayerPlan, Mixer, NotPlanned, Plan


def _attention(config: Any, at: str, i: int) -> Fields:
    return {"scale": config.attention_multiplier}


def _scales(config: Any) -> Fields:
    return {
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def _experts(config: Any, at: str, i: int) -> Fields:
    block = f"{at}.block_sparse_moe"
    return {"mlp": None, "experts": parts.experts_of(config, block, router=parts.linear(f"{block}.router"))}


def _hybrid(config: Any) -> Plan:
    """Granite 4: Mamba-2 in most layers."""
    mamba.check_silu(config)
    if config.mamba_n_groups != 1:  # which Transformers before 5.23 normalizes as one
        raise NotPlanned(f"its plan does not know mamba_n_groups={config.mamba_n_groups}")
    has_ropes = config.position_embedding_type == "rope"

    def layer(at: str, i: int) -> LayerPlan:
        mixer: Mixer
        if config.layer_types[i] in mamba.RECURRENT:
            mixer = mamba.mamba2_of(config, f"{at}.mamba")
        else:
            rope = 0 if has_ropes else None
            mixer = parts.attention_of(config, at, scale=config.attention_multiplier, rope=rope)
        ups, down = parts.halves_of(f"{at}.shared_mlp.input_linear"), parts.linear(f"{at}.shared_mlp.output_linear")
        experts = _experts(config, at, i) if config.num_local_experts else {}
        return parts.layer_of(config, at, mixer, **experts | {"mlp": parts.mlp_of(config, at, ups=ups, down=down)})

    return parts.decoder_of(config, layer, ropes=(parts.rope_of(config),) if has_ropes else (), **_scales(config))


def _gguf(stated: Stated) -> Fields:
    has_rope = stated.take("rope.scaling.finetuned", True)
    if not has_rope and stated.architecture != "granitehybrid":
        raise stated.refusal("rope.scaling.finetuned", has_rope)
    return {
        **keys.whole_fields(stated),
        "attention_bias": stated.has("blk.0.attn_output.bias"),
        # 0 stands for none.
        "attention_multiplier": stated.take("attention.scale", 0.0) or keys.head_fields(stated)["head_dim"] ** -0.5,
        "embedding_multiplier": stated.take("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": stated.take("residual_scale", 0.0) or 1.0,
        "logits_scaling": stated.take("logit_scale", 0.0) or 1.0,
    }


def _gguf_with_experts(stated: Stated) -> Fields:
    moe = keys.expert_fields(stated, number="num_local_experts")
    del moe["moe_intermediate_size"]
    return _gguf(stated) | moe | {"shared_intermediate_size": stated.take("expert_shared_feed_forward_length", 0)}


def _gguf_of_hybrid(stated: Stated) -> Fields:
    has_experts = stated.take("expert_count", 0) > 0
    fields = _gguf_with_experts(stated) if has_experts else _gguf(stated) | {"num_local_experts": 0}
    width = stated.take("expert_shared_feed_forward_length", fields["intermediate_size"])
    sizes = mamba.sizes_of(stated)
    if sizes["mamba_n_groups"] != 1:  # of which llama.cpp takes norms apart, and Transformers together
        raise stated.refusal("ssm.group_count", sizes["mamba_n_groups"])
    return {
        **fields,
        **sizes,
        "shared_intermediate_size": width,
        "mamba_expand": sizes["mamba_n_heads"] * sizes["mamba_d_head"] // stated.take("embedding_length"),
        "layer_types": ["attention" if count else "mamba" for count in stated.each("attention.head_count_kv")],
        "position_embedding_type": "rope" if stated.take("rope.scaling.finetuned", True) else "nope",
    }


_MULTIPLIERS = "embedding_multiplier attention_multiplier residual_multiplier logits_scaling"


GRANITES = {
    "granite": Family(
        parts.like_llama(_attention, whole=_scales),
        f"{decoders.BIASES} {_MULTIPLIERS}",
        decoders.NO_GROUPS,
        gguf={"granite": GgufForm(_gguf, order=pairs_to_halves)},
    ),
    "granitemoe": Family(
        parts.like_llama(_attention, _experts, _scales),
        f"{_MULTIPLIERS} attention_bias num_experts_per_tok num_local_experts num_experts",
        decoders.NO_GROUPS,
    ),
    "granitemoeshared": Family(gguf={"granitemoe": GgufForm(_gguf_with_experts, order=pairs_to_halves)}),
    "granitemoehybrid": Family(
        _hybrid,
        f"{_MULTIPLIERS} {mamba.OWN} attention_bias num_local_experts num_experts_per_tok shared_intermediate_size "
        "position_embedding_type",
        {**decoders.NO_GROUPS, **mamba.USUAL},
        {"layer_types": "layers_block_type"},
        gguf={"granitehybrid": GgufForm(_gguf_of_hybrid, order=pairs_to_halves, changes=mamba.CHANGES)},
    ),
}
