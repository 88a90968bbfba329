"""Tiny models with recurrent and convolutional state, of all families that work, with random weights."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import toys
from outrider.models.loading import Checkpoint, build_lm
from outrider.runtime.compiled import Compiled
from outrider.runtime.lm import LM

V = 97
_BASE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DELTA_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA, "attn_layer_indices": [2]},
    "olmo_hybrid": {**_DELTA, "layer_types": _DELTA_LAYERS},
    "kimi_linear": {
        **_DELTA,
        **_EXPERTS,
        "layer_types": _DELTA_LAYERS,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "conv_kernel": 4,
    },
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
        "use_mem_rope": True,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16, "expand": 2},
}


def hybrid(name: str, seed: int = 1, **options: Any) -> PreTrainedModel:
    """In float64, but where grouped experts allow no more than float32. (The recurrences compute in float32 anyway.)
    Large weights, so that logits are far apart and depend on the whole text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **{**_BASE, **FAMILIES[name], **options})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in parameter_name:
                torch.nn.init.normal_(parameter, std=0.25)
    has_experts = any("experts" in option for option in FAMILIES[name])
    return model if has_experts else model.to(torch.float64)


def hybrid_lm(model: PreTrainedModel, name: str = "target") -> LM:
    """As it is loaded: probed."""
    lm = build_lm(Checkpoint(name, model, tokenizer=None), V)
    if toys.execution is Compiled and lm.has_states:
        pytest.skip("models with states are not compiled")
    lm.execution = toys.execution()
    return lm
