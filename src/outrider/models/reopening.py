"""Opens checkpoints with notes (notes.py): a stand-in for the model, with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.generation_config import generation_config_of
from outrider.models.memory import skeleton, weight_files
from outrider.models.memory_fit import room_of
from outrider.models.notes import BLOCKS, NARROW, Notes
from outrider.models.placement import Placement
from outrider.models.quantize import plain_config
from outrider.models.reading import read_config, reading
from outrider.models.registry import ModelSpec
from outrider.models.safetensors_files import SafetensorsFiles
from outrider.models.stored_blocks import num_digits_of
from outrider.runtime.huge_pages import Room, move_weights
from outrider.runtime.stand_in import StandIn


def reopen(spec: ModelSpec, placed: Placement, notes: Notes) -> StandIn | None:
    """Stand-in for a model on the CPU; None if its weights do not fit, or have other names.

    Raises:
        ModelCorrupt, UnsupportedModel
    """
    free = room_of(torch.device("cpu"), None, None).free
    if free is not None and notes.num_bytes > free:
        return None
    model = notes.stand_in(lambda: _without_weights(spec))
    with reading(spec, "model on cpu"):
        weights = _of_gguf(spec, placed, notes, model) if spec.gguf else _of_safetensors(spec, notes)
        if weights is None:
            return None
        model.fill(weights)
    in_blocks = [one for one in model.parameters() if isinstance(one, NarrowWeight) and one.blocks is not None]
    move_weights(model, in_blocks)  # blocks are there
    return model


def _without_weights(spec: ModelSpec) -> Any:
    """Transformers' model, without its weights."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = skeleton(plain_config(read_config(spec)), torch.float32)
    model.generation_config = generation_config_of(spec) or model.generation_config
    return model


def _of_safetensors(spec: ModelSpec, notes: Notes) -> Mapping[str, Tensor] | None:
    assert spec.path is not None
    if BLOCKS in notes.stored.values():  # made from groups of the file, or from its numbers
        return None
    tensors = SafetensorsFiles(weight_files(spec.path))
    if not notes.shapes.keys() <= tensors.keys() <= notes.shapes.keys() | notes.tied.keys():
        return None
    return {name: _as_stored(kind, tensors[name]) for name, kind in notes.stored.items()}


def _of_gguf(spec: ModelSpec, placed: Placement, notes: Notes, model: StandIn) -> Mapping[str, Tensor]:
    from outrider.models.gguf.checkpoint import gguf_weights

    in_blocks = [name for name, kind in notes.stored.items() if kind == BLOCKS]
    weights = gguf_weights(spec, model, in_blocks, num_digits_of(spec, placed), model.config)
    room = Room(weight.stored.nbytes for weight in weights.kept.values())
    matrices: dict[str, Tensor] = {name: weights.matrix(name, room.empty_like) for name in weights.kept}
    return matrices | {name: _as_stored(notes.stored[name], weights.numbers(name)) for name in weights.others}


def _as_stored(kind: str, numbers: Tensor) -> Tensor:
    if not kind.startswith(NARROW):
        return numbers.float()
    stored: torch.dtype = getattr(torch, kind.removeprefix(NARROW))
    return NarrowWeight(numbers.to(stored), torch.float32)
