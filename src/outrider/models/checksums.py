"""Checksums of weights."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from outrider.kernels.narrow_weight import NarrowWeight
from outrider.runtime.tensor_parts import stored_tensors, whole
from outrider.system.ranks import current_ranks


def weights_checksum(model: nn.Module) -> str:
    """SHA-256 of names, shapes, types and bytes of all weights.

    All processes of a job must call it. Weights that they share are gathered one by one. Quantized shares cannot be
    gathered; then it is the SHA-256 of the checksums of all processes.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        for stored in portable_tensors(whole(weight.detach())):
            # As bytes: NumPy does not support all of torch's types.
            digest.update(stored.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    checksums = current_ranks().of_all(digest.hexdigest())
    if len(set(checksums)) == 1:
        return checksums[0]
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


def portable_tensors(weight: Tensor, num_rows: int | None = None) -> list[Tensor]:
    """Tensors with the bytes of a weight, the same on all processors. (In memory, as many rows of blocks are
    interleaved as the processor's vectors have lanes.)

    Args:
        num_rows: about so many rows of a weight in blocks, evenly spaced; None for all.
    """
    if not isinstance(weight, NarrowWeight) or weight.blocks is None:
        return stored_tensors(weight)
    step = 1 if num_rows is None else max(1, len(weight) // num_rows)
    rows = weight.stored_rows(torch.arange(0, len(weight), step))
    return [rows] if weight.order is None else [rows, weight.order]
