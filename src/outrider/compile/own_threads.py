"""Number of threads for the operations of one thread.

``torch.set_num_threads`` is for the process: a thread adopts the number when it first uses torch, and keeps it. The
libraries below (OpenMP, and MKL where torch has it) also have a number for each thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch


@contextmanager
def num_threads_here(number: int) -> Iterator[None]:
    """Run the operations of this thread on ``number`` threads. Without OpenMP the number stays as it is."""
    openmp, mkl = _setters()
    with ExitStack() as stack:
        if openmp is not None:
            stack.callback(openmp, torch.get_num_threads())
            openmp(number)
        if mkl is not None:
            stack.callback(mkl, mkl(number))  # returns the previous number; 0 is that of the process
        yield


@cache
def _setters() -> tuple[Any, Any]:
    """Setters of the libraries that torch is linked to; None for a missing one."""
    names = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        library = ctypes.CDLL(str(path))
        return getattr(library, names[0], None), getattr(library, names[1], None)
    return None, None
