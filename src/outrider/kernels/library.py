"""The C++ kernels as functions of tensors.

The library came with the wheel, or was compiled when the package was installed; or it is compiled for this processor
when first needed, and cached on disk under a hash of its sources, the compiler and the level of vectors (build.py).
"""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.build import (
    CompilerError,
    Level,
    best_level,
    build,
    checksum,
    compiler,
    installed_path,
    levels_here,
)
from outrider.kernels.structures import layout
from outrider.system.files import alone, cache_folder
from outrider.system.private import PrivateFolder

_LOG = logging.getLogger(__name__)
_MOST_BYTES = 2**24  # on disk
_NO_MEMORY = 2  # of status.h
_OTHER_OPENMP = "it needs another OpenMP than PyTorch's: set CXX=g++"
# By the type: numbers in ggml, as those of blocks (blocks.py).
WEIGHT_TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 24, torch.bfloat16: 30}
_FUNCTIONS = {  # what each returns; its arguments: a number (n), numbers of a type (_DTYPES), or another pointer (p)
    "few_row_matmul": ("status", "pnnppnnnpn"),
    "copy_rows": ("bool", "pnn"),
    "dequantize_rows": ("bool", "pnnnpnpn"),
    "separate_rows": ("bool", "pnnnpnpn"),
    "forward": ("status", "ppn"),
    "forward_bytes": ("status", "pnp"),
    "candidates": ("status", "psnnnnlflffb"),
    "one_hot": ("", "pln"),
    "draw": ("", "plndlll"),
    "verify": ("status", "pnnnlllldnlllld"),
}
# Strided float32 (s), and the rest contiguous.
_DTYPES = {"s": torch.float32, "f": torch.float32, "d": torch.float64, "l": torch.int64, "b": torch.bool}


def check(is_so: bool, what: str) -> None:
    """Raises TypeError: an argument is not what the library takes, which would read or write beyond it. (An assertion
    would be gone under ``python -O``.)"""
    if not is_so:
        raise TypeError(f"the native library takes {what}")


def few_row_matmul(x: Tensor, weight: Tensor, weight_type: int, num_threads: int, num_digits: int = 0) -> Tensor:
    """Products of few rows (float32 [T, I]) with a matrix, which is read once: of a dtype in WEIGHT_TYPES [O, I]; or
    bytes of blocks, interleaved [O, bytes of a row], with the number of their type (blocks.py). For products with
    blocks, rows are rounded to integers of ``num_digits``; 0 for float32. Accumulated in float32. [T, O]"""
    y = x.new_empty(x.shape[0], weight.shape[0])
    x, weight = x.contiguous(), weight.contiguous()  # named, so that copies outlive the call
    kernel = library()
    assert kernel is not None
    check(x.dtype == torch.float32 and num_digits in (0, 1, 2), "rows in float32, of at most two digits")
    plain = WEIGHT_TYPES.get(weight.dtype)  # None for blocks
    check(not num_digits or plain is None, "digits for matrices in blocks alone")
    check(weight_type not in WEIGHT_TYPES.values() if plain is None else weight_type == plain, "the type of the matrix")
    check(plain is None or x.shape[1] == weight.shape[1], "rows as wide as the matrix")
    pointer, number = ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(len(weight))  # of the only matrix
    kernel.outrider_few_row_matmul(
        x.data_ptr(), *x.shape, byref(pointer), byref(number), 1, weight_type, num_digits, y.data_ptr(), num_threads
    )
    return y


def dequantize_rows(matrix: Tensor, rows: Tensor, weight_type: int, width: int, num_threads: int) -> Tensor:
    """Numbers of some rows (int64 [N]) of a matrix in blocks of a type (blocks.py), which is bytes, interleaved [O,
    bytes of a row], for I numbers of a row. float32 [N, I]. Raises IndexError: a row is not there."""
    kernel, stored, places = library(), matrix.cpu().contiguous(), rows.cpu().contiguous()
    assert kernel is not None
    check(stored.dtype == torch.uint8 and places.dtype == torch.int64, "bytes, and rows in int64")
    wide = torch.empty(len(places), width)
    chosen = places.data_ptr(), len(places), wide.data_ptr()
    if not kernel.outrider_dequantize_rows(stored.data_ptr(), weight_type, len(stored), width, *chosen, num_threads):
        raise IndexError(f"the matrix has {len(stored)} rows, and not all of those asked for")
    return wide.to(matrix.device)


def separate(matrix: Tensor, rows: Tensor, weight_type: int, width: int, num_threads: int) -> Tensor:
    """Some rows of a matrix in blocks, in the checkpoint's layout. The arguments and errors are those of
    ``dequantize_rows``. uint8 [N, bytes of a row]"""
    kernel, places = library(), rows.cpu().contiguous()
    assert kernel is not None
    check(matrix.dtype == torch.uint8 and matrix.device.type == "cpu", "bytes on the CPU")
    check(matrix.is_contiguous() and places.dtype == torch.int64, "contiguous bytes, and rows in int64")
    result = matrix.new_empty(len(places), matrix.shape[1])
    chosen = places.data_ptr(), len(places), result.data_ptr()
    if not kernel.outrider_separate_rows(matrix.data_ptr(), weight_type, len(matrix), width, *chosen, num_threads):
        raise IndexError(f"the matrix has {len(matrix)} rows, and not all of those asked for")
    return result


def call(name: str, pointer: Any, *arguments: Tensor | int | None) -> None:
    """Call a function whose first argument is another pointer. The arguments outlive the call."""
    given: list[Any] = [pointer]
    for one, kind in zip(arguments, _FUNCTIONS[name][1][1:], strict=True):
        if not isinstance(one, Tensor):
            given.append(one)
            continue
        check(one.dtype == _DTYPES.get(kind) and (kind == "s" or one.is_contiguous()), "arguments as declared")
        given.append(one.data_ptr())
    getattr(library(), f"outrider_{name}")(*given)


@lru_cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be compiled or loaded: no compiler, no folder that allows
    executables, or an OpenMP besides PyTorch's."""
    try:
        return _library()
    except (CompilerError, OSError) as error:
        _LOG.warning(
            "the C++ kernels cannot be used (%s): models run in PyTorch alone, several times slower where weights are "
            "quantized or in bfloat16",
            error,
        )
        return None


def _library() -> ctypes.CDLL:
    best, *others = levels_here()
    if (kernels := _installed(best)) is not None:
        return kernels
    try:
        command = compiler()
        # The level is perhaps less than the processor has, as when the package was installed.
        level, predefined = best_level(command)
        return _installed(level) or _compile(command, level, predefined)
    except CompilerError:
        found = next(filter(None, map(_installed, others)), None)
        if found is None:
            raise
        return found


def _installed(level: Level) -> ctypes.CDLL | None:
    """The library for a level that was compiled with the package; None if there is none, or none that can be loaded."""
    path = installed_path(level)
    if not path.is_file():
        return None
    try:
        return _load(path)
    except OSError as error:  # a library that it needs is not here, for example
        _LOG.info("%s cannot be loaded: %s", path, error)
        return None


def _compile(command: Sequence[str], level: Level, predefined: str) -> ctypes.CDLL:
    name = checksum(level, *command, predefined)
    kernels = PrivateFolder(cache_folder("kernels"), _MOST_BYTES)
    wait = partial(_LOG.warning, "another process compiles the C++ kernels: waiting for it")
    # If several processes start together, the first compiles and the others wait.
    with alone(cache_folder("locks") / name, wait), tempfile.TemporaryDirectory() as folder:
        kept = kernels.read(name)
        if kept is not None:
            path = Path(folder) / f"kept-{name}.so"
            path.write_bytes(kept)
            try:
                return _load(path)
            except OSError as error:  # a library that it needs is gone, for example
                _LOG.warning("%s cannot be loaded (%s): compiling it again", kernels.path / name, error)
        path = Path(folder) / f"{name}.so"
        build(command, level, path)
        loaded = _load(path)
        kernels.keep(name, path.read_bytes())
        return loaded


def _share(function: str, user: str) -> None:
    """Let libraries that are loaded later find the one whose function this loaded library calls. PyTorch's OpenMP is
    its own alone in builds for Linux on ARM."""
    with suppress(OSError, AttributeError):  # not loaded: as on macOS, where all libraries see all others
        place = getattr(ctypes.CDLL(user, os.RTLD_NOLOAD), function)
        about = (ctypes.c_char_p * 4)()  # begins with the path
        if ctypes.CDLL(None).dladdr(place, about) and about[0] is not None:
            ctypes.CDLL(os.fsdecode(about[0]), ctypes.RTLD_GLOBAL)


def _load(path: Path) -> ctypes.CDLL:
    """Load the library. Raises OSError: the library cannot be loaded, its structures have other fields than ours, or
    its threads are not numbered (threads.cpp)."""
    _share("GOMP_parallel", "libtorch_cpu.so")
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError as error:
        if "__kmpc_" in str(error):  # undefined: the OpenMP functions that code by Clang calls
            raise OSError(_OTHER_OPENMP) from None
        raise
    if not kernels.outrider_threads_are_numbered():
        raise OSError(_OTHER_OPENMP)
    if [*(ctypes.c_int64 * len(own := layout())).in_dll(kernels, "outrider_layout")] != own:
        raise OSError("its structures are not those of its headers: set CXX=g++")
    for name, (returned, kinds) in _FUNCTIONS.items():
        function = getattr(kernels, f"outrider_{name}")
        function.argtypes = [ctypes.c_int64 if kind == "n" else ctypes.c_void_p for kind in kinds]
        function.restype = {"bool": ctypes.c_bool, "status": is_done}.get(returned)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_use_one_thread)
    return kernels


def is_done(status: int) -> bool:
    """Whether a function of the library is done; else a row was out of range (status.h). Raises MemoryError."""
    if status == _NO_MEMORY:
        raise MemoryError
    return bool(status)


def _use_one_thread() -> None:
    """After a fork OpenMP, PyTorch's as ours, counts on threads that the parent alone has: wait for none."""
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        _LOG.warning("this process was forked from one with threads, and uses one thread: start it by 'spawn' for more")
