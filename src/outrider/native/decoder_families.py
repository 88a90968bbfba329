"""Plans of families with attention and an MLP or experts in each layer: what differs from Llama's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.native.parts import (
    Fields,
    experts_of,
    halves_of,
    head_norms,
    inputs_of,
    layer_norm,
    like_llama,
    linear,
    mlp_of,
    rms,
    rope_of,
    routed_experts_of,
    scales_of_granite,
    window_of,
)
from outrider.native.plan import Families, MatrixPlan, NotPlanned


def _window(config: Any, at: str, i: int) -> Fields:
    return {"window": config.sliding_window}


def _interleaved_rope(config: Any) -> Fields:
    return {"ropes": (rope_of(config, is_interleaved=True),)}


def _qwen2_attention(config: Any, at: str, i: int, has_bias: bool = True) -> Fields:
    out = linear(f"{at}.self_attn.o_proj")
    return {"inputs": inputs_of(at, has_bias), "out": out, "window": window_of(config, i)}


def _ministral3_attention(config: Any, at: str, i: int) -> Fields:
    rope = config.rope_parameters
    floor_scale = rope["original_max_position_embeddings"]
    tuning = {"temperature_scale": rope["llama_4_scaling_beta"], "temperature_floor_scale": floor_scale}
    return _window(config, at, i) | tuning


def _norms_after(config: Any, at: str, i: int) -> Fields:
    """Norms after the halves of a layer instead of before."""
    post, mlp_post = (rms(config, f"{at}.post_{name}_layernorm") for name in ("attention", "feedforward"))
    return {"mixer_norm": None, "mlp_norm": None, "mixer_post_norm": post, "mlp_post_norm": mlp_post}


def _olmo_attention(config: Any, at: str, i: int) -> Fields:
    """OLMo 2 and 3: norms of queries and keys are of whole rows."""
    found = {"norms_whole_rows": True, **head_norms(config, at)}
    if config.model_type == "olmo3":
        found |= {"rope": sorted({*config.layer_types}).index(config.layer_types[i]), "window": window_of(config, i)}
    return found


def _exaone4_attention(config: Any, at: str, i: int) -> Fields:
    window = window_of(config, i)
    rope = 0 if window is not None or config.sliding_window is None else None
    return {"rope": rope, "window": window, **head_norms(config, at)}


def _cohere2_attention(config: Any, at: str, i: int) -> Fields:
    """Layers without a window have no rope."""
    window = window_of(config, i)
    return {"rope": None if window is None else 0, "window": window}


def _cohere2_layer(config: Any, at: str, i: int) -> Fields:
    """Both halves of a layer read the same norm."""
    norm = layer_norm(f"{at}.input_layernorm", config.layer_norm_eps, False)
    return {"mixer_norm": norm, "mlp_norm": None, "is_parallel": True}


def _cohere2_whole(config: Any) -> Fields:
    norm = layer_norm("model.norm", config.layer_norm_eps, False)
    return {"final_norm": norm, "logit_scale": config.logit_scale, **_interleaved_rope(config)}


def _granite_attention(config: Any, at: str, i: int) -> Fields:
    return {"scale": config.attention_multiplier}


def _joined_mlp(config: Any, at: str, i: int) -> Fields:
    return {"mlp": mlp_of(config, f"{at}.mlp", ups=halves_of(f"{at}.mlp.gate_up_proj"))}


def _glm4_attention(config: Any, at: str, i: int) -> Fields:
    norms = head_norms(config, at) if getattr(config, "use_qk_norm", False) else {}
    return {"out": linear(f"{at}.self_attn.o_proj"), **norms}


def _glm4_layer(config: Any, at: str, i: int) -> Fields:
    post, mlp_post = (rms(config, f"{at}.post_{name}_layernorm") for name in ("self_attn", "mlp"))
    return {"mixer_post_norm": post, "mlp_post_norm": mlp_post, **_joined_mlp(config, at, i)}


def _starcoder2_attention(config: Any, at: str, i: int) -> Fields:
    out = linear(f"{at}.self_attn.o_proj", config.use_bias)
    return {"inputs": inputs_of(at, config.use_bias), "out": out, **_window(config, at, i)}


def _starcoder2_layer(config: Any, at: str, i: int) -> Fields:
    up, down = (linear(f"{at}.mlp.{name}", config.use_bias) for name in ("c_fc", "c_proj"))
    norms = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    found: Fields = {field: layer_norm(f"{at}.{name}", config.norm_epsilon) for field, name in norms.items()}
    return found | {"mlp": mlp_of(config, at, ups=(up,), down=down)}


def _conv(name: str) -> MatrixPlan:
    return MatrixPlan(f"{name}.weight", f"{name}.bias", is_transposed=True)


def _gpt2_attention(config: Any, at: str, i: int) -> Fields:
    if config.scale_attn_by_inverse_layer_idx or config.add_cross_attention:
        raise NotPlanned("its plan does not know this attention")
    scale = {} if config.scale_attn_weights else {"scale": 1.0}
    return {"inputs": (_conv(f"{at}.attn.c_attn"),), "out": _conv(f"{at}.attn.c_proj"), "rope": None, **scale}


def _gpt2_layer(config: Any, at: str, i: int) -> Fields:
    norm, mlp_norm = (layer_norm(f"{at}.ln_{i}", config.layer_norm_epsilon) for i in (1, 2))
    mlp = mlp_of(config, at, ups=(_conv(f"{at}.mlp.c_fc"),), down=_conv(f"{at}.mlp.c_proj"))
    return {"mlp": mlp, "mixer_norm": norm, "mlp_norm": mlp_norm}


def _gpt2_whole(config: Any) -> Fields:
    return {
        "at": "transformer.h",
        "final_norm": layer_norm("transformer.ln_f", config.layer_norm_epsilon),
        "ropes": (),
        "embedding": "transformer.wte.weight",
        "position_embedding": "transformer.wpe.weight",
        "num_positions": config.n_positions,
    }


# Experts


def _only_experts(config: Any, at: str, i: int) -> Fields:
    if config.model_type != "granitemoe":
        return {"mlp": None, "experts": experts_of(config, f"{at}.mlp")}
    block = f"{at}.block_sparse_moe"
    return {"mlp": None, "experts": experts_of(config, block, router=linear(f"{block}.router"))}


def _qwen3_moe_layer(config: Any, at: str, i: int) -> Fields:
    is_dense = i in config.mlp_only_layers or not config.num_experts or (i + 1) % config.decoder_sparse_step
    return {} if is_dense else _only_experts(config, at, i)


def _qwen2_moe_layer(config: Any, at: str, i: int) -> Fields:
    found, gate = _qwen3_moe_layer(config, at, i), linear(f"{at}.mlp.shared_expert_gate")
    return found and found | {"mlp": mlp_of(config, f"{at}.mlp.shared_expert", output_gate=gate)}


def _glm4_moe_layer(config: Any, at: str, i: int) -> Fields:
    if i < config.first_k_dense_replace:
        return {}
    shared, experts = mlp_of(config, f"{at}.mlp.shared_experts"), routed_experts_of(config, f"{at}.mlp")
    return {"mlp": shared, "experts": experts}


def _ernie4_5_moe_layer(config: Any, at: str, i: int) -> Fields:
    if config.moe_norm_min > 1e-9:  # the least sum of the weights of a token's experts
        raise NotPlanned(f"its plan does not know moe_norm_min={config.moe_norm_min}")
    last = config.moe_layer_end_index % config.num_hidden_layers
    if (i + 1) % config.moe_layer_interval or not config.moe_layer_start_index <= i <= last:
        return {}
    correction_bias = f"{at}.mlp.gate.moe_statics.e_score_correction_bias"
    shared = mlp_of(config, f"{at}.mlp.shared_experts") if config.moe_num_shared_experts else None
    return {"mlp": shared, "experts": experts_of(config, f"{at}.mlp", correction_bias=correction_bias)}


def _ernie4_5_moe_whole(config: Any) -> Fields:
    head = linear("lm_head", config.use_bias)
    if config.tie_word_embeddings:
        head = replace(head, weight="model.embed_tokens.weight")
    return {"lm_head": head, **_interleaved_rope(config)}


def _gpt_oss_layer(config: Any, at: str, i: int) -> Fields:
    if config.num_local_experts == 1:
        raise NotPlanned("its plan does not know a single expert")

    def matrices(name: str, part: int = 0, num_parts: int = 1) -> MatrixPlan:
        name = f"{at}.mlp.experts.{name}_proj"
        return MatrixPlan(name, f"{name}_bias", part, num_parts, is_transposed=True)

    experts = experts_of(
        config,
        f"{at}.mlp",
        router=linear(f"{at}.mlp.router", True),
        ups=tuple(matrices("gate_up", part, 2) for part in range(2)),
        down=matrices("down"),
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
    )
    return {"mlp": None, "experts": experts}


_BIASES = "attention_bias mlp_bias"
_GRANITE = "embedding_multiplier attention_multiplier residual_multiplier logits_scaling"
_EXPERTS = "num_experts_per_tok num_local_experts num_experts"
_QWEN_EXPERTS = f"{_EXPERTS} moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"
FAMILIES: Families = {
    "llama": (like_llama(), _BIASES),
    "mistral": (like_llama(_window), ""),
    "qwen2": (like_llama(_qwen2_attention), ""),
    "qwen3": (like_llama(lambda c, at, i: {"window": window_of(c, i), **head_norms(c, at)}), _BIASES),
    "smollm3": (
        like_llama(lambda c, at, i: {"rope": 0 if c.no_rope_layers[i] else None, "window": window_of(c, i)}),
        f"{_BIASES} no_rope_layers no_rope_layer_interval",
    ),
    "olmo2": (like_llama(_olmo_attention, _norms_after), _BIASES),
    "olmo3": (
        like_llama(
            *(_olmo_attention, _norms_after),
            lambda c: {"ropes": tuple(rope_of(c, kind) for kind in sorted({*c.layer_types}))},
        ),
        _BIASES,
    ),
    "exaone4": (like_llama(_exaone4_attention, _norms_after), "sliding_window_pattern"),
    "ernie4_5": (like_llama(whole=_interleaved_rope), "use_bias"),
    "cohere2": (
        like_llama(_cohere2_attention, _cohere2_layer, _cohere2_whole),
        "attention_bias layer_norm_eps logit_scale",
    ),
    "ministral3": (like_llama(_ministral3_attention), ""),
    "granite": (like_llama(_granite_attention, whole=scales_of_granite), f"{_BIASES} {_GRANITE}"),
    "phi3": (
        like_llama(
            lambda c, at, i: {"inputs": (linear(f"{at}.self_attn.qkv_proj"),), "window": c.sliding_window}, _joined_mlp
        ),
        "full_attn_mod interpolate_factor partial_rotary_factor",
    ),
    "glm4": (like_llama(_glm4_attention, _glm4_layer, _interleaved_rope), f"{_BIASES} partial_rotary_factor"),
    "starcoder2": (
        like_llama(
            _starcoder2_attention,
            _starcoder2_layer,
            lambda c: {"final_norm": layer_norm("model.norm", c.norm_epsilon)},
        ),
        "use_bias norm_epsilon norm_type mlp_type",
    ),
    "gpt2": (
        like_llama(_gpt2_attention, _gpt2_layer, _gpt2_whole),
        "activation_function attn_pdrop layer_norm_epsilon n_embd n_head n_inner n_layer n_positions n_ctx "
        "scale_attn_weights summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj reorder_and_upcast_attn task_specific_params",
    ),
    "qwen2_moe": (
        like_llama(lambda c, at, i: _qwen2_attention(c, at, i, c.qkv_bias), _qwen2_moe_layer),
        f"{_QWEN_EXPERTS} shared_expert_intermediate_size qkv_bias",
    ),
    "qwen3_moe": (
        like_llama(lambda c, at, i: {**_window(c, at, i), **head_norms(c, at)}, _qwen3_moe_layer),
        f"{_QWEN_EXPERTS} attention_bias",
    ),
    "mixtral": (like_llama(_window, _only_experts), _EXPERTS),
    "ernie4_5_moe": (
        like_llama(layer=_ernie4_5_moe_layer, whole=_ernie4_5_moe_whole),
        f"{_EXPERTS} use_bias moe_intermediate_size moe_k moe_num_experts moe_num_shared_experts "
        "moe_layer_start_index moe_layer_end_index moe_layer_interval moe_norm_min moe_capacity",
    ),
    "olmoe": (like_llama(_olmo_attention, _only_experts), f"{_EXPERTS} attention_bias norm_topk_prob"),
    "gpt_oss": (
        like_llama(lambda c, at, i: {"window": window_of(c, i), "sinks": f"{at}.self_attn.sinks"}, _gpt_oss_layer),
        f"{_EXPERTS} attention_bias swiglu_alpha swiglu_limit",
    ),
    "granitemoe": (
        like_llama(_granite_attention, _only_experts, scales_of_granite),
        f"{_EXPERTS} attention_bias {_GRANITE}",
    ),
    "glm4_moe": (
        like_llama(_glm4_attention, _glm4_moe_layer),
        f"{_EXPERTS} attention_bias moe_intermediate_size norm_topk_prob n_shared_experts n_routed_experts "
        "routed_scaling_factor n_group topk_group first_k_dense_replace use_qk_norm num_mtp_layers "
        "num_nextn_predict_layers partial_rotary_factor",
    ),
}
