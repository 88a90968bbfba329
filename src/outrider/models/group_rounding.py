"""Rounds weights to groups of 4 bits (kernels/blocks.py) while a model is loaded: ``int4`` on the CPU.

Integers from 0 to 15, less the zero of each 32 inputs, times their scale: 4.75 bits for each weight, about those of
Q4_K_M. Of a few scales, each fitted to its own integers by least squares, the one with the least error is taken. Errors
of large weights count more (by their size plus the root mean square of the group, as in llama.cpp's K-quants). Nothing
is calibrated. ``benchmarks/results/four_bits_fable.txt`` compares other choices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.blocks import GROUP_FORMS, in_groups
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.quantize import quantizable

_SIZE = 32
_FORM = replace(GROUP_FORMS[_SIZE, True], num_digits=2)
# A group's range is divided into 15 steps and this for a scale: the integers reach a bit less or further than to it.
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
        parts = rounded_to_groups(wide)
        new = NarrowWeight.of_blocks(in_groups(*parts), _FORM) if keeps else widened_groups(*parts)
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


def rounded_to_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, scales and zeros. [O, I] -> uint8 [O, I], float16 [O, I / 32], uint8 [O, I / 32]"""
    parts = weight.split(max(1, _NUMBERS // weight.shape[1]))
    wholes, scales, zeros = zip(*map(_round, parts), strict=True)
    return torch.cat(wholes), torch.cat(scales), torch.cat(zeros)


def widened_groups(wholes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Numbers that they mean. float32 [O, I]"""
    shifted = wholes.float().unflatten(-1, (-1, _SIZE)) - zeros.float().unsqueeze(-1)
    numbers: Tensor = shifted * scales.float().unsqueeze(-1)
    return numbers.flatten(-2)


def _round(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers = weight.float().unflatten(-1, (-1, _SIZE))  # [O, groups, 32]
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


def _layers(model: Any) -> dict[str, nn.Linear]:
    """Layers whose width the size of a group divides."""
    return {name: layer for name, layer in quantizable(model).items() if layer.in_features % _SIZE == 0}


def _row_bytes(layer: nn.Linear) -> int:
    return layer.in_features // _SIZE * _FORM.num_bytes
