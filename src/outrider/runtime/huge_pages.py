"""Weights on the CPU in huge pages.

A forward of few rows reads all weights once. In pages of 4 KB the processor looks up an address for every 64 lines of
its cache, in pages of 2 MB for every 32,768; on a virtual machine, where an address is looked up twice, this costs up
to a tenth of a round, and more where rounds are held up by it (docs/log/2026.md).
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.runtime.tensor_parts import stored_tensors

_LOG = logging.getLogger(__name__)
_PAGE_BYTES = 2 * 2**20
_ALIGNED_BYTES = 64  # a line of the processor's cache
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def are_there() -> bool:
    """Whether this system gives huge pages to a process that asks for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


@torch.no_grad()
def move_weights(model: nn.Module) -> None:
    """Move the weights of a model on the CPU to huge pages, one after the other, so that no more than one is there
    twice. Tensors that others share memory with stay where they are."""
    weights = (*model.parameters(), *model.buffers())
    tensors = {id(one): one for weight in weights for one in stored_tensors(weight)}
    num_users = Counter(one.untyped_storage().data_ptr() for one in tensors.values())
    moved = [one for one in tensors.values() if _is_movable(one) and num_users[one.untyped_storage().data_ptr()] == 1]
    sizes = [-(-one.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for one in moved]
    if sum(sizes) < _PAGE_BYTES:
        return
    try:
        memory = mmap.mmap(-1, sum(sizes) + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        _LOG.info("no huge pages for %d MB of weights: %s", sum(sizes) >> 20, error)
        return
    place = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE_BYTES
    for one, size in zip(moved, sizes, strict=True):
        # Each has a storage of its own, which keeps the memory alive.
        there = torch.frombuffer(memory, dtype=one.dtype, count=one.numel(), offset=place).view(one.shape)
        one.data = there.copy_(one)
        place += size


def _is_movable(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
