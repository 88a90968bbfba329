"""Plans of families with recurrent and convolutional layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.native import parts, plan

_RECURRENT = ("linear_attention", "mamba")  # layers: the new name and the old
_INFINITE = float("inf")


def _qwen3_5(config: Any) -> plan.Plan:
    """Qwen3.5: the gated delta rule in most layers, and gated attention. Factors of norms are stored less 1."""
    _check_silu(config)
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    num_groups, num_heads = config.linear_num_key_heads, config.linear_num_value_heads

    def mixer(at: str, i: int) -> plan.Mixer:
        if config.layer_types[i] != "linear_attention":
            norms = parts.head_norms(config, at, 1.0)
            return parts.attention_of(config, at, is_gated=True, window=parts.window_of(config, i), **norms)
        at = f"{at}.linear_attn"
        return plan.RecurrencePlan(
            "delta",
            conv_width=2 * num_groups * key_width + num_heads * value_width,
            kernel_size=config.linear_conv_kernel_dim,
            conv_weight=f"{at}.conv1d.weight",
            inputs=tuple(parts.linear(f"{at}.in_proj_{name}") for name in ("qkv", "b", "a", "z")),
            out=parts.linear(f"{at}.out_proj"),
            num_heads=num_heads,
            num_groups=num_groups,
            key_width=key_width,
            value_width=value_width,
            a_log=f"{at}.A_log",
            dt_bias=f"{at}.dt_bias",
            out_norm=parts.rms(config, f"{at}.norm"),
        )

    def layer(at: str, i: int) -> plan.LayerPlan:
        norms = ("mixer_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")
        others: dict[str, Any] = {field: parts.rms(config, f"{at}.{name}", 1.0) for field, name in norms}
        if config.model_type == "qwen3_5_moe_text":
            gate = parts.linear(f"{at}.mlp.shared_expert_gate")
            others["mlp"] = parts.mlp_of(config, f"{at}.mlp.shared_expert", output_gate=gate)
            others["experts"] = parts.experts_of(config, f"{at}.mlp")
        return parts.layer_of(config, at, mixer(at, i), **others)

    return parts.decoder_of(config, layer, final_norm=parts.rms(config, "model.norm", 1.0))


def _lfm2(config: Any) -> plan.Plan:
    """LFM2: short convolutions between gates in most layers."""
    bias, epsilon = bool(config.conv_bias), config.norm_eps

    def norm(name: str) -> plan.NormPlan:
        return plan.NormPlan("rms", f"{name}.weight", epsilon)

    def mixer(at: str, i: int) -> plan.Mixer:
        if config.layer_types[i] != "conv":
            at_attention = f"{at}.self_attn"
            return parts.attention_of(
                config,
                at,
                window=parts.window_of(config, i),
                out=parts.linear(f"{at_attention}.out_proj"),
                query_norm=norm(f"{at_attention}.q_layernorm"),
                key_norm=norm(f"{at_attention}.k_layernorm"),
            )
        return plan.RecurrencePlan(
            "convolution",
            conv_width=config.hidden_size,
            kernel_size=config.conv_L_cache,
            conv_weight=f"{at}.conv.conv.weight",
            conv_bias=f"{at}.conv.conv.bias" if bias else None,
            inputs=tuple(parts.linear(f"{at}.conv.in_proj", bias, part, 3) for part in (0, 2, 1)),
            out=parts.linear(f"{at}.conv.out_proj", bias),
        )

    def experts(at: str) -> plan.ExpertsPlan:
        correction_bias = f"{at}.expert_bias" if config.use_expert_bias else None
        of_router = {"is_sigmoid": True, "sum_epsilon": 1e-6, "scale": config.routed_scaling_factor}
        return parts.experts_of(config, at, activation="silu", correction_bias=correction_bias, **of_router)

    def layer(at: str, i: int) -> plan.LayerPlan:
        norms: dict[str, Any] = {"mixer_norm": norm(f"{at}.operator_norm"), "mlp_norm": norm(f"{at}.ffn_norm")}
        if config.model_type == "lfm2_moe" and i >= config.num_dense_layers:
            return plan.LayerPlan(mixer(at, i), None, experts(f"{at}.feed_forward"), **norms)
        ups, down = (parts.linear(f"{at}.feed_forward.w{n}") for n in (1, 3)), parts.linear(f"{at}.feed_forward.w2")
        return plan.LayerPlan(mixer(at, i), plan.MlpPlan(tuple(ups), down, "silu"), **norms)

    return parts.decoder_of(config, layer, final_norm=norm("model.embedding_norm"))


def _check_silu(config: Any) -> None:
    """Raises NotPlanned: the convolutions of recurrences have another activation."""
    if parts.activation_of(config) != "silu":
        raise plan.NotPlanned(f"its plan does not know hidden_act={config.hidden_act} of convolutions")


def _mamba2(at: str, *, has_bias: bool, has_conv_bias: bool, **others: Any) -> plan.RecurrencePlan:
    fields: parts.Fields = {
        "conv_width": 2 * others["num_groups"] * others["key_width"] + others["num_heads"] * others["value_width"],
        "conv_weight": f"{at}.conv1d.weight",
        "conv_bias": f"{at}.conv1d.bias" if has_conv_bias else None,
        "inputs": (parts.linear(f"{at}.in_proj", has_bias),),
        "out": parts.linear(f"{at}.out_proj", has_bias),
        "a_log": f"{at}.A_log",
        "dt_bias": f"{at}.dt_bias",
        "skips": f"{at}.D",
    }
    return plan.RecurrencePlan("mamba2", **(fields | others))


def _mamba2_of(config: Any, at: str, **others: Any) -> plan.RecurrencePlan:
    least, most = config.time_step_limit or (0.0, _INFINITE)
    if most != _INFINITE:
        raise plan.NotPlanned(f"its plan does not know time_step_limit={config.time_step_limit}")
    fields: parts.Fields = {
        "num_heads": config.mamba_n_heads,
        "num_groups": config.mamba_n_groups,
        "key_width": config.mamba_d_state,
        "value_width": config.mamba_d_head,
        "kernel_size": config.mamba_d_conv,
        "out_norm": parts.rms(config, f"{at}.norm"),
        "dt_min": least,
    }
    biases = {"has_bias": bool(config.mamba_proj_bias), "has_conv_bias": bool(config.mamba_conv_bias)}
    return _mamba2(at, **biases, **(fields | others))


def _granite_hybrid(config: Any) -> plan.Plan:
    """Granite 4: Mamba-2 in most layers."""
    _check_silu(config)
    if config.mamba_n_groups != 1:  # which Transformers before 5.23 normalizes as one
        raise plan.NotPlanned(f"its plan does not know mamba_n_groups={config.mamba_n_groups}")
    has_ropes = config.position_embedding_type == "rope"

    def mixer(at: str, i: int) -> plan.Mixer:
        if config.layer_types[i] not in _RECURRENT:
            return parts.attention_of(config, at, scale=config.attention_multiplier, rope=0 if has_ropes else None)
        return _mamba2_of(config, f"{at}.mamba")

    def layer(at: str, i: int) -> plan.LayerPlan:
        ups, down = parts.halves_of(f"{at}.shared_mlp.input_linear"), parts.linear(f"{at}.shared_mlp.output_linear")
        block, experts = f"{at}.block_sparse_moe", None
        if config.num_local_experts:
            experts = parts.experts_of(config, block, router=parts.linear(f"{block}.router"))
        return parts.layer_of(
            config, at, mixer(at, i), mlp=parts.mlp_of(config, at, ups=ups, down=down), experts=experts
        )

    return parts.decoder_of(
        config,
        layer,
        ropes=(parts.rope_of(config),) if has_ropes else (),
        **parts.scales_of_granite(config),
    )


def _falcon_h1(config: Any) -> plan.Plan:
    """Falcon-H1: attention and Mamba-2 beside it in each layer. Its multipliers are output_scales of products."""
    _check_silu(config)
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        raise plan.NotPlanned("its plan does not know mamba_norm_before_gate=True")
    before, after, of_keys = config.attention_in_multiplier, config.attention_out_multiplier, config.key_multiplier
    of_gate, of_down = config.mlp_multipliers
    of_inputs = [config.ssm_in_multiplier * one for one in config.ssm_multipliers]
    multipliers = {before, after, of_keys, of_gate, of_down, *of_inputs, config.ssm_out_multiplier}
    if multipliers != {1.0}:
        for field in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
            if getattr(config, field):
                raise plan.NotPlanned(f"its plan does not know multipliers with {field}=True")
    inner, of_groups = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    sizes = inner, inner, of_groups, of_groups, config.mamba_n_heads

    def times(name: str, field: str, *output_scales: tuple[int, float]) -> plan.MatrixPlan:
        return replace(parts.linear(name, getattr(config, field)), output_scales=output_scales)

    def layer(at: str, i: int) -> plan.LayerPlan:
        mamba, mlp = f"{at}.mamba", f"{at}.feed_forward"
        gate = times(f"{mlp}.gate_proj", "mlp_bias", (0, of_gate))
        down = times(f"{mlp}.down_proj", "mlp_bias", (0, of_down))
        attention = parts.attention_of(
            config,
            at,
            scale=parts.head_dim_of(config) ** -0.5 * before**2 * of_keys,
            out=times(f"{at}.self_attn.o_proj", "attention_bias", (0, before * after)),
        )
        beside = _mamba2_of(
            config,
            mamba,
            inputs=(times(f"{mamba}.in_proj", "mamba_proj_bias", *zip(sizes, of_inputs, strict=True)),),
            out=times(f"{mamba}.out_proj", "projectors_bias", (0, config.ssm_out_multiplier)),
            **({} if config.mamba_rms_norm else {"out_norm": None}),
        )
        return parts.layer_of(
            config,
            at,
            attention,
            beside=beside,
            mlp=parts.mlp_of(config, mlp, ups=(gate, parts.linear(f"{mlp}.up_proj", config.mlp_bias)), down=down),
            mlp_norm=parts.rms(config, f"{at}.pre_ff_layernorm"),
        )

    return parts.decoder_of(
        config,
        layer,
        final_norm=parts.rms(config, "model.final_layernorm"),
        embedding_scale=config.embedding_multiplier,
        logit_scale=config.lm_head_multiplier,
    )


def _nemotron_h(config: Any) -> plan.Plan:
    """Nemotron-H: layers of Mamba-2, of attention without positions, and of an MLP or experts alone."""

    def norm(name: str) -> plan.NormPlan:
        return plan.NormPlan("rms", f"{name}.weight", config.layer_norm_epsilon)

    def mlp(at: str) -> plan.MlpPlan:
        ups, down = (parts.linear(f"{at}.{one}_proj", bool(config.mlp_bias)) for one in ("up", "down"))
        return plan.MlpPlan((ups,), down, parts.activation_of(config))

    def experts(at: str) -> tuple[plan.MlpPlan, plan.ExpertsPlan]:
        ups, latent = (plan.MatrixPlan(f"{at}.experts.up_proj"),), None
        if config.moe_latent_size is not None:
            latent = tuple(parts.linear(f"{at}.fc{i}_latent_proj", bool(config.mlp_bias)) for i in (1, 2))
        return mlp(f"{at}.shared_experts"), parts.routed_experts_of(config, at, ups=ups, latent=latent)

    def layer(at: str, i: int) -> plan.LayerPlan:
        kind, name, bias = config.layers_block_type[i], f"{at}.mixer", bool(config.use_bias)
        if kind == "mlp":
            return plan.LayerPlan(None, mlp(name), mlp_norm=norm(f"{at}.norm"))
        if kind == "moe":
            return plan.LayerPlan(None, *experts(name), mlp_norm=norm(f"{at}.norm"))
        mixer: plan.Mixer
        if kind in _RECURRENT:
            if config.mamba_hidden_act != "silu":
                raise plan.NotPlanned(f"its plan does not know mamba_hidden_act={config.mamba_hidden_act}")
            mixer = _mamba2(
                name,
                has_bias=bias,
                has_conv_bias=bool(config.use_conv_bias),
                num_heads=config.mamba_num_heads,
                num_groups=config.n_groups,
                key_width=config.ssm_state_size,
                value_width=config.mamba_head_dim,
                kernel_size=config.conv_kernel,
                out_norm=norm(f"{name}.norm"),
                dt_min=config.time_step_min,
            )
        elif kind in ("attention", "full_attention"):
            inputs, out = tuple(parts.linear(f"{name}.{one}_proj") for one in "qkv"), parts.linear(f"{name}.o_proj")
            mixer = parts.attention_of(config, at, inputs=inputs, out=out, rope=None)
        else:
            raise plan.NotPlanned(f"its plan does not know layers of {kind}")
        return plan.LayerPlan(mixer, None, mixer_norm=norm(f"{at}.norm"))

    return parts.decoder_of(
        config,
        layer,
        final_norm=norm("model.norm_f"),
        ropes=(),
        embedding="model.embeddings.weight",
        lm_head=plan.MatrixPlan("lm_head.weight"),  # never tied
    )


_QWEN = (
    "attention_bias linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads partial_rotary_factor full_attention_interval"
)
_MAMBA = (
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size "
    "mamba_conv_bias mamba_proj_bias time_step_limit"
)
FAMILIES: plan.Families = {
    "qwen3_5_text": (_qwen3_5, _QWEN),
    "qwen3_5_moe_text": (
        _qwen3_5,
        f"{_QWEN} moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok num_experts",
    ),
    "lfm2_moe": (
        _lfm2,
        "norm_eps conv_bias conv_L_cache moe_intermediate_size num_dense_layers num_experts_per_tok num_experts "
        "use_expert_bias routed_scaling_factor norm_topk_prob",
    ),
    "granitemoehybrid": (
        _granite_hybrid,
        f"attention_bias {_MAMBA} embedding_multiplier attention_multiplier residual_multiplier logits_scaling "
        "num_local_experts num_experts_per_tok output_router_logits router_aux_loss_coef shared_intermediate_size "
        "position_embedding_type",
    ),
    "falcon_h1": (
        _falcon_h1,
        f"attention_bias mlp_bias {_MAMBA} mamba_d_ssm mamba_norm_before_gate mamba_rms_norm projectors_bias "
        "attention_in_multiplier attention_out_multiplier key_multiplier mlp_multipliers ssm_multipliers "
        "ssm_in_multiplier ssm_out_multiplier embedding_multiplier lm_head_multiplier num_logits_to_keep",
    ),
    "nemotron_h": (
        _nemotron_h,
        "layers_block_type hybrid_override_pattern "
        "mlp_hidden_act mlp_bias ssm_state_size mamba_num_heads mamba_head_dim mamba_hidden_act "
        "n_groups conv_kernel time_step_min use_conv_bias use_bias layer_norm_epsilon "
        "n_routed_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size "
        "num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob "
        # what only training and other code read
        "attention_bias num_logits_to_keep use_mamba_kernels expand time_step_max time_step_limit time_step_floor "
        "chunk_size mamba_proj_bias mamba_ssm_cache_dtype output_router_logits n_shared_experts "
        "moe_shared_expert_overlap num_nextn_predict_layers mtp_layers_block_type residual_in_fp32 hidden_dropout "
        "rescale_prenorm_residual",
    ),
    "lfm2": (
        _lfm2,
        "norm_eps conv_bias conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim "
        "full_attn_idxs",
    ),
}
