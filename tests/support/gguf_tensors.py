"""Weights of Transformers' models under their names in GGUF files, and in the files' forms, as llama.cpp's converters
write them: its conversion/*.py and gguf-py, in the build of llama-cpp-python 0.3.36. Nothing of the reader is used.
"""

from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

_PERMUTED = "llama mistral ministral3 smollm3 granite granitemoeshared granitemoehybrid".split()
_MAMBA = "granitemoehybrid falcon_h1 nemotron_h".split()
_DELTA_NET = ("qwen3_5_text", "qwen3_5_moe_text")
_FROM_ONE = ("gemma", "gemma2", "gemma3_text", *_DELTA_NET)
# Parts of names that converters change before they look names up.
_RENAMED = {
    "experts.gate_up_proj": "experts.gate_up_proj.weight",
    "experts.down_proj": "experts.down_proj.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "layer_scalar": "layer_scalar.weight",
    "correct_output_scale": "correct_output_scale.weight",
    "dt_bias": "dt_proj.bias",
    "sinks": "sinks.weight",
    "down_proj_bias": "down_proj.bias",
    "expert_bias": "expert_bias.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


def model_tensors(model: PreTrainedModel, architecture: str) -> dict[str, Tensor]:
    """All weights of a model."""
    config = model.config.get_text_config()
    like = architecture.removesuffix("-assistant")  # which older releases of gguf do not have
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == like)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        split = _split(name, tensor, config)
        if split is not None:
            found |= split
            continue
        for end, other in _RENAMED.items():
            if name.endswith(end):
                name = name.removesuffix(end) + other
        if architecture.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.", 1)
        new = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert new is not None, name
        found[new] = _as_stored(new, tensor, config)
    if config.model_type == "gemma3n_text":
        for part, new in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
            layers = getattr(model.model, part)
            found[f"{new}.weight"] = torch.stack([layer.weight for layer in layers])
    return found


def _split(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor] | None:
    """Parts of a parameter that a file has apart; None where it has the parameter."""
    if name.startswith("model.altup_"):
        return {}
    if name in ("pre_projection.weight", "post_projection.weight"):  # of assistants
        return {f"nextn.{name}": tensor}
    if not name.startswith("model.layers."):
        return None
    layer, kind = f"blk.{name.split('.')[2]}.", config.model_type
    if name.endswith("experts.gate_up_proj") and kind != "gemma4_text":  # which is not split
        if kind == "gpt_oss":  # gates and others in turn
            gate, up = tensor.mT[:, ::2], tensor.mT[:, 1::2]
        else:
            gate, up = tensor.chunk(2, dim=1)
        return {f"{layer}ffn_gate_exps.weight": gate, f"{layer}ffn_up_exps.weight": up}
    if name.endswith("experts.gate_up_proj_bias"):
        return {f"{layer}ffn_gate_exps.bias": tensor[:, ::2], f"{layer}ffn_up_exps.bias": tensor[:, 1::2]}
    if name.endswith("experts.down_proj") and kind == "gpt_oss":
        return {f"{layer}ffn_down_exps.weight": tensor.mT}
    for part in ("up", "down"):
        if name.endswith((f"mixer.experts.{part}_proj", f"block_sparse_moe.experts.{part}_proj")):
            return {f"{layer}ffn_{part}_exps.weight": tensor}
    end = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return {f"{layer}ffn_gate{end}.weight": gate, f"{layer}ffn_up{end}.weight": up}
    if name.endswith("shared_mlp.output_linear.weight"):
        return {f"{layer}ffn_down{end}.weight": tensor}
    return None


def _as_stored(name: str, tensor: Tensor, config: Any) -> Tensor:
    leaf, kind = name.split(".")[-2:], config.model_type
    if kind == "falcon_h1":
        tensor = _multiplied(leaf, tensor, config)
    if kind in _PERMUTED and leaf[0] in ("attn_q", "attn_k"):
        num_heads = config.num_attention_heads if leaf[0] == "attn_q" else config.num_key_value_heads
        halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if kind in _FROM_ONE and name.endswith("norm.weight") and leaf[0] != "ssm_norm":
        return tensor + 1
    if kind in _DELTA_NET:
        return _delta_net_as_stored(leaf, tensor, config)
    if kind in _MAMBA:
        return _mamba_as_stored(leaf, tensor, config)
    if kind == "gpt2" and leaf[0] in ("attn_qkv", "attn_output", "ffn_up", "ffn_down") and leaf[1] == "weight":
        return tensor.t()
    if leaf[0] == "conv" and tensor.ndim == 3:
        return tensor.squeeze(1)
    return tensor


def _delta_net_as_stored(leaf: list[str], tensor: Tensor, config: Any) -> Tensor:
    """Heads of values: the first of all heads of keys, then the second of all (``_LinearAttentionVReorderBase``)."""
    num_keys = config.linear_num_key_heads

    def reorder(numbers: Tensor, dim: int) -> Tensor:
        heads = numbers.unflatten(dim, (num_keys, config.linear_num_value_heads // num_keys, -1))
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if leaf[1] == "ssm_a":
        return reorder(-tensor.exp(), 0)
    if leaf[0] in ("ssm_alpha", "ssm_beta", "ssm_dt", "attn_gate"):
        return reorder(tensor, 0)
    if leaf[0] == "ssm_out":
        return reorder(tensor, 1)
    if leaf[0] in ("attn_qkv", "ssm_conv1d"):
        num_others = 2 * num_keys * config.linear_key_head_dim
        return torch.cat((tensor[:num_others], reorder(tensor[num_others:], 0))).squeeze(1)
    return tensor


def _mamba_as_stored(leaf: list[str], tensor: Tensor, config: Any) -> Tensor:
    """``Mamba2Model``."""
    if leaf[1] in ("ssm_a", "ssm_d"):
        return (-tensor.exp() if leaf[1] == "ssm_a" else tensor)[:, None]
    if leaf[0] == "ssm_norm":
        num_groups = config.n_groups if config.model_type == "nemotron_h" else config.mamba_n_groups
        return tensor.reshape(num_groups, -1)
    return tensor.squeeze(1) if leaf == ["ssm_conv1d", "weight"] else tensor


def _multiplied(leaf: list[str], tensor: Tensor, config: Any) -> Tensor:
    """``FalconH1Model``: weights with the multipliers of the configuration."""
    if leaf[0] == "ssm_in":
        state = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, state, state, config.mamba_n_heads)
        parts = [torch.full((size,), by) for size, by in zip(sizes, config.ssm_multipliers, strict=True)]
        return tensor * config.ssm_in_multiplier * torch.cat(parts)[:, None]
    by = {
        "ffn_down": config.mlp_multipliers[1],
        "ffn_gate": config.mlp_multipliers[0],
        "attn_k": config.key_multiplier * config.attention_in_multiplier,
        "attn_q": config.attention_in_multiplier,
        "attn_v": config.attention_in_multiplier,
        "attn_output": config.attention_out_multiplier,
        "ssm_out": config.ssm_out_multiplier,
        "output": config.lm_head_multiplier,
        "token_embd": config.embedding_multiplier,
    }
    return tensor * by.get(leaf[0], 1.0)
