"""Plans of families with recurrent and convolutional layers."""

from __future__ import annotations

from typing import Any

from outrider.native.parts import attention_of, decoder_of, head_norms, layer_of, linear, rms, window_of
from outrider.native.plan import Families, LayerPlan, Mixer, MlpPlan, NormPlan, Plan, RecurrencePlan


def _qwen3_5(config: Any) -> Plan:
    """Qwen3.5: the gated delta rule in most layers, and gated attention. Factors of norms are stored less 1."""
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    num_groups, num_heads = config.linear_num_key_heads, config.linear_num_value_heads

    def mixer(at: str, i: int) -> Mixer:
        if config.layer_types[i] != "linear_attention":
            norms = head_norms(config, at, 1.0)
            return attention_of(config, at, is_gated=True, window=window_of(config, i), **norms)
        at = f"{at}.linear_attn"
        return RecurrencePlan(
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
        return layer_of(config, at, mixer(at, i), **{field: rms(config, f"{at}.{name}", 1.0) for field, name in norms})

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
            conv_width=config.hidden_size,
            num_taps=config.conv_L_cache,
            taps=f"{at}.conv.conv.weight",
            taps_bias=f"{at}.conv.conv.bias" if bias else None,
            inputs=tuple(linear(f"{at}.conv.in_proj", bias, part, 3) for part in (0, 2, 1)),
            out=linear(f"{at}.conv.out_proj", bias),
        )

    def layer(at: str, i: int) -> LayerPlan:
        ups, down = (linear(f"{at}.feed_forward.w{n}") for n in (1, 3)), linear(f"{at}.feed_forward.w2")
        norms = {"mixer_norm": norm(f"{at}.operator_norm"), "mlp_norm": norm(f"{at}.ffn_norm")}
        return LayerPlan(mixer(at, i), MlpPlan(tuple(ups), down, "silu"), **norms)

    return decoder_of(config, layer, last_norm=norm("model.embedding_norm"))


FAMILIES: Families = {
    "qwen3_5_text": (
        _qwen3_5,
        "attention_bias linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads partial_rotary_factor full_attention_interval",
    ),
    "lfm2": (
        _lfm2,
        "norm_eps conv_bias conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim "
        "full_attn_idxs",
    ),
}
