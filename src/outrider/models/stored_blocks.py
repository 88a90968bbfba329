"""Which checkpoints can be read in their own blocks, and how: GGUF files, and groups of 4 bits."""

from __future__ import annotations

from typing import Any

from torch import nn

from outrider.models.block_weights import BlockWeights
from outrider.models.cpu_weights import narrow_layers
from outrider.models.group_layouts import layout_of
from outrider.models.placement import Placement
from outrider.models.quantize import own_quantization
from outrider.models.registry import ARITHMETICS, ModelSpec

_NUM_DIGITS = {"a32": 0, "a15": 2, "a8": 1}  # of integers (kernels/rounded_rows.h)


def are_in_groups(config: Any) -> bool:
    """Whether a checkpoint is in groups of 4 bits, in a layout that can be read."""
    return layout_of(own_quantization(config) or {}) is not None


def num_digits_of(spec: ModelSpec, placed: Placement) -> int:
    """Digits of the integers to which rows are rounded before they are multiplied with blocks."""
    default = "a15" if spec.gguf is None else "a8"
    return _NUM_DIGITS[default if placed.quantization == "none" else str(placed.quantization)]


def stored_blocks(
    spec: ModelSpec, placed: Placement, config: Any, bare: nn.Module, *, keeps: bool
) -> BlockWeights | None:
    """The weights of a checkpoint in blocks, for float32 on the CPU; None if Transformers is to read it.

    Args:
        bare: the skeleton.
        keeps: whether matrices may stay in blocks; else groups are widened.
    """
    if spec.adapter is not None or placed.quantization not in ("none", *ARITHMETICS):
        return None
    num_digits = num_digits_of(spec, placed)
    if spec.gguf is not None:
        from outrider.models.gguf.checkpoint import gguf_weights

        large = [f"{layer}.weight" for layer in narrow_layers(bare)]
        found = gguf_weights(spec, bare, large, num_digits) if keeps else None
        return found if found and found.kept else None
    layout = layout_of(own_quantization(config) or {})
    if layout is None:
        return None
    from outrider.models.group_weights import group_weights

    return group_weights(spec, layout, bare, keeps=keeps, num_digits=num_digits)
