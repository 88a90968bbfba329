"""Rounds weights to groups of 4 bits (kernels/blocks.py) while a model is loaded: ``int4`` on the CPU.

Integers from -8 to 7 times a scale for each 32 inputs, without a zero: 4.5 bits for each weight, as Q4_0 has them. Of a
few scales, each fitted to its own integers by least squares, the one with the least error is taken. Errors of large
weights count more (by their size plus the root mean square of the group, as in llama.cpp's K-quants). Nothing is
calibrated. ``benchmarks/four_bits.py`` compares other choices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.blocks import GROUP_FORMS, in_groups
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.quantize import quantizable

_SIZE = 32
_FORM = GROUP_FORMS[_SIZE, False]
# The number of largest size is divided by -(8 + this) for a scale: the range goes a bit further or less far than to it.
_STEPS = (-1.2, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9, 1.2)
_NUMBERS = 2**19  # rounded at a time: they stay in the processor's cache


def round_to_groups(model: Any, *, keeps: bool) -> float:
    """Round the weights of linear layers but the last, one after the other.

    Args:
        keeps: whether they stay in groups; else they are widened again.

    Returns:
        The share of the model's weights that is rounded.
    """
    rounded = 0
    total = sum(parameter.numel() for parameter in model.parameters())
    for layer in _layers(model).values():
        weight = layer.weight.detach()
        wide = weight.wide() if isinstance(weight, NarrowWeight) else weight
        wholes, scales = rounded_to_groups(wide)
        if keeps:
            new: Tensor = NarrowWeight(in_groups(wholes, scales, None), torch.float32, None, _FORM)
        else:
            new = ((wholes.float() - 8).unflatten(-1, (-1, _SIZE)) * scales.float().unsqueeze(-1)).flatten(-2)
        layer.weight = nn.Parameter(new, requires_grad=False)
        rounded += wide.numel()
    return rounded / total if total else 0.0


def predict_groups(bare: Any) -> None:
    """Give a skeleton these weights, without their bytes."""
    for layer in _layers(bare).values():
        in_bytes = torch.empty(layer.out_features, _row_bytes(layer), dtype=torch.uint8, device="meta")
        layer.weight = nn.Parameter(NarrowWeight(in_bytes, torch.float32, None, _FORM), requires_grad=False)


def bytes_in_groups(layer: nn.Linear) -> int:
    """Bytes of the weights of a layer."""
    number = layer.out_features * _row_bytes(layer)
    return layer.weight.numel() * layer.weight.itemsize if layer.in_features % _SIZE else number


def rounded_to_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers, plus 8, and scales. [O, I] -> uint8 [O, I], float16 [O, I / 32]"""
    parts = weight.split(max(1, _NUMBERS // weight.shape[1]))
    wholes, scales = zip(*map(_rounded, parts), strict=True)
    return torch.cat(wholes), torch.cat(scales)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    numbers = weight.float().unflatten(-1, (-1, _SIZE))  # [O, groups, 32]
    importance = numbers.abs() + numbers.square().mean(-1, keepdim=True).sqrt()
    largest = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))
    least = torch.full_like(largest, torch.inf)
    wholes, scales = torch.zeros_like(numbers), torch.zeros_like(largest)
    for step in _STEPS:
        scale = largest / -(8 + step)
        these = (numbers / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7)
        sizes = (importance * these.square()).sum(-1, keepdim=True)
        fitted = (importance * numbers * these).sum(-1, keepdim=True) / torch.where(sizes == 0, 1.0, sizes)
        fitted = fitted.half().float()
        error = (importance * (numbers - these * fitted).square()).sum(-1, keepdim=True)
        is_better = error < least
        least = torch.where(is_better, error, least)
        wholes, scales = torch.where(is_better, these, wholes), torch.where(is_better, fitted, scales)
    return (wholes + 8).to(torch.uint8).flatten(-2), scales.squeeze(-1).half()


def _layers(model: Any) -> dict[str, nn.Linear]:
    """Layers whose width the size of a group divides."""
    return {name: layer for name, layer in quantizable(model).items() if layer.in_features % _SIZE == 0}


def _row_bytes(layer: nn.Linear) -> int:
    return layer.in_features // _SIZE * _FORM.num_bytes
