"""Granite's models, with and without experts and layers of Mamba-2, as GGUF files state them.

Source: llama.cpp's src/models/granite*.cpp and conversion/granite.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from typing import Any

from outrider.models.gguf.family import DECODER, Family, pairs_to_halves
from outrider.models.gguf.keys import Stated, expert_fields, head_fields, whole_fields
from outrider.models.gguf.mamba import MAMBA_CHANGES, mamba_sizes, mamba_tensors


def _granite(stated: Stated) -> dict[str, Any]:
    has_rope = stated.take("rope.scaling.finetuned", True)
    if not has_rope and stated.architecture != "granitehybrid":
        raise stated.refusal("rope.scaling.finetuned", has_rope)
    return {
        **whole_fields(stated),
        "attention_bias": stated.has("blk.0.attn_output.bias"),
        # 0 stands for none.
        "attention_multiplier": stated.take("attention.scale", 0.0) or head_fields(stated)["head_dim"] ** -0.5,
        "embedding_multiplier": stated.take("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": stated.take("residual_scale", 0.0) or 1.0,
        "logits_scaling": stated.take("logit_scale", 0.0) or 1.0,
    }


def _granitemoe(stated: Stated) -> dict[str, Any]:
    moe = expert_fields(stated, number="num_local_experts")
    del moe["moe_intermediate_size"]
    return _granite(stated) | moe | {"shared_intermediate_size": stated.take("expert_shared_feed_forward_length", 0)}


def _granitehybrid(stated: Stated) -> dict[str, Any]:
    has_experts = stated.take("expert_count", 0) > 0
    fields = _granitemoe(stated) if has_experts else _granite(stated) | {"num_local_experts": 0}
    width = stated.take("expert_shared_feed_forward_length", fields["intermediate_size"])
    sizes = mamba_sizes(stated)
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


_EXPERTS = DECODER | {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_up_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_SHARED = {  # of hybrids without experts
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
}

GRANITES = {
    "granite": Family("granite", _granite, order=pairs_to_halves),
    "granitemoe": Family("granitemoeshared", _granitemoe, tensors=_EXPERTS, order=pairs_to_halves),
    "granitehybrid": Family(
        "granitemoehybrid",
        _granitehybrid,
        tensors=_EXPERTS | _SHARED | mamba_tensors("mamba"),
        order=pairs_to_halves,
        changes=MAMBA_CHANGES,
    ),
}
