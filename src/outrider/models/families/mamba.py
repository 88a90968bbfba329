"""Families with layers of Mamba-2, but for Granite's, in config.json, GGUF files and plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.models.families import decoders, parts
from outrider.models.families.family import Family, Fields
from outrider.models.gguf import keys
from outrider.models.gguf.keys import Stated
from outrider.models.gguf.tensors import LAYER_NORM, GgufForm
from outrider.native.plan import ExpertsPlan, LayerPlan, MatrixPlan, Mixer, MlpPlan, NotPlanned, Plan, RecurrencePlan

RECURRENT = ("linear_attention", "mamba")
"""Layers: the new name and the old."""
OWN = "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size"
USUAL: Fields = {"time_step_limit": None, "mamba_proj_bias": False, "mamba_conv_bias": True}
_INFINITE = float("inf")


def check_silu(config: Any) -> None:
    """Raises NotPlanned: the convolutions of recurrences have another activation."""
    if parts.activation_of(config) != "silu":
        raise NotPlanned(f"its plan does not know hidden_act={config.hidden_act} of convolutions")


def mamba2_of(config: Any, at: str, **others: Any) -> RecurrencePlan:
    """Mamba-2 with parameters' names that begin with ``at``, but for other fields that are stated."""
    least, most = (0.0, _INFINITE) if "dt_min" in others else config.time_step_limit or (0.0, _INFINITE)
    if most != _INFINITE:
        raise NotPlanned(f"its plan does not know time_step_limit={config.time_step_limit}")
    bias, inner = bool(config.mamba_proj_bias), config.mamba_n_heads * config.mamba_d_head
    fields: Fields = {
        "conv_width": 2 * config.mamba_n_groups * config.mamba_d_state + inner,
        "conv_weight": f"{at}.conv1d.weight",
        "conv_bias": f"{at}.conv1d.bias" if config.mamba_conv_bias else None,
        "kernel_size": config.mamba_d_conv,
        "inputs": (parts.linear(f"{at}.in_proj", bias),),
        "out": parts.linear(f"{at}.out_proj", bias),
        "num_heads": config.mamba_n_heads,
        "num_groups": config.mamba_n_groups,
        "key_width": config.mamba_d_state,
        "value_width": config.mamba_d_head,
        "a_log": f"{at}.A_log",
        "dt_bias": f"{at}.dt_bias",
        "dt_min": least,
        "skips": f"{at}.D",
        "out_norm": parts.rms(config, f"{at}.norm"),
    }
    return RecurrencePlan("mamba2", **(fields | others))


def sizes_of(stated: Stated) -> Fields:
    inner, num_heads = stated.take("ssm.inner_size"), stated.take("ssm.time_step_rank")
    return {
        "mamba_d_conv": stated.take("ssm.conv_kernel"),
        "mamba_d_state": stated.take("ssm.state_size"),
        "mamba_n_groups": stated.take("ssm.group_count"),
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
    }


def rates_of(numbers: Tensor) -> Tensor:
    """Logarithms of the rates of decay. In float64, since the last bit of PyTorch's float32 depends on its build."""
    return numbers.neg().double().log().float()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "ssm_conv1d.weight": lambda numbers: numbers.unsqueeze(1),
    "ssm_norm.weight": torch.flatten,  # a row for each group
    "ssm_a": lambda numbers: rates_of(numbers).flatten(),
    "ssm_d": torch.flatten,
}


# Falcon-H1


def _falcon_h1(config: Any) -> Plan:
    """Falcon-H1: attention and Mamba-2 beside it in each layer. Its multipliers are factors of products."""
    check_silu(config)
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

    def times(name: str, field: str, *output_scales: tuple[int, float]) -> MatrixPlan:
        return replace(parts.linear(name, getattr(config, field)), output_scales=output_scales)

    def layer(at: str, i: int) -> LayerPlan:
        at_mamba, mlp = f"{at}.mamba", f"{at}.feed_forward"
        gate = times(f"{mlp}.gate_proj", "mlp_bias", (0, of_gate))
        down = times(f"{mlp}.down_proj", "mlp_bias", (0, of_down))
        attention = parts.attention_of(
            config,
            at,
            scale=parts.head_dim_of(config) ** -0.5 * before**2 * of_keys,
            out=times(f"{at}.self_attn.o_proj", "attention_bias", (0, before * after)),
        )
        beside = mamba2_of(
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
        final_norm=parts.rms(config, "model.final_layernorm"),
        embedding_scale=config.embedding_multiplier,
        logit_scale=config.lm_head_multiplier,
    )


def _falcon_h1_gguf(stated: Stated) -> Fields:
    sizes = sizes_of(stated)
    # The multipliers of its configuration are part of the file's weights.
    return {
        **decoders.llama_gguf(stated),
        **sizes,
        "mamba_d_ssm": sizes["mamba_n_heads"] * sizes["mamba_d_head"],
        "mamba_rms_norm": stated.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": stated.has("blk.0.ssm_conv1d.bias"),
    }


# Nemotron-H


def _nemotron_h(config: Any) -> Plan:
    """Nemotron-H: layers of Mamba-2, of attention without positions, and of an MLP or experts alone."""

    def mlp(at: str) -> MlpPlan:
        ups, down = (parts.linear(f"{at}.{one}_proj", bool(config.mlp_bias)) for one in ("up", "down"))
        return MlpPlan((ups,), down, parts.activation_of(config))

    def experts(at: str) -> tuple[MlpPlan, ExpertsPlan]:
        ups, latent = (MatrixPlan(f"{at}.experts.up_proj"),), None
        if config.moe_latent_size is not None:
            latent = tuple(parts.linear(f"{at}.fc{i}_latent_proj", bool(config.mlp_bias)) for i in (1, 2))
        return mlp(f"{at}.shared_experts"), parts.routed_experts_of(config, at, ups=ups, latent=latent)

    def layer(at: str, i: int) -> LayerPlan:
        kind, name, bias = config.layers_block_type[i], f"{at}.mixer", bool(config.use_bias)
        if kind == "mlp":
            return LayerPlan(None, mlp(name), mlp_norm=parts.rms(config, f"{at}.norm"))
        if kind == "moe":
            return LayerPlan(None, *experts(name), mlp_norm=parts.rms(config, f"{at}.norm"))
        mixer: Mixer
        if kind in RECURRENT:
            if config.mamba_hidden_act != "silu":
                raise NotPlanned(f"its plan does not know mamba_hidden_act={config.mamba_hidden_act}")
            into, out = (parts.linear(f"{name}.{one}_proj", bias) for one in ("in", "out"))
            mixer = mamba2_of(config, name, inputs=(into,), out=out, dt_min=config.time_step_min)
        elif kind in ("attention", "full_attention"):
            inputs, out = tuple(parts.linear(f"{name}.{one}_proj") for one in "qkv"), parts.linear(f"{name}.o_proj")
            mixer = parts.attention_of(config, at, inputs=inputs, out=out, rope=None)
        else:
            raise NotPlanned(f"its plan does not know layers of {kind}")
        return LayerPlan(mixer, None, mixer_norm=parts.rms(config, f"{at}.norm"))

    return parts.decoder_of(
        config,
        layer,
        final_norm=parts.rms(config, "model.norm_f"),
        ropes=(),
        embedding="model.embeddings.weight",
        lm_head=MatrixPlan("lm_head.weight"),  # never tied
    )


def _nemotron_h_layers(fields: Fields) -> Fields:
    """Layers of the pattern's letters. Raises NotPlanned: what Transformers takes without one is not known here."""
    kinds, pattern = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    if kinds is None and pattern is not None:
        names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        kinds = [names[letter] for letter in pattern]
    if kinds is None:
        raise NotPlanned("its configuration states no layers")
    return {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def _nemotron_h_gguf(stated: Stated) -> Fields:
    sizes, widths = sizes_of(stated), stated.each("feed_forward_length")
    has_experts = stated.architecture == "nemotron_h_moe"

    def has(end: str) -> bool:
        return any(name.endswith(end) for name in stated.file.tensors)

    if len({*widths} - {0}) > 1:
        raise stated.refusal("feed_forward_length", widths)
    for key in ("rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned"):
        stated.take(key, 0)  # it has no positions
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
        "use_conv_bias": has("ssm_conv1d.bias"),
        "attention_bias": has("attn_q.bias"),
        "mlp_bias": has("ffn_up.bias"),
    }
    if not has_experts:
        return fields
    return {
        **fields,
        **keys.routed_fields(stated),
        "moe_shared_expert_intermediate_size": stated.take("expert_shared_feed_forward_length"),
        "moe_latent_size": stated.take("moe_latent_size", 0) or None,
    }


_NEMOTRON = GgufForm(_nemotron_h_gguf, epsilon=LAYER_NORM, changes=CHANGES)
_ONES = (
    *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "embedding_multiplier"),
    *("lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)

MAMBAS = {
    "falcon_h1": Family(
        _falcon_h1,
        f"{decoders.BIASES} {OWN} mamba_d_ssm num_logits_to_keep",
        {
            **USUAL,
            **dict.fromkeys(_ONES, 1.0),
            "mlp_multipliers": (1.0, 1.0),
            "ssm_multipliers": (1.0,) * 5,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
        },
        gguf={"falcon-h1": GgufForm(_falcon_h1_gguf, changes=CHANGES)},
    ),
    "nemotron_h": Family(
        _nemotron_h,
        "hybrid_override_pattern mlp_bias moe_intermediate_size moe_shared_expert_intermediate_size "
        "num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob layers_block_type "
        # what only training and other code read
        "attention_bias num_logits_to_keep use_mamba_kernels expand time_step_max time_step_limit time_step_floor "
        "chunk_size mamba_ssm_cache_dtype n_shared_experts moe_shared_expert_overlap "
        "num_nextn_predict_layers mtp_layers_block_type residual_in_fp32 hidden_dropout rescale_prenorm_residual",
        {
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "head_dim": 128,
            "moe_latent_size": None,
            "time_step_min": 0.001,
            "use_bias": False,
            "mamba_proj_bias": False,
        },
        {
            "num_local_experts": "n_routed_experts",
            "layers_block_type": "layer_types",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
        },
        epsilon="layer_norm_epsilon",
        activation="mlp_hidden_act",
        completed=_nemotron_h_layers,
        gguf=dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
    ),
}
