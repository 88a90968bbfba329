"""Loads a model whose large matrices stay in blocks (kernels/blocks.py), as its checkpoint stores them. The readers of
formats (gguf_weights.py, group_weights.py) say which, and give the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.memory import skeleton
from outrider.runtime.huge_pages import Room


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights of a checkpoint, some of them in blocks. Names are those in the model.

    Attributes:
        kept: matrices that stay in their blocks, without bytes (on the device ``meta``).
        others: names of the other weights.
        matrix: reads one of ``kept``; its blocks are interleaved to the tensor that the function makes.
        numbers: reads one of ``others``, in float32 or as it is to be kept.
    """

    kept: dict[str, NarrowWeight]
    others: frozenset[str]
    matrix: Callable[[str, Callable[[Tensor], Tensor]], NarrowWeight]
    numbers: Callable[[str], Tensor]

    def predict(self, bare: nn.Module) -> None:
        """Give a skeleton these matrices, without their bytes."""
        _set_weights(bare, self.kept)

    def load(self, config: Any) -> tuple[Any, list[str]]:
        """Load the model, in float32 but for these matrices.

        Returns:
            The model, and names of weights that are missing in the checkpoint.
        """
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model = skeleton(config, torch.float32)
        room = Room(weight.stored.nbytes for weight in self.kept.values() if weight.blocks is not None)
        _set_weights(model, {name: self.matrix(name, room.empty_like) for name in self.kept})
        model.load_state_dict({name: self.numbers(name) for name in self.others}, strict=False, assign=True)
        model.tie_weights()
        return model, sorted(name for name, weight in model.named_parameters() if weight.is_meta)


def _set_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set weights, wherever they are shared."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, weight in weights.items():
        shared = model.get_parameter(name)
        if weight.shape != shared.shape:
            raise ValueError(f"the shape of {name} does not fit its configuration")
        new[shared] = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        for own, one in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if one in new:
                setattr(module, own, new[one])
