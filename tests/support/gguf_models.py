"""Tiny random models of all families that are read from GGUF files, written as llama.cpp's converters write them.

Layouts are those of its conversion/*.py and gguf-py, in the build of llama-cpp-python 0.3.36; nothing of the reader is
used. Each case sets its fields to unusual values.
"""

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ggml_blocks import block_bytes
from gguf_tensors import model_tensors

VOCAB = 48
CONTEXT = 160
IDS = [int(i) for i in np.random.RandomState(3).randint(0, VOCAB, 150)]
_MXFP4 = gguf.GGMLQuantizationType.MXFP4
PLACES = (7, 40, 149)  # whose logits are golden
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_RMS = {"rms_norm_eps": 3e-3}
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 40}
_HEAD_DIM = {"head_dim": 12}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 2.5, 5.0],
    "original_max_position_embeddings": 256,
    "factor": 2.0,
    "attention_factor": 1.19,
    "partial_rotary_factor": 0.75,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


@dataclass(frozen=True)
class Case:
    """A model, and how it is written.

    Attributes:
        model_type: Transformers' name.
        architecture: llama.cpp's name.
        fields: of the configuration.
        keys: of the architecture, beside those that ``_keys`` derives.
        tensors: added to the file.
        has_oracle: llama.cpp computes the same model.
        has_mxfp4: experts are of this type.
    """

    model_type: str
    architecture: str
    fields: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    has_oracle: bool = True
    has_mxfp4: bool = False


def _rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings", CONTEXT),
        "rope.scaling.finetuned": True,
    }


def _gemma3(num_layers: int, full: dict[str, Any], **fields: Any) -> dict[str, Any]:
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 77.0}}
    sizes = {"num_hidden_layers": num_layers, "sliding_window": 9, "rope_parameters": ropes}
    return _HEAD_DIM | _RMS | sizes | {"query_pre_attn_scalar": 12} | fields


def _gemma4(layer_types: list[str], **fields: Any) -> dict[str, Any]:
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    }
    sizes = {"num_hidden_layers": len(layer_types), "vocab_size_per_layer_input": VOCAB, "global_head_dim": 16}
    sizes |= {"layer_types": layer_types, "sliding_window": 9, "rope_parameters": ropes}
    return _HEAD_DIM | _RMS | sizes | fields


_GEMMA4_KEYS = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": 12,
    "attention.value_length_swa": 12,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 9,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 16,
    "rope.dimension_count_swa": 12,
    "rope.freq_base_swa": 77.0,
}
_GEMMA4_ROPE = {"rope_freqs.weight": np.array([1.0] * 2 + [1e30] * 6, np.float32)}
_MOE_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
_QWEN35 = {
    "rms_norm_eps": 1e-6,  # which llama.cpp has for norms of keys, too, and Transformers there in any case
    "head_dim": 16,
    "num_hidden_layers": 4,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}


def _qwen35_keys(num_value_heads: int) -> dict[str, Any]:
    return {
        "attention.recurrent_layers": [True, False, True, False],
        "full_attention_interval": 2,
        "rope.dimension_sections": [2, 1, 1, 0],
        "ssm.conv_kernel": 3,
        "ssm.state_size": 12,
        "ssm.group_count": 2,
        "ssm.time_step_rank": num_value_heads,
        "ssm.inner_size": 12 * num_value_heads,
    }


# The layer of a head for later tokens: one with attention, and what joins it to the model.
_NORMS = ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
_MTP_SHAPES = dict.fromkeys(_NORMS, (32,)) | {
    "attn_q_norm": (16,),
    "attn_k_norm": (16,),
    "attn_q": (128, 32),
    "attn_k": (32, 32),
    "attn_v": (32, 32),
    "attn_output": (32, 64),
    "ffn_gate": (56, 32),
    "ffn_up": (56, 32),
    "ffn_down": (32, 56),
    "nextn.eh_proj": (32, 64),
}
_MTP = {f"blk.4.{name}.weight": np.full(shape, 0.1, np.float32) for name, shape in _MTP_SHAPES.items()}
_GEMMA3_KEYS = {"attention.sliding_window": 9, "rope.freq_base_swa": 77.0}
_LFM2 = {
    "rope_parameters": _ROPE,
    "norm_eps": 3e-3,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 4,
}
_LFM2_KEYS = {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 4}
_GPT_OSS = _RMS | {
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
}
_GPT_OSS_KEYS = {"attention.sliding_window": 9, "expert_count": 4, "expert_used_count": 2} | {
    "expert_feed_forward_length": 32
}
_GRANITE = _RMS | {
    "rope_parameters": _ROPE,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_GRANITE_KEYS = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.0}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_n_groups": 1}
_MAMBA_KEYS = {
    "ssm.conv_kernel": 3,
    "ssm.state_size": 8,
    "ssm.group_count": 1,
    "ssm.inner_size": 64,
    "ssm.time_step_rank": 4,
}
_NEMOTRON = _HEAD_DIM | {
    "layer_norm_epsilon": 3e-3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "conv_kernel": 3,
    "num_hidden_layers": 4,
}


def _nemotron_keys(width: int) -> dict[str, Any]:
    return _MAMBA_KEYS | {
        "ssm.group_count": 2,
        "attention.head_count_kv": [0, 2, 0, 0],
        "feed_forward_length": [0, 0, width, 0],
        "rope.dimension_count": 8,
        "rope.scaling.finetuned": False,
    }


_NEMOTRON_MOE_KEYS = {
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 40,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}
_LLAMA = _HEAD_DIM | _RMS | {"rope_parameters": _ROPE, "tie_word_embeddings": False}
CASES = {
    "llama": Case("llama", "llama", _LLAMA),
    "llama with biases, tied": Case(
        "llama", "llama", _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama 3": Case("llama", "llama", _LLAMA | {"rope_parameters": _LLAMA3}),
    "llama, linear": Case("llama", "llama", _LLAMA | {"rope_parameters": _LINEAR}, _rope_keys(_LINEAR)),
    "llama, linear, old keys": Case(
        "llama", "llama", _LLAMA | {"rope_parameters": _LINEAR}, {"rope.scale_linear": 4.0}
    ),
    "llama, yarn": Case("llama", "llama", _LLAMA | {"rope_parameters": _YARN}, _rope_keys(_YARN)),
    "mistral": Case("mistral", "llama", _LLAMA | {"sliding_window": None}),
    "qwen2, yarn": Case("qwen2", "qwen2", _RMS | {"rope_parameters": _YARN}, _rope_keys(_YARN)),
    "qwen2, yarn of its own": Case(
        "qwen2",
        "qwen2",
        _RMS | {"rope_parameters": _YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.1386294}},
        _rope_keys(_YARN)
        | {
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_attn_factor": 1.1386294,
        },
        has_oracle=False,  # llama.cpp writes these keys, and reads none of them
    ),
    "qwen3": Case("qwen3", "qwen3", _HEAD_DIM | _RMS | {"rope_parameters": _ROPE, "tie_word_embeddings": True}),
    "qwen3, yarn": Case("qwen3", "qwen3", _HEAD_DIM | _RMS | {"rope_parameters": _YARN}, _rope_keys(_YARN)),
    "qwen3moe": Case(
        "qwen3_moe",
        "qwen3moe",
        _HEAD_DIM | _RMS | _MOE | {"rope_parameters": _ROPE, "norm_topk_prob": True},
        {"expert_feed_forward_length": 24},
    ),
    "gemma": Case("gemma", "gemma", _HEAD_DIM | _RMS | {"rope_parameters": {**_ROPE, "rope_theta": 10000.0}}),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        _HEAD_DIM
        | _RMS
        | {
            "rope_parameters": _ROPE,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 12,
        },
        {"attention.sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma2, 46 layers": Case(
        "gemma2",
        "gemma2",
        _HEAD_DIM | _RMS | {"rope_parameters": _ROPE, "num_hidden_layers": 46, "query_pre_attn_scalar": 8},
        {"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Case("gemma3_text", "gemma3", _gemma3(7, _ROPE), _GEMMA3_KEYS),
    "gemma3, linear": Case(
        "gemma3_text",
        "gemma3",
        _gemma3(7, _LINEAR, final_logit_softcapping=2.0),
        _GEMMA3_KEYS | _rope_keys(_LINEAR) | {"final_logit_softcapping": 2.0},
    ),
    "gemma3, other layers": Case(
        "gemma3_text",
        "gemma3",
        _gemma3(4, _ROPE, layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"]),
        _GEMMA3_KEYS | {"attention.sliding_window_pattern": [False, True, True, False]},
    ),
    "gemma3, 62 layers": Case("gemma3_text", "gemma3", _gemma3(62, _ROPE, query_pre_attn_scalar=8), _GEMMA3_KEYS),
    "phi3": Case(
        "phi3", "phi3", _RMS | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.75}, "sliding_window": None}
    ),
    "phi3 with a window": Case(
        "phi3",
        "phi3",
        _RMS | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.75}, "sliding_window": 11},
        {"attention.sliding_window": 11},
        has_oracle=False,  # llama.cpp warns that it leaves the window out
    ),
    "phi3, longrope": Case(
        "phi3",
        "phi3",
        _RMS
        | {
            "rope_parameters": _LONGROPE,
            "sliding_window": None,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 256,
        },
        {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 256},
        {
            f"rope_factors_{kind}.weight": np.array(_LONGROPE[f"{kind}_factor"], np.float32)
            for kind in ("short", "long")
        },
    ),
    "starcoder2": Case(
        "starcoder2", "starcoder2", {"rope_parameters": _ROPE, "norm_epsilon": 3e-3, "tie_word_embeddings": True}
    ),
    "gpt2": Case("gpt2", "gpt2", {"n_inner": 56, "layer_norm_epsilon": 3e-3}),
    "gpt2, its own head": Case(
        "gpt2", "gpt2", {"n_inner": 56, "layer_norm_epsilon": 3e-3, "tie_word_embeddings": False}
    ),
    "gemma4": Case(
        "gemma4_text",
        "gemma4",
        _gemma4(
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            final_logit_softcapping=2.0,
        ),
        _GEMMA4_KEYS
        | {
            "attention.shared_kv_layers": 2,
            "attention.sliding_window_pattern": [True, False] * 3,
            "embedding_length_per_layer_input": 8,
            "feed_forward_length": [56] * 4 + [112] * 2,
            "final_logit_softcapping": 2.0,
        },
        _GEMMA4_ROPE,
    ),
    "gemma4, keys are values": Case(
        "gemma4_text",
        "gemma4",
        _gemma4(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            final_logit_softcapping=30.0,  # of llama.cpp where a file states none
        ),
        _GEMMA4_KEYS | {"attention.sliding_window_pattern": [False, True, False], "attention.head_count_kv": [1, 2, 1]},
        _GEMMA4_ROPE,
    ),
    "gemma4, experts": Case(
        "gemma4_text",
        "gemma4",
        _gemma4(
            layer_types=["sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            final_logit_softcapping=30.0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
        _GEMMA4_KEYS | {"attention.sliding_window_pattern": [True, False]} | _MOE_KEYS,
        _GEMMA4_ROPE,
    ),
    "qwen35": Case("qwen3_5_text", "qwen35", _QWEN35 | {"linear_num_value_heads": 6}, _qwen35_keys(6)),
    "qwen35, with a head": Case(
        "qwen3_5_text",
        "qwen35",
        _QWEN35 | {"linear_num_value_heads": 2, "tie_word_embeddings": True},
        {key: value for key, value in _qwen35_keys(2).items() if key != "attention.recurrent_layers"}
        | {"block_count": 5, "nextn_predict_layers": 1},
        _MTP,
    ),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        "qwen35moe",
        _QWEN35 | _MOE | {"linear_num_value_heads": 4, "shared_expert_intermediate_size": 40},
        _qwen35_keys(4) | _MOE_KEYS | {"expert_shared_feed_forward_length": 40},
    ),
    "lfm2": Case("lfm2", "lfm2", _LFM2 | {"block_auto_adjust_ff_dim": False}, _LFM2_KEYS),
    "lfm2moe": Case(
        "lfm2_moe",
        "lfm2moe",
        _LFM2 | _MOE | {"num_dense_layers": 1},
        _LFM2_KEYS | _MOE_KEYS | {"expert_gating_func": 2, "leading_dense_block_count": 1},
    ),
    "gpt-oss": Case(
        "gpt_oss",
        "gpt-oss",
        _GPT_OSS | {"rope_parameters": _ROPE, "layer_types": ["sliding_attention", "full_attention"]},
        _GPT_OSS_KEYS,
        has_mxfp4=True,
    ),
    "gpt-oss, yarn": Case(
        "gpt_oss",
        "gpt-oss",
        # Of a base so small that bounds are those of the head, whether they are rounded or not.
        _GPT_OSS | {"rope_parameters": _YARN | {"rope_theta": 2.0, "truncate": False}},
        _GPT_OSS_KEYS | _rope_keys(_YARN),
    ),
    "granite": Case("granite", "granite", _GRANITE, _GRANITE_KEYS),
    "granitemoe": Case(
        "granitemoeshared",
        "granitemoe",
        _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
        _GRANITE_KEYS | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 24},
    ),
    "granitehybrid": Case(
        "granitemoehybrid",
        "granitehybrid",
        _GRANITE
        | _MAMBA
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 56}
        | {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
        _GRANITE_KEYS
        | _MAMBA_KEYS
        | {"attention.head_count_kv": [0, 2, 0], "rope.scaling.finetuned": False, "context_length": 2**20}
        | {"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 56},
    ),
    "granitehybrid, experts": Case(
        "granitemoehybrid",
        "granitehybrid",
        _GRANITE
        | _MAMBA
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
        | {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
        _GRANITE_KEYS
        | _MAMBA_KEYS
        | {"attention.head_count_kv": [0, 2], "rope.scaling.finetuned": True}
        | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 24},
    ),
    "gemma3n": Case(
        "gemma3n_text",
        "gemma3n",
        _gemma3(
            4,
            _ROPE,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
            laurel_rank=6,
            activation_sparsity_pattern=[0.75, 0.0, 0.0, 0.0],
            altup_active_idx=1,
            final_logit_softcapping=30.0,
        ),
        _GEMMA3_KEYS
        | {
            "altup.active_idx": 1,
            "altup.num_inputs": 4,
            "attention.shared_kv_layers": 2,
            "attention.sliding_window_pattern": [True, False] * 2,
            "activation_sparsity_scale": [0.6744897, *[float("-inf")] * 3],
            "embedding_length_per_layer_input": 8,
            "final_logit_softcapping": 30.0,
            "feed_forward_length": [56] * 4,
        },
        has_oracle=False,  # llama.cpp has the sizes of the published models, whatever a file states
    ),
    "mistral3": Case("mistral", "mistral3", _LLAMA | {"sliding_window": None}),
    "ministral3": Case(
        "ministral3",
        "mistral3",
        _LLAMA
        | {
            "rope_parameters": _YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "max_position_embeddings": CONTEXT}
        },
        _rope_keys(_YARN) | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
    ),
    "smollm3": Case("smollm3", "smollm3", _RMS | {"rope_parameters": _ROPE, "num_hidden_layers": 5}),
    "olmo2": Case("olmo2", "olmo2", _RMS | {"rope_parameters": _ROPE}),
    "olmo3": Case(
        "olmo3",
        "olmo2",
        _RMS
        | {
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 9,
        },
        _rope_keys(_YARN) | {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]},
    ),
    "glm4": Case("glm4", "glm4", _HEAD_DIM | _RMS | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}),
    "glm4moe": Case(
        "glm4_moe",
        "glm4moe",
        _HEAD_DIM
        | _RMS
        | {
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
            "num_hidden_layers": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        _MOE_KEYS
        | {
            "expert_gating_func": 2,
            "expert_shared_count": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "leading_dense_block_count": 1,
        },
    ),
    "falcon-h1": Case(
        "falcon_h1",
        "falcon-h1",
        _HEAD_DIM
        | _RMS
        | _MAMBA
        | {
            "rope_parameters": _ROPE,
            "mamba_d_ssm": 64,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.1,
            "key_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
            "mlp_multipliers": [1.3, 0.6],
            "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 0.875],
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
        _MAMBA_KEYS | {"ssm.group_count": 2},
    ),
    "nemotron_h": Case("nemotron_h", "nemotron_h", _NEMOTRON | {"hybrid_override_pattern": "M*-M"}, _nemotron_keys(56)),
    "nemotron_h_moe": Case(
        "nemotron_h",
        "nemotron_h_moe",
        _NEMOTRON
        | {
            "hybrid_override_pattern": "M*EM",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
        _nemotron_keys(24) | _MOE_KEYS | _NEMOTRON_MOE_KEYS,
    ),
    "nemotron_h_moe, latent, groups": Case(
        "nemotron_h",
        "nemotron_h_moe",
        _NEMOTRON
        | {
            "hybrid_override_pattern": "M*EM",
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_latent_size": 16,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
        _nemotron_keys(24)
        | _MOE_KEYS
        | _NEMOTRON_MOE_KEYS
        | {"expert_count": 12, "expert_used_count": 3, "expert_group_count": 4, "expert_group_used_count": 2}
        | {"moe_latent_size": 16},
    ),
}
for _name in ("attention.key_length", "attention.value_length"):  # converters write both where configurations do
    for _case in CASES.values():
        if "head_dim" in _case.fields:
            _case.keys.setdefault(_name, _case.fields["head_dim"])


def config_of(case: Case) -> Any:
    fields = copy.deepcopy(_SIZES | case.fields)  # configurations change the dictionaries that they are given
    if case.model_type == "phi3" and "original_max_position_embeddings" not in fields:
        fields["original_max_position_embeddings"] = CONTEXT
    return AutoConfig.for_model(case.model_type, **fields)


def random_case(case: Case) -> PreTrainedModel:
    """The model, float32, of numbers that are the same everywhere: the file's logits are compared with golden ones."""
    # Eager: some releases of Transformers leave Gemma 2's cap out of "sdpa".
    model = AutoModelForCausalLM.from_config(config_of(case), dtype=torch.float32, attn_implementation="eager")
    model.eval().requires_grad_(False)
    numbers = np.random.RandomState(7)  # whose stream is frozen
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]
    for _, parameter in (*sorted(model.named_parameters()), *sorted(buffers)):
        drawn = numbers.standard_normal(parameter.numel()).reshape(parameter.shape)
        if parameter.ndim == 1:
            if parameter.min() < parameter.max():  # begins with random numbers
                parameter.zero_()
            parameter.add_(torch.from_numpy(0.2 * drawn))  # norms around what they begin with
        else:
            parameter.copy_(torch.from_numpy(drawn / np.sqrt(parameter.shape[-1]) * 1.3))
            if case.has_mxfp4 and parameter.ndim == 3:
                rows = parameter.transpose(1, 2).contiguous().numpy()
                rounded = gguf.dequantize(gguf.quantize(rows, _MXFP4), _MXFP4)
                parameter.copy_(torch.from_numpy(rounded).transpose(1, 2))
    return model


def write_case(
    file: Path, case: Case, model: PreTrainedModel | None = None, *, keys: dict[str, Any] | None = None, **more: Any
) -> Path:
    """Write the GGUF file of a case.

    Args:
        keys: whole keys of the file.
        more: keys of the architecture that replace or follow those of the case, dots as ``__``.
    """
    model = random_case(case) if model is None else model
    config, architecture = model.config.get_text_config(), case.architecture
    writer = gguf.GGUFWriter(file, architecture)
    own = _keys(config) | case.keys | {key.replace("__", "."): value for key, value in more.items()}
    for key, value in ({f"{architecture}.{key}": value for key, value in own.items()} | (keys or {})).items():
        add_value(writer, key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    vocabulary = ["AB", "<s>", "</s>", *(chr(ord("A") + i) for i in range(config.vocab_size - 3))]
    if "tokenizer.ggml.tokens" not in (keys or {}):
        writer.add_token_list(vocabulary)
    writer.add_token_types([1, 3, 3, *[1] * (len(vocabulary) - 3)])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model_tensors(model, architecture).items():
        numbers = np.ascontiguousarray(tensor.float().numpy())
        if case.has_mxfp4 and name.endswith("exps.weight"):
            writer.add_tensor(name, gguf.quantize(numbers, _MXFP4), raw_dtype=_MXFP4)
        else:
            writer.add_tensor(name, numbers)
    factors = _factors(config)
    for name, numbers in (case.tensors | ({} if factors is None else {"rope_freqs.weight": factors})).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# Widths are whole blocks of all forms.
_WIDE = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "eos_token_id": 96,
}


_MANY = {
    "token_embd": "IQ4_XS",
    "attn_q": "IQ4_NL",
    "attn_k": "BF16",
    "attn_v": "IQ4_XS",
    "attn_output": "MXFP4",
    "ffn_gate": "Q2_K",
    "ffn_up": "Q3_K",
    "ffn_down": "IQ4_NL",
    "output": "F16",
}
_WIDE_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
_WIDE_DELTA_NET_KEYS = {
    "attention.recurrent_layers": [True, False],
    "rope.dimension_sections": [8, 4, 4, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 64,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 256,
}
IN_MANY_FORMS = "llama in many forms"
"""Name of a file beside CASES."""


def many_forms(name: str) -> str:
    """Type of a matrix of a Llama, by its name."""
    return _MANY[name.split(".")[-2]]


def write_in_blocks(file: Path, kind: str, form_of: Callable[[str], str | None]) -> Path:
    """Write the GGUF file of a random model whose matrices are in blocks.

    Args:
        kind: of the model in Transformers, for Gemma 3 that of the file.
        form_of: the type of a tensor by its name; None for float32.
    """
    keys = {"attention.key_length": 128, "attention.value_length": 128}
    add = gguf.GGUFWriter.add_tensor

    def add_in_blocks(writer: gguf.GGUFWriter, name: str, numbers: Any) -> None:
        form = form_of(name) if numbers.ndim > 1 and not re.search("gate_inp|conv1d", name) else None
        if form is None:
            add(writer, name, numbers)
            return
        of_form = gguf.GGMLQuantizationType[form]
        try:
            stored = gguf.quants.quantize(numbers, of_form)
        except NotImplementedError:  # any bytes, with the spread of the numbers if the package can tell what they mean
            shape, seed = (numbers[..., 0].size, numbers.shape[-1]), sum(name.encode())
            stored = block_bytes(shape, form, seed)
            with suppress(NotImplementedError):
                stored = block_bytes(shape, form, seed, float(numbers.std() / gguf.dequantize(stored, of_form).std()))
            stored = stored.reshape(*numbers.shape[:-1], -1)
        add(writer, name, stored, raw_dtype=of_form)

    fields = _WIDE
    if kind == "qwen3moe":
        fields = fields | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        keys["expert_feed_forward_length"] = 256
    if kind == "qwen35":
        keys, fields = keys | _WIDE_DELTA_NET_KEYS, fields | _WIDE_DELTA_NET
    model_type = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe", "qwen35": "qwen3_5_text"}.get(kind, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_in_blocks)
        return write_case(file, Case(model_type, kind, fields, keys))


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def _keys(config: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    if config.model_type != "qwen3_5_moe_text":  # of experts alone
        keys["feed_forward_length"] = config.intermediate_size
    if config.model_type == "gpt2":
        keys |= {"attention.head_count_kv": config.n_head, "feed_forward_length": config.n_inner}
    eps = {
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": ("norm_epsilon", "layer_norm_epsilon"),
    }
    for key, names in eps.items():
        for name in names:
            if getattr(config, name, None) is not None:
                keys[key] = float(getattr(config, name))
    rope = getattr(config, "rope_parameters", None)
    if rope is not None:
        rope = rope.get("full_attention", rope)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys["rope.freq_base"] = float(rope["rope_theta"])
        keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if getattr(config, "num_experts_per_tok", None) and getattr(config, "num_experts", None):
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    return keys


def _factors(config: Any) -> Any | None:
    """Divisors of the frequencies by Llama 3's rule, as converters compute them (``generate_extra_tensors``)."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.head_dim
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for length in 2 * np.pi / frequencies:
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
