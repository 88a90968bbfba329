"""The table of families: small configurations of Transformers, with unusual values, so that a mistaken one shows. From
a row of FILES are made the model, its GGUF file and llama.cpp's golden logits (gguf_models.py), and the native plan
(native_cases.py). VARIATIONS are for native plans alone."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import AutoConfig

Fields = dict[str, Any]
SIZES: Fields = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "pad_token_id": None}


@dataclass(frozen=True)
class Case:
    model_type: str  # Transformers' name
    architecture: str  # llama.cpp's name
    fields: Fields  # of the configuration
    # Of the architecture, beside those that follow from the configuration; None to leave one out:
    keys: Fields = field(default_factory=dict)
    tensors: Fields = field(default_factory=dict)  # added to the file
    has_oracle: bool = True  # llama.cpp computes the same model
    has_mxfp4: bool = False  # experts are of this type


def configuration(model_type: str, fields: Fields) -> Any:
    """Configuration of a row, with SIZES but where fields state others."""
    stated = copy.deepcopy(SIZES | fields)  # configurations change the dictionaries that they are given
    if stated.get("layer_types") is not None:
        stated["num_hidden_layers"] = len(stated["layer_types"])
    if "vocab_size_per_layer_input" in stated and stated["vocab_size_per_layer_input"] is None:
        stated["vocab_size_per_layer_input"] = stated["vocab_size"]
    if model_type == "gpt2":
        del stated["num_key_value_heads"]
    if model_type == "phi3":
        original = (
            stated["rope_parameters"].get("original_max_position_embeddings") if "rope_parameters" in stated else None
        )
        stated.setdefault("original_max_position_embeddings", original or stated["max_position_embeddings"])
    return AutoConfig.for_model(model_type, **stated)


_DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 40}
_OWN_YARN = _YARN | {"beta_fast": 8.0, "beta_slow": 2.0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 32}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.5, 2.0]}
_LONGROPE |= {"long_factor": [1.0, 2.5, 5.0], "original_max_position_embeddings": 256, "factor": 2.0}
_LONGROPE |= {"attention_factor": 1.19, "partial_rotary_factor": 0.75}
_LOCAL = {"rope_type": "default", "rope_theta": 77.0}


def _rope(stated: Fields = _DEFAULT, **more: Any) -> Fields:
    return {"rope_parameters": stated | more}


def _ropes(full: Fields, sliding: Fields = _LOCAL) -> Fields:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _layers(*kinds: str) -> Fields:
    return {"layer_types": [f"{kind}_attention" for kind in kinds]}


_RMS, _HEAD_DIM, _TIED, _UNTIED = (
    *({"rms_norm_eps": 3e-3}, {"head_dim": 12}),
    *({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
)
_BIASES = {"attention_bias": True, "mlp_bias": True}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5}
_SPARSE = _MOE | {"decoder_sparse_step": 1}
_SHARED = {"shared_expert_intermediate_size": 40}
_LLAMA = _HEAD_DIM | _RMS | _UNTIED
_GEMMA2 = _HEAD_DIM | _RMS | _rope() | {"query_pre_attn_scalar": 12, "sliding_window": 9}
_GEMMA3 = _GEMMA2 | _ropes(_DEFAULT)
_GEMMA4 = _HEAD_DIM | _RMS | {"vocab_size_per_layer_input": None, "global_head_dim": 16, "sliding_window": 9}
_GEMMA4 |= _ropes({"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25})
_GEMMA4_FREQS = {"rope_freqs.weight": np.array([1.0] * 2 + [1e30] * 6, np.float32)}
_GEMMA4_MOE = _MOE | {"enable_moe_block": True, "top_k_experts": 2}
del _GEMMA4_MOE["num_experts_per_tok"]
_QWEN35 = {
    "rms_norm_eps": 1e-6,  # which llama.cpp has for norms of keys, too, and Transformers there in any case
    "head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
}
_QWEN35 |= _rope(partial_rotary_factor=0.5) | _layers("linear", "full", "linear", "full")
_QWEN35_KEYS = {"full_attention_interval": 2, "rope.dimension_sections": [2, 1, 1, 0]}
_QWEN35_LAYERS = _QWEN35_KEYS | {"attention.recurrent_layers": [True, False, True, False]}
# The layer of a head for later tokens: one with attention, and what joins it to the model.
_NORMS = ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
_MTP_SHAPES: dict[str, tuple[int, ...]] = dict.fromkeys(_NORMS, (32,))
_MTP_SHAPES |= {"attn_q_norm": (16,), "attn_k_norm": (16,), "attn_q": (128, 32), "attn_k": (32, 32), "attn_v": (32, 32)}
_MTP_SHAPES |= {"attn_output": (32, 64), "ffn_gate": (56, 32), "ffn_up": (56, 32), "ffn_down": (32, 56)}
_MTP_SHAPES |= {"nextn.eh_proj": (32, 64)}
_MTP = {f"blk.4.{name}.weight": np.full(shape, 0.1, np.float32) for name, shape in _MTP_SHAPES.items()}
_LFM2 = _rope() | {"norm_eps": 3e-3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
_LFM2_MOE = _MOE | {"num_dense_layers": 1}
_GPT_OSS = _RMS | {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
_GPT_OSS |= {"sliding_window": 9}
_GRANITE = _RMS | _rope() | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4}
_GRANITE |= {"logits_scaling": 2.0}
_GRANITE_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_n_groups": 1}
_GRANITE_HYBRID = _GRANITE | _MAMBA | {"mamba_d_head": "auto"}
_NO_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 56}
_FALCON = _HEAD_DIM | _RMS | _MAMBA | {"mamba_d_ssm": 64}
_GROUPED = {"mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
_NEMOTRON = _HEAD_DIM | {"layer_norm_epsilon": 3e-3, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8}
_NEMOTRON |= {"n_groups": 2, "conv_kernel": 3, "num_hidden_layers": 4}
_NEMOTRON_MOE = _NEMOTRON | _ROUTED | {"hybrid_override_pattern": "M*EM", "moe_shared_expert_intermediate_size": 40}
_LATENT = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_latent_size": 16}
_GLM4_MOE = _HEAD_DIM | _RMS | _ROUTED | _rope(partial_rotary_factor=0.5) | {"first_k_dense_replace": 1}

# By the name in golden/gguf_logits.json.
FILES = {
    "llama": Case("llama", "llama", _LLAMA | _rope()),
    "llama with biases, tied": Case("llama", "llama", _LLAMA | _rope() | _BIASES | _TIED),
    "llama 3": Case("llama", "llama", _LLAMA | _rope(_LLAMA3)),
    "llama, linear": Case("llama", "llama", _LLAMA | _rope(_LINEAR)),
    "llama, linear, old keys": Case(
        *("llama", "llama", _LLAMA | _rope(_LINEAR)),
        dict.fromkeys(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "finetuned"))
        | {"rope.scale_linear": 4.0},
    ),
    "llama, yarn": Case("llama", "llama", _LLAMA | _rope(_YARN)),
    "mistral": Case("mistral", "llama", _LLAMA | _rope() | {"sliding_window": None}),
    "qwen2, yarn": Case("qwen2", "qwen2", _RMS | _rope(_YARN)),
    "qwen2, yarn of its own": Case(
        *("qwen2", "qwen2", _RMS | _rope(_OWN_YARN, attention_factor=1.1386294)),
        {f"rope.scaling.yarn_{key}": n for key, n in {"beta_fast": 8.0, "beta_slow": 2.0}.items()}
        | {"rope.scaling.yarn_attn_factor": 1.1386294},
        has_oracle=False,  # llama.cpp writes these keys, and reads none of them
    ),
    "qwen3": Case("qwen3", "qwen3", _HEAD_DIM | _RMS | _rope() | _TIED),
    "qwen3, yarn": Case("qwen3", "qwen3", _HEAD_DIM | _RMS | _rope(_YARN)),
    "qwen3moe": Case("qwen3_moe", "qwen3moe", _HEAD_DIM | _RMS | _SPARSE | _rope() | {"norm_topk_prob": True}),
    "gemma": Case("gemma", "gemma", _HEAD_DIM | _RMS | _rope(rope_theta=10000.0)),
    "gemma2": Case("gemma2", "gemma2", _GEMMA2 | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma2, 46 layers": Case(
        *("gemma2", "gemma2", _GEMMA2 | {"num_hidden_layers": 46, "query_pre_attn_scalar": 8, "sliding_window": 4096})
    ),
    "gemma3": Case("gemma3_text", "gemma3", _GEMMA3 | {"num_hidden_layers": 7}),
    "gemma3, linear": Case(
        *("gemma3_text", "gemma3"), _GEMMA3 | _ropes(_LINEAR) | {"num_hidden_layers": 7, "final_logit_softcapping": 2.0}
    ),
    "gemma3, other layers": Case(
        *("gemma3_text", "gemma3", _GEMMA3 | _layers("full", "sliding", "sliding", "full")),
        {"attention.sliding_window_pattern": [False, True, True, False]},
    ),
    "gemma3, 62 layers": Case(
        *("gemma3_text", "gemma3", _GEMMA3 | {"num_hidden_layers": 62, "query_pre_attn_scalar": 8})
    ),
    "phi3": Case("phi3", "phi3", _RMS | _rope(partial_rotary_factor=0.75) | {"sliding_window": None}),
    "phi3 with a window": Case(
        *("phi3", "phi3", _RMS | _rope(partial_rotary_factor=0.75) | {"sliding_window": 11}),
        has_oracle=False,  # llama.cpp warns that it leaves the window out
    ),
    "phi3, longrope": Case(
        *("phi3", "phi3", _RMS | _rope(_LONGROPE) | {"sliding_window": None, "max_position_embeddings": 512}),
        {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 256},
        {
            f"rope_factors_{kind}.weight": np.array(_LONGROPE[f"{kind}_factor"], np.float32)
            for kind in ("short", "long")
        },
    ),
    "starcoder2": Case("starcoder2", "starcoder2", _rope() | _TIED | {"norm_epsilon": 3e-3}),
    "gpt2": Case("gpt2", "gpt2", {"n_inner": 56, "layer_norm_epsilon": 3e-3}),
    "gpt2, its own head": Case("gpt2", "gpt2", _UNTIED | {"n_inner": 56, "layer_norm_epsilon": 3e-3}),
    "gemma4": Case(
        *("gemma4_text", "gemma4"),
        _GEMMA4
        | _layers(*["sliding", "full"] * 3)
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
        | {"final_logit_softcapping": 2.0},
        {"feed_forward_length": [56] * 4 + [112] * 2},
        _GEMMA4_FREQS,
    ),
    "gemma4, keys are values": Case(
        *("gemma4_text", "gemma4"),
        _GEMMA4
        | _layers("full", "sliding", "full")
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"final_logit_softcapping": 30.0},  # of llama.cpp where a file states none
        {"attention.head_count_kv": [1, 2, 1], "final_logit_softcapping": None},
        _GEMMA4_FREQS,
    ),
    "gemma4, experts": Case(
        *("gemma4_text", "gemma4"),
        _GEMMA4
        | _GEMMA4_MOE
        | _layers("sliding", "full")
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
        {"final_logit_softcapping": None},
        _GEMMA4_FREQS,
    ),
    "qwen35": Case("qwen3_5_text", "qwen35", _QWEN35 | {"linear_num_value_heads": 6}, _QWEN35_LAYERS),
    "qwen35, with a head": Case(
        *("qwen3_5_text", "qwen35", _QWEN35 | {"linear_num_value_heads": 2} | _TIED),
        _QWEN35_KEYS | {"block_count": 5, "nextn_predict_layers": 1},
        _MTP,
    ),
    "qwen35moe": Case(
        *("qwen3_5_moe_text", "qwen35moe", _QWEN35 | _SPARSE | _SHARED | {"linear_num_value_heads": 4}, _QWEN35_LAYERS)
    ),
    "lfm2": Case("lfm2", "lfm2", _LFM2 | {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": Case("lfm2_moe", "lfm2moe", _LFM2 | _LFM2_MOE, {"expert_gating_func": 2}),
    "gpt-oss": Case("gpt_oss", "gpt-oss", _GPT_OSS | _rope() | _layers("sliding", "full"), has_mxfp4=True),
    # Of a base so small that bounds are those of the head, whether they are rounded or not.
    "gpt-oss, yarn": Case("gpt_oss", "gpt-oss", _GPT_OSS | _rope(_YARN, rope_theta=2.0, truncate=False)),
    "granite": Case("granite", "granite", _GRANITE),
    "granitemoe": Case("granitemoeshared", "granitemoe", _GRANITE | _GRANITE_MOE),
    "granitehybrid": Case(
        *("granitemoehybrid", "granitehybrid"),
        _GRANITE_HYBRID | _NO_EXPERTS | {"layer_types": ["mamba", "attention", "mamba"]},
        {"context_length": 2**20},
    ),
    "granitehybrid, experts": Case(
        *("granitemoehybrid", "granitehybrid"),
        _GRANITE_HYBRID | _GRANITE_MOE | {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    ),
    "gemma3n": Case(
        *("gemma3n_text", "gemma3n"),
        _GEMMA3
        | _layers(*["sliding", "full"] * 2)
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": None}
        | {"laurel_rank": 6, "activation_sparsity_pattern": [0.75, 0.0, 0.0, 0.0], "altup_active_idx": 1}
        | {"final_logit_softcapping": 30.0},
        {"altup.active_idx": 1, "altup.num_inputs": 4, "activation_sparsity_scale": [0.6744897, *[float("-inf")] * 3]},
        has_oracle=False,  # llama.cpp has the sizes of the published models, whatever a file states
    ),
    "mistral3": Case("mistral", "mistral3", _LLAMA | _rope() | {"sliding_window": None}),
    "ministral3": Case(
        *("ministral3", "mistral3"),
        _LLAMA | _rope(_YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3, max_position_embeddings=160),
        {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
    ),
    "smollm3": Case("smollm3", "smollm3", _RMS | _rope() | {"num_hidden_layers": 5}),
    "olmo2": Case("olmo2", "olmo2", _RMS | _rope()),
    "olmo3": Case(
        "olmo3", "olmo2", _RMS | _ropes(_YARN, _DEFAULT) | _layers("sliding", "full") | {"sliding_window": 9}
    ),
    "glm4": Case("glm4", "glm4", _HEAD_DIM | _RMS | _rope(partial_rotary_factor=0.5)),
    "glm4moe": Case(
        *("glm4_moe", "glm4moe"),
        _GLM4_MOE | {"num_hidden_layers": 3, "n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True},
        {"expert_gating_func": 2},
    ),
    "falcon-h1": Case(
        *("falcon_h1", "falcon-h1"),
        _FALCON
        | _rope()
        | _GROUPED
        | {"attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "key_multiplier": 0.8}
        | {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 0.875]}
        | {"mlp_multipliers": [1.3, 0.6], "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0},
    ),
    "nemotron_h": Case("nemotron_h", "nemotron_h", _NEMOTRON | {"hybrid_override_pattern": "M*-M"}),
    "nemotron_h_moe": Case("nemotron_h", "nemotron_h_moe", _NEMOTRON_MOE),
    "nemotron_h_moe, latent, groups": Case("nemotron_h", "nemotron_h_moe", _NEMOTRON_MOE | _LATENT),
}

_WIDE, _MIXED = {"head_dim": 14}, _layers("sliding", "full", "sliding")
_GEMMA2_MIXED = _WIDE | _MIXED | {"query_pre_attn_scalar": 11, "sliding_window": 6}
_RECURRENT = _layers("linear", "full", "linear") | {"head_dim": 16, "linear_key_head_dim": 10}
_RECURRENT |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 12}
_HYBRID = {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_head": "auto", "mamba_d_state": 11}
_HYBRID |= {"num_local_experts": 0, "shared_intermediate_size": 64}
_NEMOTRON_WIDE = _WIDE | {"mamba_num_heads": 6, "mamba_head_dim": 11, "ssm_state_size": 13, "time_step_min": 0.9}
_NEMOTRON_EXPERTS = _NEMOTRON_WIDE | _ROUTED | {"layers_block_type": ["mamba", "moe", "attention", "moe"]}
_NEMOTRON_EXPERTS |= {"n_groups": 1, "moe_shared_expert_intermediate_size": 56}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
_ERNIE = {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
_GROUPS = _GLM4_MOE | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_SLIDING = {"use_sliding_window": True, "sliding_window": 7}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3}
_CUT_YARN = _rope(_OWN_YARN, attention_factor=1.2, truncate=False)
_STEPS = {"mamba_expand": 3, "mamba_n_heads": 3, "time_step_limit": (0.9, float("inf"))}

# By family: fields that no row of FILES has, for families with a native plan.
VARIATIONS: dict[str, dict[str, Fields]] = {
    "llama": {
        "one group, gelu": {"num_key_value_heads": 1, "attention_bias": True, "hidden_act": "gelu"},
        "five heads a group": {"num_attention_heads": 10, "head_dim": 20, "hidden_act": "relu2"} | _CUT_YARN,
    },
    "mistral": {"a window": {"sliding_window": 7} | _WIDE | _TIED},
    "qwen2": {"windows": _SLIDING | _TIED | {"max_window_layers": 1}},
    "qwen3": {"windows": _SLIDING | {"max_window_layers": 2, "attention_bias": True, "rms_norm_eps": 0.1}},
    "smollm3": {"no ropes": _SLIDING | _MIXED | _BIASES | _UNTIED | {"no_rope_layers": [0, 0, 1]}},
    "phi3": {
        "a window": {"sliding_window": 7, "full_attn_mod": 1, "interpolate_factor": 1} | _MIXED  # it reads no layers
    },
    "gemma": {"untied, biases": _UNTIED | {"head_dim": 10, "attention_bias": True, "hidden_act": "relu"}},
    "gemma2": {"low caps": _GEMMA2_MIXED | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}},
    "gemma3_text": {"biases": _GEMMA2_MIXED | _ropes(_LINEAR) | {"attention_bias": True}},
    "qwen3_5_text": {
        "a state for each": _RECURRENT | _UNTIED | {"attention_bias": True},
        "wide values": _RECURRENT
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 37}
        | {"linear_key_head_dim": 18, "linear_conv_kernel_dim": 2},
    },
    "granitemoehybrid": {
        "ropes, biases, tied": _HYBRID
        | {"position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_heads": 4}
        | {"attention_bias": True}
        | _TIED,
        "wide": _HYBRID | _MULTIPLIERS | _STEPS | {"mamba_chunk_size": 16, "logits_scaling": 2.5},
    },
    "falcon_h1": {
        "no norm": _FALCON,
        "biases, by expansion": _FALCON
        | _STEPS
        | _BIASES
        | {"mamba_proj_bias": True, "projectors_bias": True, "mamba_conv_bias": False, "mamba_chunk_size": 16}
        | {"mamba_d_ssm": None, "mamba_d_head": "auto"},
    },
    "nemotron_h": {
        "biases, groups": _NEMOTRON_WIDE
        | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mlp_hidden_act": "silu", "n_groups": 2}
        | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 0.1}
        | _TIED,
        "latent experts, biases": _NEMOTRON_EXPERTS
        | {"moe_latent_size": 24, "mlp_bias": True, "norm_topk_prob": False},
        "wide latent experts in groups": _NEMOTRON_EXPERTS | _LATENT | {"moe_latent_size": 48},
    },
    "lfm2": {
        "biases, untied": _LFM2 | _UNTIED | {"conv_bias": True, "norm_eps": 0.1, "block_auto_adjust_ff_dim": False}
    },
    "starcoder2": {
        "a window": {"use_bias": False, "hidden_act": "gelu", "norm_epsilon": 0.1, "sliding_window": 7}
        | _WIDE
        | _rope(_LINEAR)
        | {"norm_type": "layer_norm", "mlp_type": "default"}
    },
    "gpt2": {
        "unscaled scores": {"scale_attn_weights": False, "reorder_and_upcast_attn": True, "layer_norm_epsilon": 0.1}
        | {"n_inner": 72, "activation_function": "gelu"}
    },
    "exaone4": {"plain": {"sliding_window": 7, "sliding_window_pattern": 2}},
    "ernie4_5": {"plain": _HEAD_DIM | {"use_bias": True} | _UNTIED},
    "cohere2": {
        "plain": {"sliding_window": 7, "logit_scale": 0.5, "attention_bias": True, "layer_norm_eps": 0.1} | _MIXED
    },
    "ministral3": {"a window": {"sliding_window": 7} | _HEAD_DIM | _TIED | _rope(_YARN, llama_4_scaling_beta=0.1)},
    "olmoe": {"plain": _MOE | {"num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True}},
    "ernie4_5_moe": {"plain": _ERNIE | {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_norm_min": 1e-9}},
    "qwen3_moe": {
        "dense layers": _EXPERTS | {"mlp_only_layers": [0], "num_experts_per_tok": 1, "attention_bias": True}
    },
    "qwen2_moe": {"plain": _EXPERTS | _SHARED | _SLIDING | {"decoder_sparse_step": 2}},
    "mixtral": {"plain": {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7} | _WIDE},
    "granitemoe": {
        "plain": _MULTIPLIERS
        | {"logits_scaling": 2.5, "num_local_experts": 5, "num_experts_per_tok": 1, "attention_bias": True}
    },
    "glm4_moe": {"groups": _GROUPS},
    "qwen3_5_moe_text": {
        "tied, biases": _RECURRENT | _EXPERTS | _SHARED | _TIED | {"attention_bias": True, "num_experts_per_tok": 1}
    },
    "lfm2_moe": {
        "no correction, biases": _LFM2
        | _LFM2_MOE
        | {"use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True, "routed_scaling_factor": 1.7}
        | _UNTIED
    },
    "gpt_oss": {
        "a long window, yarn": _GPT_OSS | _MIXED | _CUT_YARN | {"sliding_window": 260, "attention_bias": False},
        "a low limit": _GPT_OSS | {"swiglu_limit": 0.5, "swiglu_alpha": 1.1, "layer_types": None} | _TIED,
    },
    "gemma4_text": {
        "of published files": _GEMMA4
        | _GEMMA4_MOE
        | _layers("sliding", "full", "full")
        | {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 120, "hidden_activation": "silu"}
        | {"hidden_size_per_layer_input": 28, "attention_bias": True}
    },
}
