"""Copies of weights from files to memory, on all threads: those in blocks are interleaved (interleaved.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.library import WEIGHT_TYPES, check, library
from outrider.kernels.structures import native


class RowCopy(NamedTuple):
    """Rows of a matrix as files have them, and the matrix to which they are copied."""

    rows: Tensor  # of a type in WEIGHT_TYPES [N, I]; or bytes of blocks, uint8 [N, bytes of a row]
    weight_type: int  # of WEIGHT_TYPES, or of the blocks (blocks.py)
    matrix: Tensor  # [O, I] or [O, bytes of a row]
    places: Tensor | None = None  # row of the matrix for each row, int64 [N]; None for the same


def copy_rows(copies: Sequence[RowCopy], num_threads: int) -> None:
    """Copy all, in this order. Raises IndexError: a matrix does not have a row."""
    kernel = library()
    assert kernel is not None
    structure = native().RowCopy
    given = (structure * len(copies))()
    for one, (rows, weight_type, matrix, places) in zip(given, copies, strict=True):
        for tensor in (rows, matrix):
            check(tensor.device.type == "cpu" and tensor.is_contiguous(), "contiguous tensors on the CPU")
            in_blocks = weight_type not in WEIGHT_TYPES.values()
            is_of_type = tensor.dtype == torch.uint8 if in_blocks else WEIGHT_TYPES.get(tensor.dtype) == weight_type
            check(is_of_type, "tensors of the type")
        check(rows.ndim == matrix.ndim == 2 and rows.shape[1:] == matrix.shape[1:], "rows as wide as the matrix")
        if places is None:
            check(len(rows) <= len(matrix), "no more rows than the matrix has")
        else:
            check(places.dtype == torch.int64 and places.is_contiguous() and len(places) == len(rows), "all places")
        one.source, one.matrix = rows.data_ptr(), matrix.data_ptr()
        one.places = None if places is None else places.data_ptr()
        one.type, one.num_rows, one.num_channels = weight_type, len(rows), len(matrix)
        one.row_bytes = rows.shape[1] * rows.itemsize
    if not kernel.outrider_copy_rows(ctypes.byref(given), len(copies), num_threads):
        raise IndexError("a matrix does not have all rows that are to be copied to it")


class BackgroundCopies:
    """Copies that other threads make, from now on: their matrices must not be read before ``wait`` has returned."""

    def __init__(self, copies: Sequence[RowCopy]) -> None:
        executor = ThreadPoolExecutor(1, "copies of weights")
        self._done = executor.submit(copy_rows, copies, torch.get_num_threads())
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the last one. Raises the error of one that cannot be made."""
        self._done.result()
