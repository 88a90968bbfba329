"""Plans of families with attention and an MLP in each layer."""

from __future__ import annotations

from typing import Any

from outrider.native.parts import (
    attention_of,
    decoder_of,
    halves_of,
    head_norms,
    inputs_of,
    layer_norm,
    layer_of,
    linear,
    mlp_of,
    rms,
    rope_of,
    window_of,
)
from outrider.native.plan import Families, LayerPlan, MatrixPlan, NormPlan, NotPlanned, Plan


def _llama(config: Any) -> Plan:
    return decoder_of(config, lambda at, i: layer_of(config, at))


def _mistral(config: Any) -> Plan:
    return decoder_of(
        config, lambda at, i: layer_of(config, at, attention_of(config, at, window=config.sliding_window))
    )


def _qwen2(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        return layer_of(config, at, attention_of(config, at, inputs=inputs_of(at, True), window=window_of(config, i)))

    return decoder_of(config, layer)


def _qwen3(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        return layer_of(config, at, attention_of(config, at, window=window_of(config, i), **head_norms(config, at)))

    return decoder_of(config, layer)


def _smollm3(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        rope = 0 if config.no_rope_layers[i] else None
        return layer_of(config, at, attention_of(config, at, rope=rope, window=window_of(config, i)))

    return decoder_of(config, layer)


def _ministral3(config: Any) -> Plan:
    rope = config.rope_parameters
    growth = {"growth": rope["llama_4_scaling_beta"], "growth_span": rope["original_max_position_embeddings"]}
    return decoder_of(
        config, lambda at, i: layer_of(config, at, attention_of(config, at, window=config.sliding_window, **growth))
    )


def _norms_after(config: Any, at: str) -> dict[str, NormPlan | None]:
    """Norms after the halves of a layer instead of before."""
    post, mlp_post = (rms(config, f"{at}.post_{name}_layernorm") for name in ("attention", "feedforward"))
    return {"mixer_norm": None, "mlp_norm": None, "mixer_post_norm": post, "mlp_post_norm": mlp_post}


def _olmo(config: Any) -> Plan:
    """OLMo 2 and 3: norms of queries and keys are of whole rows."""
    kinds = sorted(set(config.layer_types)) if config.model_type == "olmo3" else []

    def layer(at: str, i: int) -> LayerPlan:
        its = {"rope": kinds.index(config.layer_types[i]), "window": window_of(config, i)} if kinds else {}
        mixer = attention_of(config, at, norms_whole_rows=True, **its, **head_norms(config, at))
        return layer_of(config, at, mixer, **_norms_after(config, at))

    return decoder_of(config, layer, ropes=tuple(rope_of(config, kind) for kind in kinds) or None)


def _exaone4(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        window = window_of(config, i)
        rope = 0 if window is not None or config.sliding_window is None else None
        mixer = attention_of(config, at, rope=rope, window=window, **head_norms(config, at))
        return layer_of(config, at, mixer, **_norms_after(config, at))

    return decoder_of(config, layer)


def _ernie4_5(config: Any) -> Plan:
    return decoder_of(config, lambda at, i: layer_of(config, at), ropes=(rope_of(config, is_interleaved=True),))


def _cohere2(config: Any) -> Plan:
    """Cohere 2: both halves of a layer read the same norm; layers without a window have no rope."""

    def layer(at: str, i: int) -> LayerPlan:
        window, norm = window_of(config, i), layer_norm(f"{at}.input_layernorm", config.layer_norm_eps, False)
        mixer = attention_of(config, at, rope=None if window is None else 0, window=window)
        return layer_of(config, at, mixer, mixer_norm=norm, mlp_norm=None, is_parallel=True)

    return decoder_of(
        config,
        layer,
        last_norm=layer_norm("model.norm", config.layer_norm_eps, False),
        ropes=(rope_of(config, is_interleaved=True),),
        logit_scale=config.logit_scale,
    )


def _granite(config: Any) -> Plan:
    return decoder_of(
        config,
        lambda at, i: layer_of(config, at, attention_of(config, at, scale=config.attention_multiplier)),
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _phi3(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        inputs = (linear(f"{at}.self_attn.qkv_proj"),)
        mixer = attention_of(config, at, inputs=inputs, window=config.sliding_window)
        return layer_of(config, at, mixer, mlp=mlp_of(config, f"{at}.mlp", ups=halves_of(f"{at}.mlp.gate_up_proj")))

    return decoder_of(config, layer)


def _glm4(config: Any) -> Plan:
    def layer(at: str, i: int) -> LayerPlan:
        post, mlp_post = (rms(config, f"{at}.post_{name}_layernorm") for name in ("self_attn", "mlp"))
        mixer = attention_of(config, at, out=linear(f"{at}.self_attn.o_proj"))
        mlp = mlp_of(config, f"{at}.mlp", ups=halves_of(f"{at}.mlp.gate_up_proj"))
        return layer_of(config, at, mixer, mlp=mlp, mixer_post_norm=post, mlp_post_norm=mlp_post)

    return decoder_of(config, layer, ropes=(rope_of(config, is_interleaved=True),))


def _starcoder2(config: Any) -> Plan:
    bias, epsilon = config.use_bias, config.norm_epsilon

    def layer(at: str, i: int) -> LayerPlan:
        inputs, out = inputs_of(at, bias), linear(f"{at}.self_attn.o_proj", bias)
        return LayerPlan(
            attention_of(config, at, inputs=inputs, out=out, window=config.sliding_window),
            mlp_of(config, at, ups=(linear(f"{at}.mlp.c_fc", bias),), down=linear(f"{at}.mlp.c_proj", bias)),
            mixer_norm=layer_norm(f"{at}.input_layernorm", epsilon),
            mlp_norm=layer_norm(f"{at}.post_attention_layernorm", epsilon),
        )

    return decoder_of(config, layer, last_norm=layer_norm("model.norm", epsilon))


def _gpt2(config: Any) -> Plan:
    if config.scale_attn_by_inverse_layer_idx or config.add_cross_attention:
        raise NotPlanned("its plan does not know this attention")
    epsilon = config.layer_norm_epsilon

    def conv(name: str) -> MatrixPlan:
        return MatrixPlan(f"{name}.weight", f"{name}.bias", is_transposed=True)

    def layer(at: str, i: int) -> LayerPlan:
        scale = {} if config.scale_attn_weights else {"scale": 1.0}
        inputs, out = (conv(f"{at}.attn.c_attn"),), conv(f"{at}.attn.c_proj")
        return LayerPlan(
            attention_of(config, at, inputs=inputs, out=out, rope=None, **scale),
            mlp_of(config, at, ups=(conv(f"{at}.mlp.c_fc"),), down=conv(f"{at}.mlp.c_proj")),
            mixer_norm=layer_norm(f"{at}.ln_1", epsilon),
            mlp_norm=layer_norm(f"{at}.ln_2", epsilon),
        )

    return decoder_of(
        config,
        layer,
        at="transformer.h",
        last_norm=layer_norm("transformer.ln_f", epsilon),
        ropes=(),
        embedding="transformer.wte.weight",
        place_embedding="transformer.wpe.weight",
        num_places=config.n_positions,
    )


_BIASES = "attention_bias mlp_bias"
FAMILIES: Families = {
    "llama": (_llama, _BIASES),
    "mistral": (_mistral, ""),
    "qwen2": (_qwen2, ""),
    "qwen3": (_qwen3, _BIASES),
    "smollm3": (_smollm3, f"{_BIASES} no_rope_layers no_rope_layer_interval"),
    "olmo2": (_olmo, _BIASES),
    "olmo3": (_olmo, _BIASES),
    "exaone4": (_exaone4, "sliding_window_pattern"),
    "ernie4_5": (_ernie4_5, "use_bias"),
    "cohere2": (_cohere2, "attention_bias layer_norm_eps logit_scale"),
    "ministral3": (_ministral3, ""),
    "granite": (
        _granite,
        f"{_BIASES} embedding_multiplier attention_multiplier residual_multiplier logits_scaling",
    ),
    "phi3": (_phi3, "full_attn_mod interpolate_factor partial_rotary_factor"),
    "glm4": (_glm4, _BIASES),
    "starcoder2": (_starcoder2, "use_bias norm_epsilon norm_type mlp_type"),
    "gpt2": (
        _gpt2,
        "activation_function attn_pdrop layer_norm_epsilon n_embd n_head n_inner n_layer n_positions n_ctx "
        "scale_attn_weights summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj reorder_and_upcast_attn task_specific_params",
    ),
}
