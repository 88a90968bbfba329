"""Decoders whose layers all have attention, as GGUF files state them.

Source: llama.cpp's src/models/*.cpp and conversion/*.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.gguf.family import DECODER, ENDS, EXPERTS, FROM_ONE, NORMS_OF_HEADS, Family
from outrider.models.gguf.keys import (
    Stated,
    decoder_fields,
    expert_fields,
    head_fields,
    layer_types,
    proportional_rope,
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


def _gemma4(stated: Stated) -> dict[str, Any]:
    num_layers, num_shared = stated.num_layers, stated.take("attention.shared_kv_layers", 0)
    types = layer_types(stated, 6)
    if types[-1] != "full_attention":
        raise stated.refusal("attention.sliding_window_pattern", types)
    sizes = {name: stated.take(f"attention.{name}") for name in ("key_length", "key_length_swa")}
    for name, size in sizes.items():
        if (own := stated.take(f"attention.{name.replace('key', 'value')}", size)) != size:
            raise stated.refusal(f"attention.{name.replace('key', 'value')}", own)
    if (rotated := stated.take("rope.dimension_count_swa", sizes["key_length_swa"])) != sizes["key_length_swa"]:
        raise stated.refusal("rope.dimension_count_swa", rotated)
    # Layers with a window have a number of heads, and those without have another.
    heads = dict(zip(types, stated.each("attention.head_count_kv"), strict=True))
    if [heads[kind] for kind in types] != stated.each("attention.head_count_kv"):
        raise stated.refusal("attention.head_count_kv", stated.each("attention.head_count_kv"))
    widths = stated.each("feed_forward_length")
    is_wider = [width == 2 * widths[0] for width in widths]
    first_shared = num_layers - num_shared
    for i in range(first_shared, num_layers):  # not used, though some checkpoints have them
        stated.read_tensors |= {f"blk.{i}.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")}
    whole = types.index("full_attention")
    per_layer = "per_layer_token_embd.weight"
    fields = {
        "num_attention_heads": stated.single("attention.head_count"),
        "num_key_value_heads": heads.get("sliding_attention", heads["full_attention"]),
        "num_global_key_value_heads": heads["full_attention"],
        "attention_k_eq_v": not stated.has(f"blk.{whole}.attn_v.weight"),
        "head_dim": sizes["key_length_swa"],
        "global_head_dim": sizes["key_length"],
        "layer_types": types,
        "sliding_window": stated.take("attention.sliding_window"),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": any(is_wider),
        "rope_parameters": {
            "full_attention": proportional_rope(stated, sizes["key_length"]),
            "sliding_attention": {"rope_type": "default", "rope_theta": stated.take("rope.freq_base_swa", 10_000.0)},
        },
        "hidden_size_per_layer_input": stated.take("embedding_length_per_layer_input"),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0) or None,
    }
    if stated.has(per_layer):
        fields["vocab_size_per_layer_input"] = stated.file.tensors[per_layer].shape[0]
    if stated.take("expert_count", 0):
        moe = expert_fields(stated, is_normalized=True)
        fields |= {"enable_moe_block": True, "top_k_experts": moe["num_experts_per_tok"]}
        fields |= {key: moe[key] for key in ("num_experts", "moe_intermediate_size")}
    return fields


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


_GEMMA2 = DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_GEMMA2,
    **NORMS_OF_HEADS,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_up_proj",
    "ffn_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_PER_LAYER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER_NORM = "attention.layer_norm_epsilon"

DECODERS = {
    "llama": Family("llama", _llama, order=_pairs_to_halves),
    "qwen2": Family("qwen2", decoder_fields),
    "qwen3": Family("qwen3", _qwen3, tensors=DECODER | NORMS_OF_HEADS),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, tensors=DECODER | NORMS_OF_HEADS | EXPERTS),
    "gemma": Family("gemma", decoder_fields, changes=FROM_ONE),
    "gemma2": Family("gemma2", _gemma2, tensors=_GEMMA2, changes=FROM_ONE),
    "gemma3": Family("gemma3_text", _gemma3, tensors=_GEMMA2 | NORMS_OF_HEADS, changes=FROM_ONE),
    "gemma4": Family("gemma4_text", _gemma4, tensors=_GEMMA4, ends=ENDS | _PER_LAYER),
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
