"""Models with recurrent or convolutional layers, as GGUF files state them.

Source: llama.cpp's src/models/*.cpp and conversion/*.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from typing import Any

from outrider.models.gguf.family import ENDS, Family
from outrider.models.gguf.keys import Stated, head_size, rope_parameters


def _lfm2(stated: Stated) -> dict[str, Any]:
    num_heads = stated.take("attention.head_count")
    per_layer = stated.take("attention.head_count_kv")  # none in a layer of convolutions
    counts = {count for count in per_layer if count} if isinstance(per_layer, list) else set()
    if len(counts) != 1 or len(per_layer) != stated.take("block_count"):
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


HYBRIDS = {
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
