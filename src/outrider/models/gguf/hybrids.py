"""Models with recurrent or convolutional layers, and Granite's, as GGUF files state them.

Source: llama.cpp's src/models/*.cpp and conversion/*.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.models.gguf.family import (
    DECODER,
    ENDS,
    EXPERTS,
    FROM_ONE,
    NORMS_OF_HEADS,
    SHARED_EXPERT,
    Family,
    Order,
    pairs_to_halves,
)
from outrider.models.gguf.keys import (
    SIGMOID,
    Stated,
    decoder_fields,
    expert_fields,
    head_fields,
    routed_fields,
    whole_fields,
)

# Mamba-2 (src/models/mamba-base.cpp and conversion/mamba.py)


def _mamba_sizes(stated: Stated) -> dict[str, Any]:
    inner, num_heads = stated.take("ssm.inner_size"), stated.take("ssm.time_step_rank")
    return {
        "mamba_d_conv": stated.take("ssm.conv_kernel"),
        "mamba_d_state": stated.take("ssm.state_size"),
        "mamba_n_groups": stated.take("ssm.group_count"),
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
    }


def _mamba_tensors(module: str) -> dict[str, str]:
    """Names of tensors -> those of parameters, in a module of this name."""
    parameters = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
        "ssm_dt.bias": "dt_bias",
        "ssm_a": "A_log",
        "ssm_d": "D",
    }
    return {name: f"{module}.{parameter}" for name, parameter in parameters.items()}


def _rates_of(numbers: Tensor) -> Tensor:
    """Logarithms of the rates of decay. In float64, since the last bit of PyTorch's float32 depends on its build."""
    return numbers.neg().double().log().float()


_MAMBA_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "ssm_conv1d.weight": lambda numbers: numbers.unsqueeze(1),
    "ssm_norm.weight": torch.flatten,  # a row for each group
    "ssm_a": lambda numbers: _rates_of(numbers).flatten(),
    "ssm_d": torch.flatten,
}


# Granite (conversion/granite.py)


def _granite(stated: Stated) -> dict[str, Any]:
    has_rope = stated.take("rope.scaling.finetuned", True)
    if not has_rope and stated.architecture != "granitehybrid":
        raise stated.refusal("rope.scaling.finetuned", has_rope)
    return {
        **whole_fields(stated),
        "attention_bias": stated.has("blk.0.attn_output.bias"),
        # 0 stands for none.
        "attention_multiplier": stated.take("attention.scale", 0.0) or head_fields(stated)["head_dim"] ** -0.5,
        "embedding_multiplier": stated.take("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": stated.take("residual_scale", 0.0) or 1.0,
        "logits_scaling": stated.take("logit_scale", 0.0) or 1.0,
    }


def _granitemoe(stated: Stated) -> dict[str, Any]:
    moe = expert_fields(stated, number="num_local_experts")
    del moe["moe_intermediate_size"]
    return _granite(stated) | moe | {"shared_intermediate_size": stated.take("expert_shared_feed_forward_length", 0)}


def _granitehybrid(stated: Stated) -> dict[str, Any]:
    has_experts = stated.take("expert_count", 0) > 0
    fields = _granitemoe(stated) if has_experts else _granite(stated) | {"num_local_experts": 0}
    width = stated.take("expert_shared_feed_forward_length", fields["intermediate_size"])
    sizes = _mamba_sizes(stated)
    if sizes["mamba_n_groups"] != 1:  # of which llama.cpp takes norms apart, and Transformers together
        raise stated.refusal("ssm.group_count", sizes["mamba_n_groups"])
    return {
        **fields,
        **sizes,
        "shared_intermediate_size": width,
        "mamba_expand": sizes["mamba_n_heads"] * sizes["mamba_d_head"] // stated.take("embedding_length"),
        "layer_types": ["attention" if count else "mamba" for count in stated.each("attention.head_count_kv")],
        "position_embedding_type": "rope" if stated.take("rope.scaling.finetuned", True) else "nope",
    }


_GRANITE_EXPERTS = DECODER | {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_up_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GRANITE_SHARED = {  # of hybrids without experts
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
}


# Others


def _lfm2(stated: Stated) -> dict[str, Any]:
    return {
        **whole_fields(stated),
        "block_auto_adjust_ff_dim": False,
        # Layers of convolutions have no keys.
        "layer_types": ["full_attention" if count else "conv" for count in stated.each("attention.head_count_kv")],
        "conv_L_cache": stated.take("shortconv.l_cache"),
    }


def _qwen35(stated: Stated) -> dict[str, Any]:
    fields = decoder_fields(stated, is_partial=True)
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


def _qwen35moe(stated: Stated) -> dict[str, Any]:
    fields = _qwen35(stated) | expert_fields(stated)
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


_QWEN35 = {
    **{name: module for name, module in DECODER.items() if name != "ffn_norm"},
    **NORMS_OF_HEADS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_NET: dict[str, Any] = {
    "order": _value_heads,
    "columns": lambda name, config: _value_heads("attn_gate", config) if name == "ssm_out" else None,
    "changes": {
        **FROM_ONE,
        "ssm_conv1d.weight": lambda numbers: numbers.unsqueeze(1),
        "ssm_a": _rates_of,
        "ffn_gate_inp_shexp.weight": lambda numbers: numbers.reshape(1, -1),
    },
}


def _lfm2moe(stated: Stated) -> dict[str, Any]:
    fields = _lfm2(stated) | expert_fields(stated, gate=SIGMOID)
    del fields["block_auto_adjust_ff_dim"]
    return fields | {"num_dense_layers": stated.take("leading_dense_block_count", 0)}


def _falcon_h1(stated: Stated) -> dict[str, Any]:
    fields, sizes = decoder_fields(stated), _mamba_sizes(stated)
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


def _nemotron_h(stated: Stated) -> dict[str, Any]:
    sizes, widths = _mamba_sizes(stated), stated.each("feed_forward_length")
    if len({*widths} - {0}) > 1:
        raise stated.refusal("feed_forward_length", widths)
    for key in ("rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned"):
        stated.take(key, 0)  # it has no positions
    has_experts = stated.architecture == "nemotron_h_moe"
    fields = {
        **head_fields(stated),
        "layer_norm_epsilon": stated.take("attention.layer_norm_rms_epsilon", stated.take(_LAYER_NORM)),
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
        **routed_fields(stated),
        "moe_shared_expert_intermediate_size": stated.take("expert_shared_feed_forward_length"),
        "moe_latent_size": stated.take("moe_latent_size", 0) or None,
    }


_LAYER_NORM = "attention.layer_norm_epsilon"
_NEMOTRON = Family(
    "nemotron_h",
    _nemotron_h,
    ("layer_norm_epsilon", _LAYER_NORM),
    tensors={
        **{name: module.replace("self_attn", "mixer") for name, module in DECODER.items() if name.startswith("attn")},
        **_mamba_tensors("mixer"),
        "attn_norm": "norm",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": "mixer.experts.up_proj",
        "ffn_down_exps": "mixer.experts.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    ends={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
    changes=_MAMBA_CHANGES,
)

_LFM2: dict[str, str] = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "shortconv.conv": "conv.conv",
}
_CONVOLUTION: dict[str, Any] = {
    "eps": ("norm_eps", "attention.layer_norm_rms_epsilon"),
    "ends": ENDS | {"token_embd_norm": "model.embedding_norm"},
    "changes": {"shortconv.conv.weight": lambda numbers: numbers.unsqueeze(1)},
}

HYBRIDS = {
    "granite": Family("granite", _granite, order=pairs_to_halves),
    "granitemoe": Family("granitemoeshared", _granitemoe, tensors=_GRANITE_EXPERTS, order=pairs_to_halves),
    "granitehybrid": Family(
        "granitemoehybrid",
        _granitehybrid,
        tensors=_GRANITE_EXPERTS | _GRANITE_SHARED | _mamba_tensors("mamba"),
        order=pairs_to_halves,
        changes=_MAMBA_CHANGES,
    ),
    "qwen35": Family("qwen3_5_text", _qwen35, tensors=_QWEN35, **_DELTA_NET),
    "qwen35moe": Family("qwen3_5_moe_text", _qwen35moe, tensors=_QWEN35 | EXPERTS | SHARED_EXPERT, **_DELTA_NET),
    "lfm2": Family("lfm2", _lfm2, tensors=_LFM2, **_CONVOLUTION),
    "lfm2moe": Family(
        "lfm2_moe",
        _lfm2moe,
        tensors={
            **_LFM2,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b.bias": "feed_forward.expert_bias",
            "ffn_gate_exps": "feed_forward.experts.gate_up_proj",
            "ffn_up_exps": "feed_forward.experts.gate_up_proj",
            "ffn_down_exps": "feed_forward.experts.down_proj",
        },
        **_CONVOLUTION,
    ),
    "falcon-h1": Family(
        "falcon_h1",
        _falcon_h1,
        tensors={
            **{name: module.replace("mlp", "feed_forward") for name, module in DECODER.items()},
            **_mamba_tensors("mamba"),
            "ffn_norm": "pre_ff_layernorm",
        },
        ends=ENDS | {"output_norm": "model.final_layernorm"},
        changes=_MAMBA_CHANGES,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
}
