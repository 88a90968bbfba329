"""Plans of families with recurrent and convolutional layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.native.parts import (
    Fields,
    activation_of,
    attention_of,
    decoder_of,
    experts_of,
    halves_of,
    head_norms,
    head_width_of,
    layer_of,
    linear,
    mlp_of,
    rms,
    rope_of,
    routed_experts_of,
    scales_of_granite,
    window_of,
)
from outrider.native.plan import (
    ExpertsPlan,
    Families,
    LayerPlan,
    MatrixPlan,
    Mixer,
    MlpPlan,
    NormPlan,
    NotPlanned,
    Plan,
    RecurrencePlan,
)

_RECURRENT = ("linear_attention", "mamba")  # layers: the new name and the old
_INFINITE = float("inf")


def _qwen3_5(config: Any) -> Plan:
    """Qwen3.5: the gated delta rule in most layers, and gated attention. Factors of norms are stored less 1."""
    _check_silu(config)
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    num_groups, num_heads = config.linear_num_key_heads, config.linear_num_value_heads

    def mixer(at: str, i: int) -> Mixer:
        if config.layer_types[i] != "linear_attention":
            norms = head_norms(config, at, 1.0)
            return attention_of(config, at, is_gated=True, window=window_of(config, i), **norms)
        at = f"{at}.linear_attn"
        return RecurrencePlan(
            "delta",
            conv_width=2 * num_groups * key_width + num_heads * value_width,
            num_taps=config.linear_conv_kernel_dim,
            taps=f"{at}.conv1d.weight",
            inputs=tuple(linear(f"{at}.in_proj_{name}") for name in ("qkv", "b", "a", "z")),
            out=linear(f"{at}.out_proj"),
            num_heads=num_heads,
            num_groups=num_groups,
            key_width=key_width,
            value_width=value_width,
            rates=f"{at}.A_log",
            step_bias=f"{at}.dt_bias",
            out_norm=rms(config, f"{at}.norm"),
        )

    def layer(at: str, i: int) -> LayerPlan:
        norms = ("mixer_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")
        others: dict[str, Any] = {field: rms(config, f"{at}.{name}", 1.0) for field, name in norms}
        if config.model_type == "qwen3_5_moe_text":
            gate = linear(f"{at}.mlp.shared_expert_gate")
            others["mlp"] = mlp_of(config, f"{at}.mlp.shared_expert", scale=gate)
            others["experts"] = experts_of(config, f"{at}.mlp")
        return layer_of(config, at, mixer(at, i), **others)

    return decoder_of(config, layer, last_norm=rms(config, "model.norm", 1.0))


def _lfm2(config: Any) -> Plan:
    """LFM2: short convolutions between gates in most layers."""
    bias, epsilon = bool(config.conv_bias), config.norm_eps

    def norm(name: str) -> NormPlan:
        return NormPlan("rms", f"{name}.weight", epsilon)

    def mixer(at: str, i: int) -> Mixer:
        if config.layer_types[i] != "conv":
            at_attention = f"{at}.self_attn"
            return attention_of(
                config,
                at,
                window=window_of(config, i),
                out=linear(f"{at_attention}.out_proj"),
                query_norm=norm(f"{at_attention}.q_layernorm"),
                key_norm=norm(f"{at_attention}.k_layernorm"),
            )
        return RecurrencePlan(
            "convolution",
            conv_width=config.hidden_size,
            num_taps=config.conv_L_cache,
            taps=f"{at}.conv.conv.weight",
            taps_bias=f"{at}.conv.conv.bias" if bias else None,
            inputs=tuple(linear(f"{at}.conv.in_proj", bias, part, 3) for part in (0, 2, 1)),
            out=linear(f"{at}.conv.out_proj", bias),
        )

    def experts(at: str) -> ExpertsPlan:
        correction = f"{at}.expert_bias" if config.use_expert_bias else None
        of_router = {"is_sigmoid": True, "added": 1e-6, "scale": config.routed_scaling_factor}
        return experts_of(config, at, activation="silu", correction=correction, **of_router)

    def layer(at: str, i: int) -> LayerPlan:
        norms: dict[str, Any] = {"mixer_norm": norm(f"{at}.operator_norm"), "mlp_norm": norm(f"{at}.ffn_norm")}
        if i >= getattr(config, "num_dense_layers", config.num_hidden_layers):
            return LayerPlan(mixer(at, i), None, experts(f"{at}.feed_forward"), **norms)
        ups, down = (linear(f"{at}.feed_forward.w{n}") for n in (1, 3)), linear(f"{at}.feed_forward.w2")
        return LayerPlan(mixer(at, i), MlpPlan(tuple(ups), down, "silu"), **norms)

    return decoder_of(config, layer, last_norm=norm("model.embedding_norm"))


def _check_silu(config: Any) -> None:
    """Raises NotPlanned: the convolutions of recurrences have another activation."""
    if activation_of(config) != "silu":
        raise NotPlanned(f"its plan does not know hidden_act={config.hidden_act} of convolutions")


def _mamba2(at: str, *, has_bias: bool, has_taps_bias: bool, **others: Any) -> RecurrencePlan:
    fields: Fields = {
        "conv_width": 2 * others["num_groups"] * others["key_width"] + others["num_heads"] * others["value_width"],
        "taps": f"{at}.conv1d.weight",
        "taps_bias": f"{at}.conv1d.bias" if has_taps_bias else None,
        "inputs": (linear(f"{at}.in_proj", has_bias),),
        "out": linear(f"{at}.out_proj", has_bias),
        "rates": f"{at}.A_log",
        "step_bias": f"{at}.dt_bias",
        "skips": f"{at}.D",
    }
    return RecurrencePlan("mamba2", **(fields | others))


def _mamba2_of(config: Any, at: str, **others: Any) -> RecurrencePlan:
    least, most = config.time_step_limit or (0.0, _INFINITE)
    if most != _INFINITE:
        raise NotPlanned(f"its plan does not know time_step_limit={config.time_step_limit}")
    fields: Fields = {
        "num_heads": config.mamba_n_heads,
        "num_groups": config.mamba_n_groups,
        "key_width": config.mamba_d_state,
        "value_width": config.mamba_d_head,
        "num_taps": config.mamba_d_conv,
        "out_norm": rms(config, f"{at}.norm"),
        "least_step": least,
    }
    biases = {"has_bias": bool(config.mamba_proj_bias), "has_taps_bias": bool(config.mamba_conv_bias)}
    return _mamba2(at, **biases, **(fields | others))


def _granite_hybrid(config: Any) -> Plan:
    """Granite 4: Mamba-2 in most layers."""
    _check_silu(config)
    if config.mamba_n_groups != 1:  # which Transformers before 5.23 normalizes as one
        raise NotPlanned(f"its plan does not know mamba_n_groups={config.mamba_n_groups}")
    has_ropes = config.position_embedding_type == "rope"

    def mixer(at: str, i: int) -> Mixer:
        if config.layer_types[i] not in _RECURRENT:
            return attention_of(config, at, scale=config.attention_multiplier, rope=0 if has_ropes else None)
        return _mamba2_of(config, f"{at}.mamba")

    def layer(at: str, i: int) -> LayerPlan:
        ups, down = halves_of(f"{at}.shared_mlp.input_linear"), linear(f"{at}.shared_mlp.output_linear")
        block, experts = f"{at}.block_sparse_moe", None
        if config.num_local_experts:
            experts = experts_of(config, block, router=linear(f"{block}.router"))
        return layer_of(config, at, mixer(at, i), mlp=mlp_of(config, at, ups=ups, down=down), experts=experts)

    return decoder_of(
        config,
        layer,
        ropes=(rope_of(config),) if has_ropes else (),
        **scales_of_granite(config),
    )


def _falcon_h1(config: Any) -> Plan:
    """Falcon-H1: attention and Mamba-2 beside it in each layer. Its multipliers are factors of products."""
    _check_silu(config)
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        raise NotPlanned("its plan does not know mamba_norm_before_gate=True")
    before, after, of_keys = config.attention_in_multiplier, config.attention_out_multiplier, config.key_multiplier
    of_gate, of_down = config.mlp_multipliers
    of_inputs = [config.ssm_in_multiplier * one for one in config.ssm_multipliers]
    multipliers = {before, after, of_keys, of_gate, of_down, *of_inputs, config.ssm_out_multiplier}
    if multipliers != {1.0}:
        for field in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
            if getattr(config, field):
                raise NotPlanned(f"its plan does not know multipliers with {field}=True")
    inner, of_groups = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    sizes = inner, inner, of_groups, of_groups, config.mamba_n_heads

    def times(name: str, field: str, *factors: tuple[int, float]) -> MatrixPlan:
        return replace(linear(name, getattr(config, field)), factors=factors)

    def layer(at: str, i: int) -> LayerPlan:
        mamba, mlp = f"{at}.mamba", f"{at}.feed_forward"
        gate = times(f"{mlp}.gate_proj", "mlp_bias", (0, of_gate))
        down = times(f"{mlp}.down_proj", "mlp_bias", (0, of_down))
        attention = attention_of(
            config,
            at,
            scale=head_width_of(config) ** -0.5 * before**2 * of_keys,
            out=times(f"{at}.self_attn.o_proj", "attention_bias", (0, before * after)),
        )
        beside = _mamba2_of(
            config,
            mamba,
            inputs=(times(f"{mamba}.in_proj", "mamba_proj_bias", *zip(sizes, of_inputs, strict=True)),),
            out=times(f"{mamba}.out_proj", "projectors_bias", (0, config.ssm_out_multiplier)),
            **({} if config.mamba_rms_norm else {"out_norm": None}),
        )
        return layer_of(
            config,
            at,
            attention,
            beside=beside,
            mlp=mlp_of(config, mlp, ups=(gate, linear(f"{mlp}.up_proj", config.mlp_bias)), down=down),
            mlp_norm=rms(config, f"{at}.pre_ff_layernorm"),
        )

    return decoder_of(
        config,
        layer,
        last_norm=rms(config, "model.final_layernorm"),
        embedding_scale=config.embedding_multiplier,
        logit_scale=config.lm_head_multiplier,
    )


def _nemotron_h(config: Any) -> Plan:
    """Nemotron-H: layers of Mamba-2, of attention without positions, and of an MLP or experts alone."""

    def norm(name: str) -> NormPlan:
        return NormPlan("rms", f"{name}.weight", config.layer_norm_epsilon)

    def mlp(at: str) -> MlpPlan:
        ups, down = (linear(f"{at}.{one}_proj", bool(config.mlp_bias)) for one in ("up", "down"))
        return MlpPlan((ups,), down, activation_of(config))

    def experts(at: str) -> tuple[MlpPlan, ExpertsPlan]:
        ups, latent = (MatrixPlan(f"{at}.experts.up_proj"),), None
        if config.moe_latent_size is not None:
            latent = tuple(linear(f"{at}.fc{i}_latent_proj", bool(config.mlp_bias)) for i in (1, 2))
        return mlp(f"{at}.shared_experts"), routed_experts_of(config, at, ups=ups, latent=latent)

    def layer(at: str, i: int) -> LayerPlan:
        kind, name, bias = config.layers_block_type[i], f"{at}.mixer", bool(config.use_bias)
        if kind == "mlp":
            return LayerPlan(None, mlp(name), mlp_norm=norm(f"{at}.norm"))
        if kind == "moe":
            return LayerPlan(None, *experts(name), mlp_norm=norm(f"{at}.norm"))
        mixer: Mixer
        if kind in _RECURRENT:
            if config.mamba_hidden_act != "silu":
                raise NotPlanned(f"its plan does not know mamba_hidden_act={config.mamba_hidden_act}")
            mixer = _mamba2(
                name,
                has_bias=bias,
                has_taps_bias=bool(config.use_conv_bias),
                num_heads=config.mamba_num_heads,
                num_groups=config.n_groups,
                key_width=config.ssm_state_size,
                value_width=config.mamba_head_dim,
                num_taps=config.conv_kernel,
                out_norm=norm(f"{name}.norm"),
                least_step=config.time_step_min,
            )
        elif kind in ("attention", "full_attention"):
            inputs, out = tuple(linear(f"{name}.{one}_proj") for one in "qkv"), linear(f"{name}.o_proj")
            mixer = attention_of(config, at, inputs=inputs, out=out, rope=None)
        else:
            raise NotPlanned(f"its plan does not know layers of {kind}")
        return LayerPlan(mixer, None, mixer_norm=norm(f"{at}.norm"))

    return decoder_of(
        config,
        layer,
        last_norm=norm("model.norm_f"),
        ropes=(),
        embedding="model.embeddings.weight",
        head=MatrixPlan("lm_head.weight"),  # never tied
    )


_QWEN = (
    "attention_bias linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads partial_rotary_factor full_attention_interval"
)
_MAMBA = (
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size "
    "mamba_conv_bias mamba_proj_bias time_step_limit"
)
FAMILIES: Families = {
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
        "layers_block_type mlp_hidden_act mlp_bias ssm_state_size mamba_num_heads mamba_head_dim mamba_hidden_act "
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
