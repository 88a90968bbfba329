"""Models with recurrent or convolutional layers, as GGUF files state them.

Source: llama.cpp's src/models/*.cpp and conversion/*.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.gguf.family import DECODER, ENDS, EXPERTS, FROM_ONE, NORMS_OF_HEADS, SHARED_EXPERT, Family
from outrider.models.gguf.keys import Stated, decoder_fields, expert_fields, head_size, rope_parameters


def _lfm2(stated: Stated) -> dict[str, Any]:
    num_heads = stated.take("attention.head_count")
    per_layer = stated.each("attention.head_count_kv")  # none in a layer of convolutions
    counts = {count for count in per_layer if count}
    if len(counts) != 1:
        raise stated.refusal("attention.head_count_kv", per_layer)
    if (head_dim := head_size(stated, num_heads)) * num_heads != stated.take("embedding_length"):
        raise stated.refusal("attention.key_length", head_dim)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": counts.pop(),
        "intermediate_size": stated.single("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in per_layer],
        "conv_L_cache": stated.take("shortconv.l_cache"),
        "rope_parameters": rope_parameters(stated, head_dim),
    }


def _qwen35(stated: Stated) -> dict[str, Any]:
    fields = decoder_fields(stated, is_partial=True)
    # Parts of a head that are rotated by other axes of an image, all of which are one in text.
    sections = stated.take("rope.dimension_sections")
    interval = stated.take("full_attention_interval", 4)
    is_recurrent = stated.each(
        "attention.recurrent_layers", [(i + 1) % interval != 0 for i in range(stated.num_layers)]
    )
    num_values, inner = stated.take("ssm.time_step_rank"), stated.take("ssm.inner_size")
    fields["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return {
        **fields,
        "layer_types": ["linear_attention" if one else "full_attention" for one in is_recurrent],
        "linear_conv_kernel_dim": stated.take("ssm.conv_kernel"),
        "linear_key_head_dim": stated.take("ssm.state_size"),
        "linear_value_head_dim": inner // num_values,
        "linear_num_key_heads": stated.take("ssm.group_count"),
        "linear_num_value_heads": num_values,
    }


def _qwen35moe(stated: Stated) -> dict[str, Any]:
    fields = _qwen35(stated) | expert_fields(stated, is_normalized=True)
    del fields["intermediate_size"], fields["norm_topk_prob"]
    return fields | {"shared_expert_intermediate_size": stated.take("expert_shared_feed_forward_length")}


def _value_heads(name: str, config: Any) -> Tensor | None:
    """Rows of a DeltaNet layer. The heads of values that share a head of keys are neighbours in Transformers; the file
    has the first of each head of keys first."""
    if name not in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_conv1d", "ssm_dt", "ssm_a"):
        return None
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    if num_keys == num_values:
        return None
    size = config.linear_value_head_dim if name in ("attn_qkv", "attn_gate", "ssm_conv1d") else 1
    num_before = 2 * num_keys * config.linear_key_head_dim if name in ("attn_qkv", "ssm_conv1d") else 0
    order = torch.arange(num_values * size).view(num_values // num_keys, num_keys, size).transpose(0, 1).flatten()
    return torch.cat((torch.arange(num_before), num_before + order))


_QWEN35 = {
    **{name: module for name, module in DECODER.items() if name != "ffn_norm"},
    **NORMS_OF_HEADS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_NET: dict[str, Any] = {
    "order": _value_heads,
    "columns": lambda name, config: _value_heads("attn_gate", config) if name == "ssm_out" else None,
    "changes": {
        **FROM_ONE,
        "ssm_conv1d.weight": lambda numbers: numbers.unsqueeze(1),
        "ssm_a": lambda numbers: numbers.neg().log(),
        "ffn_gate_inp_shexp.weight": lambda numbers: numbers.reshape(1, -1),
    },
}

HYBRIDS = {
    "qwen35": Family("qwen3_5_text", _qwen35, tensors=_QWEN35, **_DELTA_NET),
    "qwen35moe": Family("qwen3_5_moe_text", _qwen35moe, tensors=_QWEN35 | EXPERTS | SHARED_EXPERT, **_DELTA_NET),
    "lfm2": Family(
        "lfm2",
        _lfm2,
        ("norm_eps", "attention.layer_norm_rms_epsilon"),
        tensors={
            "attn_norm": "operator_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
            "shortconv.conv": "conv.conv",
        },
        ends=ENDS | {"token_embd_norm": "model.embedding_norm"},
        changes={"shortconv.conv.weight": lambda numbers: numbers.unsqueeze(1)},
    ),
}
