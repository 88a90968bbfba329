"""Families with recurrent and convolutional layers, in config.json, GGUF files and plans.

Source of what GGUF files state: llama.cpp's src/models/*.cpp and conversion/*.py, in the build of llama-cpp-python
0.3.36.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.models.families import decoders, mamba, parts
from outrider.models.families.family import Family, Fields, periodic
from outrider.models.gguf import keys
from outrider.models.gguf.keys import Stated
from outrider.models.gguf.tensors import FROM_ONE, LAYER_NORM, GgufForm, Order
from outrider.native import plan

# Qwen 3.5


def _qwen3_5(config: Any) -> plan.Plan:
    """Qwen3.5: the gated delta rule in most layers, and gated attention. Factors of norms are stored less 1."""
    mamba.check_silu(config)
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
            num_taps=config.linear_conv_kernel_dim,
            taps=f"{at}.conv1d.weight",
            inputs=tuple(parts.linear(f"{at}.in_proj_{name}") for name in ("qkv", "b", "a", "z")),
            out=parts.linear(f"{at}.out_proj"),
            num_heads=num_heads,
            num_groups=num_groups,
            key_width=key_width,
            value_width=value_width,
            rates=f"{at}.A_log",
            step_bias=f"{at}.dt_bias",
            out_norm=parts.rms(config, f"{at}.norm"),
        )

    def layer(at: str, i: int) -> plan.LayerPlan:
        others = parts.norms_of(config, at, 1.0)
        if config.model_type == "qwen3_5_moe_text":
            gate = parts.linear(f"{at}.mlp.shared_expert_gate")
            others["mlp"] = parts.mlp_of(config, f"{at}.mlp.shared_expert", scale=gate)
            others["experts"] = parts.experts_of(config, f"{at}.mlp")
        return parts.layer_of(config, at, mixer(at, i), **others)

    return parts.decoder_of(config, layer, last_norm=parts.rms(config, "model.norm", 1.0))


def _qwen3_5_gguf(stated: Stated) -> Fields:
    fields = keys.decoder_fields(stated, is_partial=True)
    # Parts of a head that are rotated by other axes of an image, all of which are one in text.
    sections = stated.take("rope.dimension_sections")
    interval = stated.take("full_attention_interval", 4)
    is_recurrent = stated.each(
        "attention.recurrent_layers", [(i + 1) % interval != 0 for i in range(stated.num_layers)]
    )
    num_values, inner = stated.take("ssm.time_step_rank"), stated.take("ssm.inner_size")
    fields["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return {
        **fields,
        "layer_types": ["linear_attention" if one else "full_attention" for one in is_recurrent],
        "linear_conv_kernel_dim": stated.take("ssm.conv_kernel"),
        "linear_key_head_dim": stated.take("ssm.state_size"),
        "linear_value_head_dim": inner // num_values,
        "linear_num_key_heads": stated.take("ssm.group_count"),
        "linear_num_value_heads": num_values,
    }


def _qwen3_5_moe_gguf(stated: Stated) -> Fields:
    fields = _qwen3_5_gguf(stated) | keys.expert_fields(stated)
    del fields["intermediate_size"]
    return fields | {"shared_expert_intermediate_size": stated.take("expert_shared_feed_forward_length")}


def _value_heads(name: str, config: Any) -> Order | None:
    """Rows of a DeltaNet layer. The heads of values that share a head of keys are neighbours in Transformers; the file
    has the first of each head of keys first."""
    if name not in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_conv1d", "ssm_dt", "ssm_a"):
        return None
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    if num_keys == num_values:
        return None
    size = config.linear_value_head_dim if name in ("attn_qkv", "attn_gate", "ssm_conv1d") else 1
    num_before = 2 * num_keys * config.linear_key_head_dim if name in ("attn_qkv", "ssm_conv1d") else 0
    return Order(1, num_values // num_keys, num_keys, size, num_before)


_DELTA_NET: dict[str, Any] = {
    "order": _value_heads,
    "columns": lambda name, config: _value_heads("attn_gate", config) if name == "ssm_out" else None,
    "changes": {
        **FROM_ONE,
        "ssm_conv1d.weight": lambda numbers: numbers.unsqueeze(1),
        "ssm_a": mamba.rates_of,
        "ffn_gate_inp_shexp.weight": lambda numbers: numbers.reshape(1, -1),
    },
}


# LFM2


def _lfm2(config: Any) -> plan.Plan:
    """LFM2: short convolutions between gates in most layers."""
    bias = bool(config.conv_bias)

    def mixer(at: str, i: int) -> plan.Mixer:
        if config.layer_types[i] != "conv":
            at_attention = f"{at}.self_attn"
            return parts.attention_of(
                config,
                at,
                window=parts.window_of(config, i),
                out=parts.linear(f"{at_attention}.out_proj"),
                query_norm=parts.rms(config, f"{at_attention}.q_layernorm"),
                key_norm=parts.rms(config, f"{at_attention}.k_layernorm"),
            )
        return plan.RecurrencePlan(
            "convolution",
            conv_width=config.hidden_size,
            num_taps=config.conv_L_cache,
            taps=f"{at}.conv.conv.weight",
            taps_bias=f"{at}.conv.conv.bias" if bias else None,
            inputs=tuple(parts.linear(f"{at}.conv.in_proj", bias, part, 3) for part in (0, 2, 1)),
            out=parts.linear(f"{at}.conv.out_proj", bias),
        )

    def experts(at: str) -> plan.ExpertsPlan:
        correction = f"{at}.expert_bias" if config.use_expert_bias else None
        of_router = {"is_sigmoid": True, "added": 1e-6, "scale": config.routed_scaling_factor}
        return parts.experts_of(config, at, activation="silu", correction=correction, **of_router)

    def layer(at: str, i: int) -> plan.LayerPlan:
        norms: dict[str, Any] = {
            "mixer_norm": parts.rms(config, f"{at}.operator_norm"),
            "mlp_norm": parts.rms(config, f"{at}.ffn_norm"),
        }
        if config.model_type == "lfm2_moe" and i >= config.num_dense_layers:
            return plan.LayerPlan(mixer(at, i), None, experts(f"{at}.feed_forward"), **norms)
        ups, down = (parts.linear(f"{at}.feed_forward.w{n}") for n in (1, 3)), parts.linear(f"{at}.feed_forward.w2")
        return plan.LayerPlan(mixer(at, i), plan.MlpPlan(tuple(ups), down, "silu"), **norms)

    return parts.decoder_of(config, layer, last_norm=parts.rms(config, "model.embedding_norm"))


def _lfm2_gguf(stated: Stated) -> Fields:
    return {
        **keys.whole_fields(stated),
        "block_auto_adjust_ff_dim": False,
        # Layers of convolutions have no keys.
        "layer_types": ["full_attention" if count else "conv" for count in stated.each("attention.head_count_kv")],
        "conv_L_cache": stated.take("shortconv.l_cache"),
    }


def _lfm2_moe_gguf(stated: Stated) -> Fields:
    fields = _lfm2_gguf(stated) | keys.expert_fields(stated, gate=keys.SIGMOID)
    del fields["block_auto_adjust_ff_dim"]
    return fields | {"num_dense_layers": stated.take("leading_dense_block_count", 0)}


_CONVOLUTION: dict[str, Any] = {"changes": {"shortconv.conv.weight": lambda numbers: numbers.unsqueeze(1)}}


# Falcon-H1


def _falcon_h1(config: Any) -> plan.Plan:
    """Falcon-H1: attention and Mamba-2 beside it in each layer. Its multipliers are factors of products."""
    mamba.check_silu(config)
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

    def times(name: str, field: str, *factors: tuple[int, float]) -> plan.MatrixPlan:
        return replace(parts.linear(name, getattr(config, field)), factors=factors)

    def layer(at: str, i: int) -> plan.LayerPlan:
        at_mamba, mlp = f"{at}.mamba", f"{at}.feed_forward"
        gate = times(f"{mlp}.gate_proj", "mlp_bias", (0, of_gate))
        down = times(f"{mlp}.down_proj", "mlp_bias", (0, of_down))
        attention = parts.attention_of(
            config,
            at,
            scale=parts.head_width_of(config) ** -0.5 * before**2 * of_keys,
            out=times(f"{at}.self_attn.o_proj", "attention_bias", (0, before * after)),
        )
        beside = mamba.mamba2_of(
            config,
            at_mamba,
            inputs=(times(f"{at_mamba}.in_proj", "mamba_proj_bias", *zip(sizes, of_inputs, strict=True)),),
            out=times(f"{at_mamba}.out_proj", "projectors_bias", (0, config.ssm_out_multiplier)),
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
        last_norm=parts.rms(config, "model.final_layernorm"),
        embedding_scale=config.embedding_multiplier,
        logit_scale=config.lm_head_multiplier,
    )


def _falcon_h1_gguf(stated: Stated) -> Fields:
    fields, sizes = keys.decoder_fields(stated), mamba.sizes_of(stated)
    # The multipliers of its configuration are part of the file's weights.
    return {
        **fields,
        **sizes,
        "mamba_d_ssm": sizes["mamba_n_heads"] * sizes["mamba_d_head"],
        "mamba_rms_norm": stated.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": stated.has("blk.0.ssm_conv1d.bias"),
        "attention_bias": stated.has("blk.0.attn_q.bias"),
        "mlp_bias": stated.has("blk.0.ffn_up.bias"),
    }


# Nemotron-H


def _nemotron_h(config: Any) -> plan.Plan:
    """Nemotron-H: layers of Mamba-2, of attention without positions, and of an MLP or experts alone."""

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
            return plan.LayerPlan(None, mlp(name), mlp_norm=parts.rms(config, f"{at}.norm"))
        if kind == "moe":
            return plan.LayerPlan(None, *experts(name), mlp_norm=parts.rms(config, f"{at}.norm"))
        mixer: plan.Mixer
        if kind in mamba.RECURRENT:
            if config.mamba_hidden_act != "silu":
                raise plan.NotPlanned(f"its plan does not know mamba_hidden_act={config.mamba_hidden_act}")
            mixer = mamba.mamba2(
                name,
                has_bias=bias,
                has_taps_bias=bool(config.use_conv_bias),
                num_heads=config.mamba_num_heads,
                num_groups=config.n_groups,
                key_width=config.ssm_state_size,
                value_width=config.mamba_head_dim,
                num_taps=config.conv_kernel,
                out_norm=parts.rms(config, f"{name}.norm"),
                least_step=config.time_step_min,
            )
        elif kind in ("attention", "full_attention"):
            inputs, out = tuple(parts.linear(f"{name}.{one}_proj") for one in "qkv"), parts.linear(f"{name}.o_proj")
            mixer = parts.attention_of(config, at, inputs=inputs, out=out, rope=None)
        else:
            raise plan.NotPlanned(f"its plan does not know layers of {kind}")
        return plan.LayerPlan(mixer, None, mixer_norm=parts.rms(config, f"{at}.norm"))

    return parts.decoder_of(
        config,
        layer,
        last_norm=parts.rms(config, "model.norm_f"),
        ropes=(),
        embedding="model.embeddings.weight",
        head=plan.MatrixPlan("lm_head.weight"),  # never tied
    )


def _nemotron_h_layers(fields: Fields) -> Fields:
    """Layers of the pattern's letters. Raises NotPlanned: what Transformers takes without one is not known here."""
    kinds, pattern = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    if pattern is not None:
        names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        kinds = [names[letter] for letter in pattern]
    if kinds is None:
        raise plan.NotPlanned("its configuration states no layers")
    return {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def _nemotron_h_gguf(stated: Stated) -> Fields:
    sizes, widths = mamba.sizes_of(stated), stated.each("feed_forward_length")
    if len({*widths} - {0}) > 1:
        raise stated.refusal("feed_forward_length", widths)
    for key in ("rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned"):
        stated.take(key, 0)  # it has no positions
    has_experts = stated.architecture == "nemotron_h_moe"
    fields = {
        **keys.head_fields(stated),
        "layer_norm_epsilon": stated.take("attention.layer_norm_rms_epsilon", stated.take(LAYER_NORM)),
        "intermediate_size": max(widths),
        "hybrid_override_pattern": "".join(
            "*" if heads else "M" if not width else "E" if has_experts else "-"
            for heads, width in zip(stated.each("attention.head_count_kv"), widths, strict=True)
        ),
        "conv_kernel": sizes["mamba_d_conv"],
        "ssm_state_size": sizes["mamba_d_state"],
        "n_groups": sizes["mamba_n_groups"],
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in stated.file.tensors),
        "attention_bias": any(name.endswith("attn_q.bias") for name in stated.file.tensors),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in stated.file.tensors),
    }
    if not has_experts:
        return fields
    return {
        **fields,
        **keys.routed_fields(stated),
        "moe_shared_expert_intermediate_size": stated.take("expert_shared_feed_forward_length"),
        "moe_latent_size": stated.take("moe_latent_size", 0) or None,
    }


_NEMOTRON = GgufForm(_nemotron_h_gguf, epsilon=LAYER_NORM, changes=mamba.CHANGES)

_QWEN = (
    "attention_bias linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads full_attention_interval"
)
_QWEN_LAYERS = periodic("linear_attention", 4, "full_attention_interval")
_QWEN_USUAL: Fields = {"head_dim": 256, "partial_rotary_factor": 0.25}
_LFM2_USUAL: Fields = {"tie_word_embeddings": True, "rope_theta": 1_000_000.0, "conv_bias": False}
_ONES = (
    *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "embedding_multiplier"),
    *("lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)

HYBRIDS = {
    "qwen3_5_text": Family(
        _qwen3_5, _QWEN, _QWEN_USUAL, layer_types=_QWEN_LAYERS, gguf={"qwen35": GgufForm(_qwen3_5_gguf, **_DELTA_NET)}
    ),
    "qwen3_5_moe_text": Family(
        _qwen3_5,
        f"{_QWEN} moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok num_experts",
        _QWEN_USUAL,
        layer_types=_QWEN_LAYERS,
        gguf={"qwen35moe": GgufForm(_qwen3_5_moe_gguf, **_DELTA_NET)},
    ),
    "lfm2": Family(
        _lfm2,
        "conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim full_attn_idxs",
        _LFM2_USUAL,
        epsilon="norm_eps",
        gguf={"lfm2": GgufForm(_lfm2_gguf, **_CONVOLUTION)},
    ),
    "lfm2_moe": Family(
        _lfm2,
        "conv_L_cache moe_intermediate_size num_dense_layers num_experts_per_tok num_experts norm_topk_prob",
        _LFM2_USUAL | {"use_expert_bias": True, "routed_scaling_factor": 1.0},
        epsilon="norm_eps",
        gguf={"lfm2moe": GgufForm(_lfm2_moe_gguf, **_CONVOLUTION)},
    ),
    "falcon_h1": Family(
        _falcon_h1,
        f"{decoders.BIASES} {mamba.OWN} mamba_d_ssm num_logits_to_keep",
        {
            **mamba.USUAL,
            **dict.fromkeys(_ONES, 1.0),
            "mlp_multipliers": (1.0, 1.0),
            "ssm_multipliers": (1.0,) * 5,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
        },
        gguf={"falcon-h1": GgufForm(_falcon_h1_gguf, changes=mamba.CHANGES)},
    ),
    "nemotron_h": Family(
        _nemotron_h,
        "hybrid_override_pattern mlp_bias ssm_state_size mamba_num_heads mamba_head_dim n_groups conv_kernel "
        "use_conv_bias moe_intermediate_size moe_shared_expert_intermediate_size num_experts_per_tok "
        "routed_scaling_factor n_group topk_group norm_topk_prob layers_block_type "
        # what only training and other code read
        "attention_bias num_logits_to_keep use_mamba_kernels expand time_step_max time_step_limit time_step_floor "
        "chunk_size mamba_proj_bias mamba_ssm_cache_dtype n_shared_experts moe_shared_expert_overlap "
        "num_nextn_predict_layers mtp_layers_block_type residual_in_fp32 hidden_dropout rescale_prenorm_residual",
        {
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "head_dim": 128,
            "moe_latent_size": None,
            "time_step_min": 0.001,
            "use_bias": False,
        },
        {"num_local_experts": "n_routed_experts", "layers_block_type": "layer_types"},
        epsilon="layer_norm_epsilon",
        activation="mlp_hidden_act",
        completed=_nemotron_h_layers,
        gguf=dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
    ),
}
