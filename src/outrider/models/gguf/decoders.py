"""Decoders whose layers all have attention, as GGUF files state them.

Source: llama.cpp's src/models/*.cpp and conversion/*.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.gguf.family import DECODER, EXPERTS, NORMS_OF_HEADS, Family
from outrider.models.gguf.keys import (
    Stated,
    decoder_fields,
    expert_fields,
    head_fields,
    layer_types,
    query_scale,
    whole_fields,
    window_of_all,
)


def _llama(stated: Stated) -> dict[str, Any]:
    biases = {"attention_bias": stated.has("blk.0.attn_q.bias"), "mlp_bias": stated.has("blk.0.ffn_up.bias")}
    return decoder_fields(stated) | biases


def _qwen3(stated: Stated) -> dict[str, Any]:
    return decoder_fields(stated) | {"attention_bias": stated.has("blk.0.attn_q.bias")}


def _qwen3moe(stated: Stated) -> dict[str, Any]:
    return _qwen3(stated) | expert_fields(stated, is_normalized=True)


def _gemma2(stated: Stated) -> dict[str, Any]:
    fields = decoder_fields(stated)
    base = fields["rope_parameters"]["rope_theta"]
    if (local := stated.take("rope.freq_base_swa", base)) != base:
        raise stated.refusal("rope.freq_base_swa", local)
    return {
        **fields,
        **query_scale(stated, fields, 46),
        "attn_logit_softcapping": stated.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0),
        "sliding_window": stated.take("attention.sliding_window", 4096),
        "layer_types": layer_types(stated, 2),
    }


def _gemma3(stated: Stated) -> dict[str, Any]:
    fields = decoder_fields(stated)
    window, types = stated.take("attention.sliding_window", 0), layer_types(stated, 6)
    local = {"rope_type": "default", "rope_theta": stated.take("rope.freq_base_swa", 10_000.0)}
    return {
        **fields,
        **query_scale(stated, fields, 62),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": stated.take("final_logit_softcapping", 0.0) or None,
        "sliding_window": window,
        "layer_types": types if window else ["full_attention"] * len(types),
    }


def _phi3(stated: Stated) -> dict[str, Any]:
    # llama.cpp ignores the window, and says that results suffer; Transformers' model, which is the authors', has it.
    rope = whole_fields(stated, is_partial=True)
    original = rope["rope_parameters"].get("original_max_position_embeddings", stated.take("context_length"))
    return rope | {"sliding_window": window_of_all(stated), "original_max_position_embeddings": original}


def _gpt2(stated: Stated) -> dict[str, Any]:
    heads = head_fields(stated)
    if heads["num_key_value_heads"] != heads["num_attention_heads"]:
        raise stated.refusal("attention.head_count_kv", heads["num_key_value_heads"])
    return {"num_attention_heads": heads["num_attention_heads"], "n_inner": stated.single("feed_forward_length")}


def _pairs_to_halves(name: str, config: Any) -> Tensor | None:
    """Llama's order: llama.cpp rotates neighbouring dimensions of a head, Transformers i with i + head_dim / 2."""
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if num_heads is None:
        return None
    return torch.arange(num_heads * config.head_dim).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _less_one(numbers: Tensor) -> Tensor:
    return numbers - 1


_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_FROM_ONE = {f"{name}.weight": _less_one for name in _NORMS}
_GEMMA2 = DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NORM = "attention.layer_norm_epsilon"

DECODERS = {
    "llama": Family("llama", _llama, order=_pairs_to_halves),
    "qwen2": Family("qwen2", decoder_fields),
    "qwen3": Family("qwen3", _qwen3, tensors=DECODER | NORMS_OF_HEADS),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, tensors=DECODER | NORMS_OF_HEADS | EXPERTS),
    "gemma": Family("gemma", decoder_fields, changes=_FROM_ONE),
    "gemma2": Family("gemma2", _gemma2, tensors=_GEMMA2, changes=_FROM_ONE),
    "gemma3": Family("gemma3_text", _gemma3, tensors=_GEMMA2 | NORMS_OF_HEADS, changes=_FROM_ONE),
    "phi3": Family("phi3", _phi3, tensors=DECODER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "starcoder2": Family(
        "starcoder2",
        whole_fields,
        ("norm_epsilon", _LAYER_NORM),
        tensors=DECODER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "gpt2": Family(
        "gpt2",
        _gpt2,
        ("layer_norm_epsilon", _LAYER_NORM),
        "transformer.h",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        changes=dict.fromkeys(("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"), torch.t),
    ),
}
