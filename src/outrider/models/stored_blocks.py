"""Which checkpoints can be read in their own blocks, and how: GGUF files, and groups of 4 bits."""

from __future__ import annotations

from typing import Any

from torch import nn

from outrider.models.block_weights import BlockWeights
from outrider.models.group_layouts import layout_of
from outrider.models.placement import Placement
from outrider.models.quantize import own_quantization
from outrider.models.registry import ROUNDS_ROWS, ModelSpec


def are_in_groups(config: Any) -> bool:
    """Whether a checkpoint is in groups of 4 bits, in a layout that can be read."""
    return layout_of(own_quantization(config) or {}) is not None


def stored_blocks(
    spec: ModelSpec, placed: Placement, config: Any, bare: nn.Module, *, keeps: bool
) -> BlockWeights | None:
    """The weights of a checkpoint in blocks, for float32 on the CPU; None if Transformers is to read it.

    Args:
        bare: the skeleton.
        keeps: whether matrices may stay in blocks; else groups are widened.
    """
    rounds = placed.quantization == ROUNDS_ROWS
    if spec.adapter is not None or placed.quantization not in ("none", ROUNDS_ROWS):
        return None
    if spec.gguf is not None:
        from outrider.models.gguf_weights import gguf_weights

        return gguf_weights(spec, bare, rounds) if keeps else None
    layout = layout_of(own_quantization(config) or {})
    if layout is None:
        return None
    from outrider.models.group_weights import group_weights

    return group_weights(spec, layout, bare, keeps=keeps, rounds=rounds)
