"""Quantized weights: quantized while loading, or in the checkpoint.

A quantized target is another target: all guarantees hold for the model as loaded. They need one property of its
kernels, which the probe checks: the logits of a token do not depend on later tokens or on other rows. So activations
are not quantized (weights only), or have a scale per row.

| name | weights | by |
|---|---|---|
| int8 | 8 bits, a scale for each output channel | torchao ``Int8WeightOnlyConfig`` |
| int4 | 4 bits, a scale and a zero for each 32 inputs; 4.75 bits in all | ``round_to_groups``, on the CPU in float32 |
| 8bit | 8 bits, a scale for each output channel; activations with one for each row | bitsandbytes LLM.int8() |
| nf4 | 4 bits, a scale for each 64 numbers | bitsandbytes |

Weights in blocks (GGUF) are multiplied on the CPU with activations (kernels/rounded_rows.h) in float32 (a32), or in 15
bits (a15, as good as float32, and faster) or 8 bits (a8, the default, as in llama.cpp) with a scale for each 32
numbers; those in int4 with a15.

Of a few scales of int4, each fitted to its own integers by least squares, the one with the least error is taken. Errors
of large weights count more (by their size plus the root mean square of the group, as in llama.cpp's K-quants). Nothing
is calibrated. ``benchmarks/results/four_bits_fable.txt`` compares other choices.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import MissingExtra, ModelCorrupt, OptionError, UnsupportedModel
from outrider.kernels.blocks import GROUP_TYPES, in_groups
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.registry import ARITHMETICS

# Extras that Transformers needs to read a checkpoint, by its ``quant_method``, with their packages.
_EXTRAS = {
    "bitsandbytes": ("quantize", ("bitsandbytes",)),
    "torchao": ("quantize", ("torchao",)),
    "compressed-tensors": ("quantize", ("compressed_tensors",)),
    "gptq": ("gptq", ("gptqmodel", "optimum")),
    "awq": ("gptq", ("gptqmodel",)),
}
_NF4_BLOCK, _NF4_CODES = 64, 16
_GROUP = 32  # inputs
_TYPE = replace(GROUP_TYPES[_GROUP, True], num_digits=2)
# A group's range is divided into 15 steps and this for a scale: the integers reach a bit less or further than to it.
_STEPS = (-1.2, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9, 1.2)
_NUMBERS = 2**19  # rounded at a time: they stay in the processor's cache


def check_quantization(name: str, quantization: str, method: str | None) -> None:
    """Refuse a quantization that is impossible for a model, whose checkpoint may be quantized by a ``method``. Raises
    OptionError: it is quantized already; ModelCorrupt: in an unknown way; UnsupportedModel: by MLX."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if method == "mlx":
        raise UnsupportedModel(f"{name} is quantized for MLX: take a GGUF file of the model")
    if quantization in ARITHMETICS and method != "gguf":
        raise OptionError("quantization", quantization, f"for GGUF files, and {name} is none")
    if quantization not in ("none", *ARITHMETICS) and method is not None:
        raise OptionError("quantization", quantization, f"{name} is a checkpoint quantized with {method} already")
    if method not in (None, *AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes", "gguf"):  # Transformers ignores these
        raise ModelCorrupt(f"{name} is quantized with {method}, which this release of Transformers cannot read")


def num_digits_of(quantization: str | None) -> int:
    """Digits of the integers to which rows are rounded before they are multiplied with the blocks of a GGUF file."""
    return ARITHMETICS.get(str(quantization), ARITHMETICS["a8"])


def method_of(config: Any) -> str | None:
    """``quant_method`` of a checkpoint; None if it is not quantized."""
    own = own_quantization(config)
    if is_mlx(vars(config)):
        return "mlx"
    if own is None:
        return None
    method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
    return str(getattr(method, "value", method) or "bitsandbytes")  # early bitsandbytes checkpoints do not state it


def is_mlx(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json states groups as MLX does."""
    own = (stated.get(key) for key in ("quantization", "quantization_config"))
    return any(
        isinstance(one, Mapping) and "quant_method" not in one and {"group_size", "bits"} <= one.keys() for one in own
    )


def plain_config(config: Any) -> Any:
    """Copy of a configuration that states no quantization."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return plain


def own_quantization(config: Any) -> Any:
    """``quantization_config`` of a checkpoint, in its text model too; None if it is not quantized."""
    own = getattr(config, "quantization_config", None)
    return getattr(config.get_text_config(decoder=True), "quantization_config", None) if own is None else own


def require_quantizer(name: str, quantization: str, method: str | None) -> None:
    """Check that the packages that quantize a model, or read a quantized checkpoint, are installed. Raises
    MissingExtra."""
    needed_by = f"quantization {quantization}"
    if method is not None:
        needed_by = f"{name} (quantized with {method}; a GGUF file needs no package)"
    if method is None and quantization not in ("none", "int4"):
        method = "bitsandbytes" if quantization in ("8bit", "nf4") else "torchao"
    extra, packages = _EXTRAS.get(method or "", ("quantize", ()))
    missing = [package.replace("_", "-") for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(" and ".join(missing), extra, needed_by)


def without_outliers(config: Any) -> None:
    """Turn off the outlier threshold of bitsandbytes' 8-bit products in a checkpoint. Above it, a column of activations
    is multiplied in 16 bits *for all rows* once one row has an outlier there, so that rows depend on each other."""
    own = own_quantization(config)
    if isinstance(own, dict) and own.get("load_in_8bit"):
        own["llm_int8_threshold"] = 0.0


def picks_outliers(model: nn.Module) -> bool:
    """Whether any of its 8-bit products has an outlier threshold."""
    return any(getattr(getattr(module, "state", None), "threshold", 0) > 0 for module in model.modules())


def quantizable(model: Any, quantization: str) -> dict[str, nn.Linear]:
    """Layers that are quantized while loading: all linear ones but the last; in int4, of whole groups."""
    last, size = model.get_output_embeddings(), _GROUP if quantization == "int4" else 1
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: layer for name, layer in linear.items() if layer is not last and layer.in_features % size == 0}


def quantization_config(quantization: str, dtype: torch.dtype) -> Any:
    """Quantization config for ``from_pretrained``; for int4, which is our own, there is none."""
    import transformers

    if quantization == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    if quantization == "nf4":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=False
        )
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def linear_bytes(quantization: str, layer: nn.Linear) -> int:
    """Bytes of the quantized weights of a layer, with their scales."""
    number, outputs = layer.weight.numel(), layer.out_features
    if quantization == "nf4":
        return number // 2 + 4 * -(-number // _NF4_BLOCK) + 4 * _NF4_CODES
    if quantization == "int4":
        return number // _GROUP * _TYPE.num_bytes
    return number + outputs * (5 if quantization == "int8" else 4)  # torchao's int8 stores zero points


def round_to_groups(model: Any, *, keeps: bool) -> float:
    """Round the weights of linear layers to int4, one after the other; return the share of the model's weights that is
    rounded. They stay in groups if it ``keeps`` them; else they are widened again."""
    rounded, total = 0, sum(parameter.numel() for parameter in model.parameters())
    for layer in quantizable(model, "int4").values():
        weight = layer.weight.detach()
        wide = weight.wide() if isinstance(weight, NarrowWeight) else weight
        parts = rounded_to_groups(wide)
        new = NarrowWeight.of_blocks(in_groups(*parts), _TYPE) if keeps else widened_groups(*parts)
        layer.weight = nn.Parameter(new, requires_grad=False)
        rounded += wide.numel()
    return rounded / total if total else 0.0


def rounded_to_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, scales and zeros. [O, I] -> uint8 [O, I], float16 [O, I / 32], uint8 [O, I / 32]"""
    parts = weight.split(max(1, _NUMBERS // weight.shape[1]))
    wholes, scales, zeros = zip(*map(_round, parts), strict=True)
    return torch.cat(wholes), torch.cat(scales), torch.cat(zeros)


def widened_groups(wholes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Numbers that they mean. float32 [O, I]"""
    shifted = wholes.float().unflatten(-1, (-1, _GROUP)) - zeros.float().unsqueeze(-1)
    numbers: Tensor = shifted * scales.float().unsqueeze(-1)
    return numbers.flatten(-2)


def _round(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers = weight.float().unflatten(-1, (-1, _GROUP))  # [O, groups, 32]
    importance = numbers.abs() + numbers.square().mean(-1, keepdim=True).sqrt()
    low, high = numbers.amin(-1, keepdim=True).clamp_max(0.0), numbers.amax(-1, keepdim=True).clamp_min(0.0)
    least, wholes = torch.full_like(low, torch.inf), torch.zeros_like(numbers)
    scales, zeros = torch.zeros_like(low), torch.zeros_like(low)
    for step in _STEPS:
        scale = (high - low) / (15 + step)
        scale = torch.where(scale == 0, 1.0, scale)
        zero = (-low / scale - step / 2).round().clamp(0, 15)
        shifted = ((numbers / scale).round() + zero).clamp(0, 15) - zero
        sizes = (importance * shifted.square()).sum(-1, keepdim=True)
        fitted = (importance * numbers * shifted).sum(-1, keepdim=True) / torch.where(sizes == 0, 1.0, sizes)
        fitted = fitted.half().float()
        error = (importance * (numbers - shifted * fitted).square()).sum(-1, keepdim=True)
        is_better = error < least
        least = torch.where(is_better, error, least)
        wholes = torch.where(is_better, shifted + zero, wholes)
        scales, zeros = torch.where(is_better, fitted, scales), torch.where(is_better, zero, zeros)
    return wholes.to(torch.uint8).flatten(-2), scales.squeeze(-1).half(), zeros.squeeze(-1).to(torch.uint8)
