"""Weights on the CPU in huge pages.

A forward of few rows reads all weights once. With pages of 4 KB the processor translates an address every 64 cache
lines, with pages of 2 MB every 32,768. On a virtual machine, which translates twice, this costs up to a tenth of a
round, and more where memory limits rounds (docs/internals/log/2026.md).
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.runtime.tensor_parts import stored_tensors

_LOG = logging.getLogger(__name__)
_PAGE_BYTES = 2 * 2**20
_ALIGNED_BYTES = 64  # a cache line
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def are_there() -> bool:
    """Whether this system gives huge pages on request (madvise)."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


@torch.no_grad()
def move_weights(model: nn.Module, others: Sequence[Tensor] = ()) -> None:
    """Move the weights of a model on the CPU to huge pages, one by one, so that at most one is in memory twice.
    Tensors that share memory with others stay.

    Args:
        others: weights that it shares with other models, which stay too.
    """
    stay = set(map(id, others))
    weights = [one for one in (*model.parameters(), *model.buffers()) if id(one) not in stay]
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
        # Each gets its own storage, which keeps the memory alive.
        there = torch.frombuffer(memory, dtype=one.dtype, count=one.numel(), offset=place).view(one.shape)
        one.data = there.copy_(one)
        place += size


def _is_movable(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
