"""Tiny random models of the families that the native engine knows, with every variation of their configurations.

Sizes are no multiples of a vector's, and differ from one another, so that a mistaken one shows.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.models.executions import choose_execution
from outrider.runtime.lm import LM

VOCAB = 99
CONTEXT = 640
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WIDE = {"head_dim": 14}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 160}
_YARN_OF_ITS_OWN = _YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.2, "truncate": False}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0],
    "original_max_position_embeddings": 160,
    "partial_rotary_factor": 0.6,
}


def _rope(stated: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": stated | more}


def _layers(*kinds: str) -> dict[str, Any]:
    return {"layer_types": [f"{kind}_attention" for kind in kinds]}


_MIXED = _layers("sliding", "full", "sliding")
_GEMMA2 = {"head_dim": 14, "query_pre_attn_scalar": 11, "sliding_window": 6} | _MIXED
_TWO_ROPES = {"rope_parameters": {"sliding_attention": _DEFAULT, "full_attention": _LINEAR | {"rope_theta": 9000.0}}}

_RECURRENT = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
} | _layers("linear", "full", "linear")
_MAMBA2 = {
    "num_local_experts": 0,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 20,
    "mamba_d_state": 11,
    "attention_multiplier": 0.4,
}
_NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    "head_dim": 14,
    "mamba_num_heads": 6,
    "mamba_head_dim": 11,
    "ssm_state_size": 13,
    "n_groups": 1,
    "time_step_min": 0.9,
}
_NEMOTRON_MOE = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 56,
}
_FALCON = {"mamba_n_heads": 4, "mamba_d_head": 20, "mamba_d_ssm": 80, "mamba_d_state": 11}
_CONVOLUTIONS = {
    "hidden_size": 48,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv"],
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 56}
_GLM4 = {"head_dim": 16, "n_routed_experts": 6, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}

_ERNIE = {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
_LFM2_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}
_GPT_OSS = {"head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 2} | _MIXED
_GEMMA4 = {
    "head_dim": 14,
    "global_head_dim": 24,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 28,
    "sliding_window": 6,
} | _layers("sliding", "full", "full")
_SHARING = _layers("sliding", "full", "sliding", "full", "full")

# By family: what differs from the sizes, and from the defaults of the configuration.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {},
        "biases, tied": _WIDE | _BIASES | _TIED,
        "a head for each": {"num_key_value_heads": 4} | _rope(_LINEAR),
        "one group, llama3": {"num_key_value_heads": 1} | _rope(_LLAMA3),
        "five heads a group, yarn": {"num_attention_heads": 10, "head_dim": 20} | _rope(_YARN),
        "yarn of its own": _rope(_YARN_OF_ITS_OWN),
        "biases of attention": {"attention_bias": True, "hidden_act": "gelu"},
        "biases of the MLP": {"mlp_bias": True, "hidden_act": "relu"},
        "relu2": {"hidden_act": "relu2", "rms_norm_eps": 0.1},
        "gelu_new": {"hidden_act": "gelu_new"},
        "a factor that it does not read": _rope(_DEFAULT, partial_rotary_factor=0.5),
        "of published files": {"is_llama_config": True, "unsloth_fixed": True, "auto_map": {"AutoModel": "mine.Model"}},
    },
    "mistral": {
        "plain": {"sliding_window": None},
        "a window": {"sliding_window": 7} | _WIDE | _TIED,
        "a window beyond a part": {"sliding_window": 260},
        "layers that it does not read": {"sliding_window": 7} | _MIXED,
    },
    "qwen2": {
        "plain": {},
        "windows": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1} | _TIED,
        "stated layers": {"use_sliding_window": True, "sliding_window": 130} | _MIXED | _rope(_YARN),
    },
    "qwen3": {
        "plain": _WIDE,
        "windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "attention_bias": True},
        "tied, yarn": {"rms_norm_eps": 0.1} | _TIED | _rope(_YARN),
    },
    "smollm3": {
        "plain": {},
        "no ropes": {"no_rope_layers": [1, 0, 1]} | _BIASES | _UNTIED,
        "every second": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7},
        "stated layers": {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [0, 0, 1]} | _MIXED,
    },
    "olmo2": {"plain": {}, "biases, tied": {"attention_bias": True, "rms_norm_eps": 0.1} | _TIED | _rope(_LINEAR)},
    "granite": {
        "plain": {"attention_multiplier": 0.4},
        "multipliers": {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
        },
        "multipliers, biases, tied": {"attention_multiplier": 0.5, "residual_multiplier": 1.2} | _BIASES | _TIED,
    },
    "phi3": {
        "plain": {},
        "partly turned": _rope(_DEFAULT, partial_rotary_factor=0.6) | _TIED,
        "of published files": {"full_attn_mod": 1, "interpolate_factor": 1, "partial_rotary_factor": 0.6},
        "a window": {"sliding_window": 7} | _MIXED,  # which it does not read
        "longrope": {"original_max_position_embeddings": 160} | _rope(_LONGROPE),
    },
    "glm4": {
        "plain": {"head_dim": 16},
        "turned": {"head_dim": 14, "attention_bias": False} | _TIED | _rope(_DEFAULT, partial_rotary_factor=1.0),
        "linear": {"head_dim": 24} | _rope(_LINEAR, partial_rotary_factor=0.5),
    },
    "gemma": {
        "plain": _WIDE,
        "untied, biases": {"head_dim": 10, "attention_bias": True, "hidden_act": "relu"} | _UNTIED,
        "of published files": {"head_dim": 10, "hidden_act": "gelu"},  # it means gelu_pytorch_tanh
        "two activations": {"head_dim": 10, "hidden_act": "silu", "hidden_activation": "relu"},
    },
    "gemma2": {
        "plain": _GEMMA2,
        "no caps": _GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None} | _UNTIED,
        "low caps": _GEMMA2 | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        "biases, relu": _GEMMA2 | {"attention_bias": True, "hidden_activation": "relu", "sliding_window": 257},
        "layers by default": {"head_dim": 14, "query_pre_attn_scalar": 20, "sliding_window": 9},
    },
    "gemma3_text": {
        "plain": _GEMMA2,
        "two ropes": _GEMMA2 | _TWO_ROPES | {"attention_bias": True},
        "a low cap": _GEMMA2 | {"final_logit_softcapping": 2.0} | _UNTIED,
        "of published files": _GEMMA2 | {"layer_types": None, "sliding_window_pattern": 2, "hidden_activation": "silu"},
        "one kind": _GEMMA2 | _layers("full", "full", "full"),
    },
    "qwen3_5_text": {
        "plain": _RECURRENT | _rope(_DEFAULT, partial_rotary_factor=0.25),
        "a state for each": _RECURRENT | {"linear_num_key_heads": 4, "attention_bias": True} | _UNTIED,
        "wide values": _RECURRENT
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 37}
        | {"linear_key_head_dim": 18, "linear_conv_kernel_dim": 2}
        | _TIED,
        "of published files": _RECURRENT
        | {"layer_types": None, "full_attention_interval": 3, "partial_rotary_factor": 0.5}
        | _rope(_DEFAULT, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
    },
    "granitemoehybrid": {
        "plain": _MAMBA2,
        "ropes, biases, tied": _MAMBA2
        | {"position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}
        | {"attention_bias": True}
        | _TIED,
        "multipliers": _MAMBA2
        | {"mamba_n_heads": 8, "mamba_d_head": 10, "mamba_d_state": 9, "mamba_chunk_size": 16}
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 2.5},
        "wide": _MAMBA2
        | {"mamba_expand": 3, "mamba_n_heads": 3, "mamba_d_head": 40, "shared_intermediate_size": 80}
        | {"time_step_limit": (0.9, float("inf"))},
        "experts": _MAMBA2 | {"num_local_experts": 5, "num_experts_per_tok": 3},
    },
    "falcon_h1": {
        "plain": _FALCON,
        "biases, groups": _FALCON
        | {"mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_conv": 3}
        | {"mamba_proj_bias": True, "projectors_bias": True, "mamba_conv_bias": False, "head_dim": 14}
        | _BIASES
        | _TIED,
        "multipliers": _FALCON
        | {"attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "key_multiplier": 0.8}
        | {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 0.9]}
        | {"mlp_multipliers": [1.3, 0.6], "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        "by expansion": _FALCON
        | {"mamba_d_ssm": None, "mamba_expand": 3, "mamba_n_heads": 3, "mamba_d_head": 40, "mamba_chunk_size": 16}
        | {"time_step_limit": (0.9, float("inf"))},
    },
    "nemotron_h": {
        "plain": _NEMOTRON,
        "biases, groups": _NEMOTRON
        | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "n_groups": 2, "conv_kernel": 3}
        | {"mlp_hidden_act": "silu", "layer_norm_epsilon": 0.1}
        | _TIED,
        "experts": _NEMOTRON | _NEMOTRON_MOE,
        "latent experts, biases": _NEMOTRON
        | _NEMOTRON_MOE
        | {"moe_latent_size": 24, "mlp_bias": True, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
        "wide latent experts in groups": _NEMOTRON
        | _NEMOTRON_MOE
        | {"moe_latent_size": 48, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 5},
    },
    "lfm2": {
        "plain": _CONVOLUTIONS,
        "biases, untied": _CONVOLUTIONS | {"conv_bias": True, "conv_L_cache": 4, "norm_eps": 0.1} | _UNTIED,
        "a width of its own": _CONVOLUTIONS
        | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.2},
        "stated layers": {"hidden_size": 48, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    },
    "starcoder2": {
        "plain": {},
        "no biases, untied": {"use_bias": False, "hidden_act": "gelu", "norm_epsilon": 0.1} | _UNTIED,
        "a window, wide heads": {"sliding_window": 7} | _WIDE | _rope(_LINEAR),
        "of published files": {"norm_type": "layer_norm", "mlp_type": "default"},
    },
    "gpt2": {
        "plain": {},
        "an MLP of its own, untied": {"n_inner": 72, "activation_function": "gelu"} | _UNTIED,
        "unscaled scores": {"scale_attn_weights": False, "reorder_and_upcast_attn": True, "layer_norm_epsilon": 0.1},
    },
    "olmo3": {
        "plain": {"sliding_window": 7} | _MIXED,
        "two ropes, biases": {"sliding_window": 7, "attention_bias": True, "layer_types": None} | _TIED | _TWO_ROPES,
    },
    "exaone4": {
        "plain": {"sliding_window": 7, "sliding_window_pattern": 2},
        "no windows": {"sliding_window": None} | _layers("full", "full", "full") | _WIDE | _TIED,
    },
    "ernie4_5": {"plain": {"head_dim": 12}, "biases": {"use_bias": True, "head_dim": 16} | _UNTIED},
    "cohere2": {
        "plain": {"sliding_window": 7, "logit_scale": 0.5} | _MIXED,
        "biases": {"attention_bias": True, "layer_norm_eps": 0.1, "sliding_window": 9} | _UNTIED,
    },
    "ministral3": {
        "plain": {"head_dim": 14} | _rope(_YARN, llama_4_scaling_beta=0.4),
        "a window": {"head_dim": 12, "sliding_window": 7} | _TIED | _rope(_YARN, llama_4_scaling_beta=0.1),
    },
    "olmoe": {
        "plain": {"num_experts": 5, "num_experts_per_tok": 2},
        "normalized, biases": {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    },
    "ernie4_5_moe": {
        "plain": _ERNIE,
        "biases, some layers": _ERNIE | {"use_bias": True, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
        "first layers": _ERNIE | {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_norm_min": 1e-9},
    },
    "qwen3_moe": {
        "plain": _EXPERTS | {"norm_topk_prob": True},
        "dense layers": _EXPERTS | {"mlp_only_layers": [0], "num_experts_per_tok": 1, "attention_bias": True},
        "every second": _EXPERTS | {"decoder_sparse_step": 2, "hidden_act": "gelu", "num_local_experts": 3},
        "a window": _EXPERTS | {"use_sliding_window": True, "sliding_window": 7} | _TIED,
    },
    "qwen2_moe": {
        "plain": _EXPERTS | _SHARED,
        "no biases": _EXPERTS | _SHARED | {"qkv_bias": False, "norm_topk_prob": True, "mlp_only_layers": [1]},
        "windows": _EXPERTS | _SHARED | {"use_sliding_window": True, "sliding_window": 7, "decoder_sparse_step": 2},
    },
    "mixtral": {
        "plain": {"num_local_experts": 5},
        "a window": {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7} | _WIDE | _TIED,
        "of published files": {"router_jitter_noise": 0.1, "router_aux_loss_coef": 0.02},
    },
    "granitemoe": {
        "plain": {"num_local_experts": 5, "attention_multiplier": 0.4},
        "multipliers": {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "num_experts_per_tok": 1,
        },
    },
    "glm4_moe": {
        "plain": _EXPERTS | _GLM4,
        "dense layers, biases": _EXPERTS
        | _GLM4
        | {"first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2},
        "unnormalized": _EXPERTS | _GLM4 | {"norm_topk_prob": False, "head_dim": 24},
        "groups": _EXPERTS | _GLM4 | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        "one group": _EXPERTS | _GLM4 | {"n_routed_experts": 12, "n_group": 4, "topk_group": 1},
    },
    "qwen3_5_moe_text": {
        "plain": _RECURRENT | _EXPERTS | _SHARED,
        "tied, biases": _RECURRENT
        | _EXPERTS
        | _SHARED
        | {"attention_bias": True, "num_experts_per_tok": 1, "linear_conv_kernel_dim": 3}
        | _TIED,
    },
    "lfm2_moe": {
        "plain": _CONVOLUTIONS | _LFM2_MOE,
        "no correction, biases": _CONVOLUTIONS
        | _LFM2_MOE
        | {
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
            "routed_scaling_factor": 1.7,
            "norm_eps": 0.1,
            "conv_L_cache": 4,
        }
        | _UNTIED,
    },
    "gpt_oss": {
        "plain": _GPT_OSS | {"sliding_window": 7},
        "a long window, yarn": _GPT_OSS | {"sliding_window": 260, "attention_bias": False} | _rope(_YARN_OF_ITS_OWN),
        "a low limit": _GPT_OSS | {"swiglu_limit": 0.5, "swiglu_alpha": 1.1, "layer_types": None} | _TIED,
    },
    "gemma4_text": {
        "plain": _GEMMA4,
        "no embeddings for layers": _GEMMA4 | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0},
        "shared keys": _GEMMA4
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_hidden_layers": 5}
        | _SHARING,
        "keys that are values": _GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True}
        | _UNTIED,
        "experts": _GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 5,
            "moe_intermediate_size": 24,
            "top_k_experts": 2,
            "hidden_activation": "silu",
        },
        "of published files": _GEMMA4 | {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 120},
    },
}
ALL = [(family, name) for family, cases in CASES.items() for name in cases]


def random_model(family: str, fields: dict[str, Any], seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A model, float32, whose logits depend on the whole text."""
    stated = _SIZES | sizes | fields
    if family == "gpt2":
        for name, its_name in (
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("max_position_embeddings", "n_positions"),
        ):
            stated[its_name] = stated.pop(name)
        for name in ("intermediate_size", "num_key_value_heads"):
            del stated[name]
    config = AutoConfig.for_model(family, **stated)
    # Eager: "sdpa" leaves caps out.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    buffers = [one for one in model.state_dict(keep_vars=True).values() if not isinstance(one, nn.Parameter)]
    for parameter in (*model.eval().requires_grad_(False).parameters(), *buffers):
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(0.2 * drawn)  # norms around what they begin with
        else:
            parameter.copy_(0.7 * drawn / parameter.shape[-1] ** 0.5)
    for name, parameter in model.named_parameters():
        if family == "gemma4_text" and name.endswith("q_norm.weight"):
            parameter.mul_(0.1)  # scores are not scaled: with large ones, a last bit of a number counts
    return model


def native_lm(model: PreTrainedModel, name: str = "target") -> LM:
    lm = choose_execution(LM(model, name=name, vocab_size=VOCAB, context_len=CONTEXT), "native")
    assert lm.native is not None and not lm.has_states
    return lm
