"""Plans of families with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.native.parts import (
    attention_of,
    decoder_of,
    experts_of,
    head_norms,
    inputs_of,
    layer_of,
    linear,
    mlp_of,
    rope_of,
    window_of,
)
from outrider.native.plan import AttentionPlan, Families, LayerPlan, MatrixPlan, MlpPlan, NotPlanned, Plan


def _qwen_layer(config: Any, at: str, i: int, mixer: AttentionPlan, shared: MlpPlan | None = None) -> LayerPlan:
    if i in config.mlp_only_layers or not config.num_experts or (i + 1) % config.decoder_sparse_step:
        return layer_of(config, at, mixer)
    return layer_of(config, at, mixer, mlp=shared, experts=experts_of(config, f"{at}.mlp"))


def _qwen2_moe(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        inputs, out = inputs_of(at, config.qkv_bias), linear(f"{at}.self_attn.o_proj")
        mixer = attention_of(config, at, inputs=inputs, out=out, window=window_of(config, i))
        shared = mlp_of(config, f"{at}.mlp.shared_expert", scale=linear(f"{at}.mlp.shared_expert_gate"))
        return _qwen_layer(config, at, i, mixer, shared)

    return decoder_of(config, layer)


def _qwen3_moe(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        mixer = attention_of(config, at, window=config.sliding_window, **head_norms(config, at))
        return _qwen_layer(config, at, i, mixer)

    return decoder_of(config, layer)


def _mixtral(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        mixer = attention_of(config, at, window=config.sliding_window)
        return layer_of(config, at, mixer, mlp=None, experts=experts_of(config, f"{at}.mlp"))

    return decoder_of(config, layer)


def _granitemoe(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        mixer, block = attention_of(config, at, scale=config.attention_multiplier), f"{at}.block_sparse_moe"
        return layer_of(
            config, at, mixer, mlp=None, experts=experts_of(config, block, router=linear(f"{block}.router"))
        )

    return decoder_of(
        config,
        layer,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _glm4_moe(config: Any) -> Plan:
    if config.n_group != 1:
        raise NotPlanned("its plan does not know groups of experts")

    def layer(at: str, i: int) -> LayerPlan:
        norms = head_norms(config, at) if config.use_qk_norm else {}
        mixer = attention_of(config, at, out=linear(f"{at}.self_attn.o_proj"), **norms)
        if i < config.first_k_dense_replace:
            return layer_of(config, at, mixer)
        experts = experts_of(
            config,
            f"{at}.mlp",
            is_sigmoid=True,
            added=1e-20,
            scale=config.routed_scaling_factor,
            correction=f"{at}.mlp.gate.e_score_correction_bias",
        )
        return layer_of(config, at, mixer, mlp=mlp_of(config, f"{at}.mlp.shared_experts"), experts=experts)

    return decoder_of(config, layer)


def _ernie4_5_moe(config: Any) -> Plan:
    if config.moe_norm_min > 1e-9:  # the least sum of the weights of a token's experts
        raise NotPlanned(f"its plan does not know moe_norm_min={config.moe_norm_min}")
    last = config.moe_layer_end_index % config.num_hidden_layers

    def layer(at: str, i: int) -> LayerPlan:
        if (i + 1) % config.moe_layer_interval or not config.moe_layer_start_index <= i <= last:
            return layer_of(config, at)
        correction = f"{at}.mlp.gate.moe_statics.e_score_correction_bias"
        shared = mlp_of(config, f"{at}.mlp.shared_experts") if config.moe_num_shared_experts else None
        return layer_of(config, at, mlp=shared, experts=experts_of(config, f"{at}.mlp", correction=correction))

    head = linear("lm_head", config.use_bias)
    if config.tie_word_embeddings:
        head = replace(head, weight="model.embed_tokens.weight")
    return decoder_of(config, layer, ropes=(rope_of(config, is_interleaved=True),), head=head)


def _olmoe(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        mixer = attention_of(config, at, norms_whole_rows=True, **head_norms(config, at))
        return layer_of(config, at, mixer, mlp=None, experts=experts_of(config, f"{at}.mlp"))

    return decoder_of(config, layer)


def _gpt_oss(config: Any) -> Plan:
    if config.num_local_experts == 1:
        raise NotPlanned("its plan does not know a single expert")

    def layer(at: str, i: int) -> LayerPlan:
        def experts(name: str, part: int = 0, num_parts: int = 1) -> MatrixPlan:
            name = f"{at}.mlp.experts.{name}_proj"
            return MatrixPlan(name, f"{name}_bias", part, num_parts, is_transposed=True)

        return layer_of(
            config,
            at,
            attention_of(config, at, window=window_of(config, i), sinks=f"{at}.self_attn.sinks"),
            mlp=None,
            experts=experts_of(
                config,
                f"{at}.mlp",
                router=linear(f"{at}.mlp.router", True),
                ups=tuple(experts("gate_up", part, 2) for part in range(2)),
                down=experts("down"),
                slope=config.swiglu_alpha,
                limit=config.swiglu_limit,
            ),
        )

    return decoder_of(config, layer)


_COMMON = "num_experts_per_tok num_local_experts num_experts"
_QWEN = f"{_COMMON} moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"
FAMILIES: Families = {
    "qwen2_moe": (_qwen2_moe, f"{_QWEN} shared_expert_intermediate_size qkv_bias"),
    "qwen3_moe": (_qwen3_moe, f"{_QWEN} attention_bias"),
    "mixtral": (_mixtral, _COMMON),
    "ernie4_5_moe": (
        _ernie4_5_moe,
        f"{_COMMON} use_bias moe_intermediate_size moe_k moe_num_experts moe_num_shared_experts moe_layer_start_index "
        "moe_layer_end_index moe_layer_interval moe_norm_min moe_capacity",
    ),
    "olmoe": (_olmoe, f"{_COMMON} attention_bias norm_topk_prob"),
    "gpt_oss": (_gpt_oss, f"{_COMMON} attention_bias swiglu_alpha swiglu_limit"),
    "granitemoe": (
        _granitemoe,
        f"{_COMMON} attention_bias embedding_multiplier attention_multiplier residual_multiplier logits_scaling",
    ),
    "glm4_moe": (
        _glm4_moe,
        f"{_COMMON} attention_bias moe_intermediate_size norm_topk_prob n_shared_experts n_routed_experts "
        "routed_scaling_factor n_group topk_group first_k_dense_replace use_qk_norm num_mtp_layers "
        "num_nextn_predict_layers",
    ),
}
