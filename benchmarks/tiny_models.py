"""Tiny models of the types of causal models in Transformers, with random weights, for scripts and tests.

Weights are large, so that logits are far apart and depend on the whole text. Windows are short, so that a text of some
dozen tokens is beyond them: a wrong window is seen.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

V = 97
_MOST_PARAMS = 20_000_000
# One size by all of its names: a configuration takes those that it knows.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim")
_INNER = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_inner")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
LENGTH, SPAN = 256, 16
"""Tokens of a context, and of each window, chunk and block in it."""
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")
_BASE: dict[str, Any] = {
    "vocab_size": V,
    **dict.fromkeys(_HIDDEN, 32),
    **dict.fromkeys(_INNER, 64),
    **dict.fromkeys(_LAYERS, 4),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_LENGTHS, LENGTH),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "is_decoder": True,
}
_NONE = object()  # leave this size to the configuration
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_SCAN = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False}
_PURE_SCAN = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
_DELTA_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_CONV_LAYERS = ["conv", "conv", "full_attention", "conv"]
_SLIDING_LAYERS = ["sliding_attention", "full_attention"] * 2
_GEMMA = {"layer_types": _SLIDING_LAYERS}
# The later layers read the keys and values of earlier ones, of their own kind.
_GEMMA4 = {**_GEMMA, "embed_dim": _NONE, "global_head_dim": 16, "num_kv_shared_layers": 2, "attention_k_eq_v": True}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": V}
_MAMBA_LAYERS = ["mamba", "mamba", "attention", "mamba"]
_EXTRA: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen4_exp_text": {
        **_DELTA,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 8,
        "indexer_budget": SPAN,
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        **_GEMMA,
        **_PER_LAYER,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0],
        "laurel_rank": 4,
    },
    "gemma4_text": _GEMMA4 | _PER_LAYER,
    "gemma4_unified_text": _GEMMA4,
    "lfm2": {"layer_types": _CONV_LAYERS},
    "lfm2_moe": {"layer_types": _CONV_LAYERS},
    "granitemoehybrid": {**_MAMBA, "layer_types": _MAMBA_LAYERS, "shared_intermediate_size": 32},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA, "attn_layer_indices": [2]},
    "olmo_hybrid": {**_DELTA, "layer_types": _DELTA_LAYERS},
    "kimi_linear": {
        **_LATENT,
        **_DELTA,
        "layer_types": _DELTA_LAYERS,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
    },
    "zamba": {
        **_SCAN,
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "n_mamba_heads": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        **_SCAN,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
        "use_mem_rope": True,
    },
    "jamba": {
        **_SCAN,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "mamba": _PURE_SCAN,
    "falcon_mamba": _PURE_SCAN,
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "opt": {"pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    # Its own configuration has full attention only, unlike the checkpoint.
    "minimax_m3_vl_text": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3], "index_n_heads": 2},
    "falcon": {"head_dim": _NONE},
    "bailing_hybrid": {"layer_group_size": 2},
}
# Of what reads images beside a text model: by all of its names, as above.
_SIGHT: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size", "output_dim", "vision_output_dim"), 32),
    **dict.fromkeys((*_INNER, "projector_input_dim", "projector_output_dim"), 64),
    **dict.fromkeys((*_LAYERS, "depth", "num_global_layers"), 1),
    **dict.fromkeys((*_HEADS, "attention_heads", "num_key_value_heads"), 4),
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
    "deepstack_visual_indexes": [],
    "position_embedding_size": 64,
    "vision_output_dim": 64,
}
# How far a token looks, by the ends of the names that fields have for it. Where windows are optional, they are on.
_SPANS: dict[str, int | bool] = {
    r"(window|window_size|window_len|chunk_?size|chunk_length|block_size|local_attention|index_topk)$": SPAN,
    "index_topk_blocks$": 2,
    "max_window_layers$": 2,
    "use_sliding_window$": True,
}
# Some types want another form of attention or experts. The first of these that makes a model which runs is taken.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    _LATENT,
    {**_LATENT, "q_lora_rank": 16},
    {"num_experts_per_tok": 1},
    {"head_dim": _NONE},
)


def spans_of(known: Iterable[str]) -> dict[str, int | bool]:
    """Those of ``_SPANS`` among the fields of a type. (A configuration keeps unknown ones, too, and might be taken for
    one with a window.)"""
    return {field: size for field in known for end, size in _SPANS.items() if re.search(end, field)}


def tiny(name: str, seed: int = 1, **options: Any) -> Any:
    """A model of this type, as ``AutoConfig`` names it, in float32.

    Args:
        options: of the configuration, in place of those from the sizes above.

    Raises:
        Exception: whatever a configuration makes of sizes that it does not expect.
    """
    failures = []
    for variant in _VARIANTS:
        try:
            model = _made(AutoConfig.for_model(name, **_sizes(name, variant, options)), seed)
            with torch.no_grad():
                model(input_ids=torch.arange(5)[None], use_cache=False)
        except Exception as error:
            failures.append(error)
        else:
            return model
    raise failures[0]


def _sizes(name: str, variant: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a configuration; of a model of text and images, in those of its parts."""
    parts = CONFIG_MAPPING[name].sub_configs
    if "text_config" in parts:
        usual = AutoConfig.for_model(name)
        text = _sizes(usual.text_config.model_type, variant, options)
        sight = getattr(usual, "vision_config", None)
        others = {} if sight is None else {"vision_config": _SIGHT | {"model_type": sight.model_type}}
        return {"text_config": text, **others, **_EXTRA.get(name, {})}
    known = AutoConfig.for_model(name).to_dict()
    found = {**_BASE, **_EXPERTS, **spans_of(known), **variant, **_EXTRA.get(name, {}), **options}
    return {key: value for key, value in found.items() if value is not _NONE}


def _made(config: Any, seed: int) -> Any:
    with torch.device("meta"):
        num_params = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if num_params > _MOST_PARAMS:
        raise ValueError(f"{num_params:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval().requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in parameter_name:
                torch.nn.init.normal_(parameter, std=0.25)
    return model
