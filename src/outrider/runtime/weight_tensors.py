"""The plain tensors of a parameter (a quantized weight has several: its numbers and their scales), and weights in huge
pages on the CPU.

A forward of few rows reads all weights once. With pages of 4 KB the processor translates an address every 64 cache
lines, with pages of 2 MB every 32,768. On a virtual machine, which translates twice, this costs up to a tenth of a
round, and more where memory limits rounds (docs/internals/log/2026.md).
"""

from __future__ import annotations

import logging
import math
import mmap
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

_LOG = logging.getLogger(__name__)
_PAGE_BYTES = 2 * 2**20
_ALIGNED_BYTES = 64  # a cache line
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Room:
    """Memory for tensors of these sizes, in huge pages if the system gives them on request (madvise) and the sizes are
    worth it (``is_huge``)."""

    def __init__(self, sizes: Iterable[int]) -> None:
        total, self.is_huge = sum(map(_aligned, sizes)), False
        with suppress(OSError):
            self.is_huge = hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _SETTING.read_text()
        self.is_huge &= total >= _PAGE_BYTES
        if self.is_huge:
            try:
                self._memory = mmap.mmap(-1, total + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._memory.madvise(mmap.MADV_HUGEPAGE)
                self._place = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % _PAGE_BYTES
            except OSError as error:
                _LOG.info("no huge pages for %d MB of weights: %s", total >> 20, error)
                self.is_huge = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Contiguous tensor on the CPU, in a storage of its own, which keeps the memory alive."""
        if not self.is_huge:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=self._place)
        self._place += _aligned(tensor.nbytes)
        return tensor.view(tuple(shape))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


@torch.no_grad()
def move_weights(model: nn.Module, others: Sequence[Tensor] = ()) -> None:
    """Move the weights of a model on the CPU to huge pages, one by one, so that at most one is in memory twice. Others,
    and tensors that share memory with others, stay."""
    stay = set(map(id, others))
    weights = [one for one in (*model.parameters(), *model.buffers()) if id(one) not in stay]
    tensors = {id(one): one for weight in weights for one in stored_tensors(weight)}
    num_users = Counter(one.untyped_storage().data_ptr() for one in tensors.values())
    moved = [
        one
        for one in tensors.values()
        if type(one) in (Tensor, nn.Parameter) and one.layout == torch.strided and one.device.type == "cpu"
        if one.is_contiguous() and one.numel() > 0 and num_users[one.untyped_storage().data_ptr()] == 1
    ]
    room = Room(one.nbytes for one in moved)
    if room.is_huge:
        for one in moved:
            one.data = room.empty(one.shape, one.dtype).copy_(one)


def set_weights(model: Any, weights: Mapping[str, Tensor]) -> list[str]:
    """Give a model that was built without weights (on the device "meta") its own, of shared ones under one of their
    names or several. Returns the names of those that are missing. Raises ValueError: a shape does not fit."""
    places = model.state_dict(keep_vars=True)
    new: dict[Tensor, nn.Parameter] = {}
    made: dict[int, nn.Parameter] = {}  # one for each weight, whose names may be those of several places
    for name in weights.keys() & places.keys():
        place, weight = places[name], weights[name]
        if weight.shape != place.shape:
            raise ValueError(f"the shape of {name} does not fit its configuration")
        if isinstance(place, nn.Parameter):
            new[place] = made.setdefault(id(weight), _parameter(weight))
        else:
            place.data = weight.detach()
    for module in model.modules():
        for leaf, old in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if old in new:
                setattr(module, leaf, new[old])
    return sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)


def _parameter(weight: Tensor) -> nn.Parameter:
    if type(weight) is Tensor:
        return nn.Parameter(weight, requires_grad=False)
    # As the constructor marks other types. It would run an operator of theirs, for which PyTorch imports a second's
    # worth of modules (torch.distributed.tensor).
    parameter: nn.Parameter = weight  # type: ignore[assignment]
    parameter._is_param = True
    return parameter


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def tp_size_of(model: object) -> int:
    """Number of processes that share a model of Transformers (tensor parallel)."""
    return getattr(model, "tp_size", None) or 1


def is_shared(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether several processes share the tensor, each with a part."""
    module = sys.modules.get("torch.distributed.tensor")  # where none is imported, none is there
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all processes if they share it."""
    return tensor.full_tensor() if is_shared(tensor) else tensor


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """Tensors with the bytes of a parameter, in the order of ``__tensor_flatten__``."""
    if is_shared(tensor):
        return stored_tensors(tensor.to_local())
    if (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:
        names, _ = flatten()
        return [inner for name in names for inner in stored_tensors(getattr(tensor, name))]
    scales = [getattr(tensor, "SCB", None)]  # bitsandbytes: 8-bit parameters here, 4-bit ones below
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        scales += [state.absmax, state.code]
    return [tensor, *(scale for scale in scales if isinstance(scale, Tensor))]
