"""Decoders whose layers all have attention, as GGUF files state them.

Source: llama.cpp's src/models/*.cpp and conversion/*.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from outrider.models.gguf import keys
from outrider.models.gguf.family import DECODER, EXPERTS, NORMS_OF_HEADS, SHARED_EXPERT, Family, pairs_to_halves


def _llama(stated: keys.Stated) -> dict[str, Any]:
    biases = {"attention_bias": stated.has("blk.0.attn_q.bias"), "mlp_bias": stated.has("blk.0.ffn_up.bias")}
    return keys.decoder_fields(stated) | biases


def _qwen3(stated: keys.Stated) -> dict[str, Any]:
    return keys.decoder_fields(stated) | {"attention_bias": stated.has("blk.0.attn_q.bias")}


def _qwen3moe(stated: keys.Stated) -> dict[str, Any]:
    return _qwen3(stated) | keys.expert_fields(stated) | {"norm_topk_prob": True}


def _gpt_oss(stated: keys.Stated) -> dict[str, Any]:
    fields, number = keys.decoder_fields(stated), "num_local_experts"
    moe = keys.expert_fields(stated, number=number, is_normalized=False, gate=keys.SOFTMAX_OF_CHOSEN)
    rope = fields["rope_parameters"]
    stated.check("rope.freq_base_swa", rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        # No key says that its bounds are not rounded, as the authors' model has them; llama.cpp rounds them.
        rope["truncate"] = False
    return {
        **fields,
        "intermediate_size": moe.pop("moe_intermediate_size"),
        **moe,
        "sliding_window": stated.take("attention.sliding_window"),
        "layer_types": keys.layer_types(stated, 2),
    }


def _glm4(stated: keys.Stated) -> dict[str, Any]:
    fields = keys.decoder_fields(stated, is_partial=True)
    fields["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return fields | {"attention_bias": stated.has("blk.0.attn_q.bias")}


def _glm4moe(stated: keys.Stated) -> dict[str, Any]:
    return {
        **_glm4(stated),
        **keys.routed_fields(stated, False),
        "first_k_dense_replace": stated.take("leading_dense_block_count", 0),
        "use_qk_norm": stated.has("blk.0.attn_q_norm.weight"),
    }


def _olmo2(stated: keys.Stated) -> dict[str, Any]:
    fields = keys.whole_fields(stated)
    window = stated.take("attention.sliding_window", 0)
    if not window:
        return fields
    full = fields["rope_parameters"]
    fields |= keys.two_ropes(stated, full, full["rope_theta"])
    return fields | {"model_type": "olmo3", "sliding_window": window, "layer_types": keys.layer_types(stated, 4)}


def _mistral3(stated: keys.Stated) -> dict[str, Any]:
    fields = keys.decoder_fields(stated)
    rope, beta = fields["rope_parameters"], stated.take("attention.temperature_scale", 0.0)
    if mscale := stated.take("rope.scaling.yarn_log_multiplier", 0.0):
        if rope["rope_type"] != "yarn":
            raise stated.refusal("rope.scaling.yarn_log_multiplier", mscale)
        rope["attention_factor"] /= 0.1 * mscale * math.log(rope["factor"]) + 1.0
    if not beta:
        return fields | {"model_type": "mistral", "sliding_window": None}
    original = stated.take("rope.scaling.original_context_length", stated.take("context_length"))
    rope |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    return fields


def _phi3(stated: keys.Stated) -> dict[str, Any]:
    # llama.cpp ignores the window, and says that results suffer; Transformers' model, which is the authors', has it.
    rope = keys.whole_fields(stated, is_partial=True)
    original = rope["rope_parameters"].get("original_max_position_embeddings", stated.take("context_length"))
    return rope | {"sliding_window": keys.window_of_all(stated), "original_max_position_embeddings": original}


def _gpt2(stated: keys.Stated) -> dict[str, Any]:
    heads = keys.head_fields(stated)
    if heads["num_key_value_heads"] != heads["num_attention_heads"]:
        raise stated.refusal("attention.head_count_kv", heads["num_key_value_heads"])
    return {"num_attention_heads": heads["num_attention_heads"], "n_inner": stated.single("feed_forward_length")}


def _interleaved(numbers: Tensor) -> Tensor:
    """Gates and others of all experts in turn: [E, 2I, H] -> [E, H, 2I]."""
    gates_first: Tensor = numbers.unflatten(1, (2, -1))
    return gates_first.permute(0, 3, 2, 1).flatten(2)


def _interleaved_biases(numbers: Tensor) -> Tensor:
    """Biases of gates and others in turn: [2E, I] -> [E, 2I]."""
    gates_first: Tensor = numbers.unflatten(0, (2, -1))
    return gates_first.permute(1, 2, 0).flatten(1)


_WITHOUT_FFN_NORM = {name: module for name, module in DECODER.items() if name != "ffn_norm"}
_OLMO2 = {
    **{name: module for name, module in DECODER.items() if not name.endswith("norm")},
    **NORMS_OF_HEADS,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NORM = "attention.layer_norm_epsilon"

DECODERS = {
    "llama": Family("llama", _llama, order=pairs_to_halves),
    "qwen2": Family("qwen2", keys.decoder_fields),
    "qwen3": Family("qwen3", _qwen3, tensors=DECODER | NORMS_OF_HEADS),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, tensors=DECODER | NORMS_OF_HEADS | EXPERTS),
    "gpt-oss": Family(
        "gpt_oss",
        _gpt_oss,
        tensors={
            **{name: module for name, module in DECODER.items() if not name.startswith("ffn")},
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        changes={
            "ffn_gate_exps.weight": _interleaved,
            "ffn_gate_exps.bias": _interleaved_biases,
            "ffn_down_exps.weight": lambda numbers: numbers.transpose(1, 2),
        },
    ),
    "mistral3": Family("ministral3", _mistral3, order=pairs_to_halves),
    "smollm3": Family("smollm3", _llama, order=pairs_to_halves),
    "olmo2": Family("olmo2", _olmo2, tensors=_OLMO2),
    "glm4": Family(
        "glm4",
        _glm4,
        tensors={
            **DECODER,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "glm4moe": Family(
        "glm4_moe",
        _glm4moe,
        tensors={
            **_WITHOUT_FFN_NORM,
            **NORMS_OF_HEADS,
            **EXPERTS,
            **{name: module.replace("expert.", "experts.") for name, module in SHARED_EXPERT.items()},
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
    ),
    "phi3": Family("phi3", _phi3, tensors=DECODER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "starcoder2": Family(
        "starcoder2",
        keys.whole_fields,
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
