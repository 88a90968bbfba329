"""Families with layers of the gated delta rule or of short convolutions, in config.json, GGUF files and plans."""

from __future__ import annotations

from typing import Any

from outrider.models.families import mamba, parts
from outrider.models.families.family import Family, Fields, periodic
from outrider.models.gguf import keys
from outrider.models.gguf.keys import Stated
from outrider.models.gguf.tensors import FROM_ONE, GgufForm, Order
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
        others = parts.norms_of(config, at, 1.0)
        if config.model_type == "qwen3_5_moe_text":
            gate = parts.linear(f"{at}.mlp.shared_expert_gate")
            others["mlp"] = parts.mlp_of(config, f"{at}.mlp.shared_expert", output_gate=gate)
            others["experts"] = parts.experts_of(config, f"{at}.mlp")
        return parts.layer_of(config, at, mixer(at, i), **others)

    return parts.decoder_of(config, layer, final_norm=parts.rms(config, "model.norm", 1.0))


def _qwen3_5_gguf(stated: Stated) -> Fields:
    fields = keys.decoder_fields(stated, is_partial=True)
    # Parts of a head that are rotated by other axes of an image, all of which are one in text.
    sections = stated.take("rope.dimension_sections")
    interval = stated.take("full_attention_interval", 4)
    default = [(i + 1) % interval != 0 for i in range(stated.num_layers)]
    is_recurrent = stated.each("attention.recurrent_layers", default)
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
            own, names = f"{at}.self_attn", {"query_norm": "q_layernorm", "key_norm": "k_layernorm"}
            out, norms = parts.linear(f"{own}.out_proj"), parts.rms_fields(config, own, names)
            return parts.attention_of(config, at, window=parts.window_of(config, i), out=out, **norms)
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
        norms = parts.rms_fields(config, at, {"mixer_norm": "operator_norm", "mlp_norm": "ffn_norm"})
        if config.model_type == "lfm2_moe" and i >= config.num_dense_layers:
            return plan.LayerPlan(mixer(at, i), None, experts(f"{at}.feed_forward"), **norms)
        ups, down = (parts.linear(f"{at}.feed_forward.w{n}") for n in (1, 3)), parts.linear(f"{at}.feed_forward.w2")
        return plan.LayerPlan(mixer(at, i), plan.MlpPlan(tuple(ups), down, "silu"), **norms)

    return parts.decoder_of(config, layer, final_norm=parts.rms(config, "model.embedding_norm"))


def _lfm2_tie(fields: Fields) -> Fields:
    return {"tie_word_embeddings": fields.get("tie_embedding", fields["tie_word_embeddings"])}


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


_QWEN = (
    "attention_bias linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads full_attention_interval"
)
_QWEN_LAYERS = periodic("linear_attention", 4, "full_attention_interval")
_QWEN_USUAL: Fields = {"head_dim": 256, "partial_rotary_factor": 0.25}
_LFM2_USUAL: Fields = {"tie_word_embeddings": True, "rope_theta": 1_000_000.0, "conv_bias": False}

RECURRENT = {
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
        "conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim full_attn_idxs tie_embedding",
        _LFM2_USUAL,
        epsilon="norm_eps",
        completed=_lfm2_tie,
        gguf={"lfm2": GgufForm(_lfm2_gguf, **_CONVOLUTION)},
    ),
    "lfm2_moe": Family(
        _lfm2,
        "conv_L_cache moe_intermediate_size num_dense_layers num_experts_per_tok num_experts norm_topk_prob "
        "tie_embedding",
        _LFM2_USUAL | {"use_expert_bias": True, "routed_scaling_factor": 1.0},
        epsilon="norm_eps",
        completed=_lfm2_tie,
        gguf={"lfm2moe": GgufForm(_lfm2_moe_gguf, **_CONVOLUTION)},
    ),
}
