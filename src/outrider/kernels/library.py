"""The C++ kernels as operators: compiled for this processor when first needed.

Programs compiled ahead of time call them by name in the library, which is loaded for the whole process. The library is
cached on disk, under a hash of its source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from outrider.errors import CompileError
from outrider.kernels.toolchain import compiler, processor
from outrider.system.file_lock import alone
from outrider.system.files import cache_folder
from outrider.system.private import PrivateFolder

_LOG = logging.getLogger(__name__)
_NAMES = (
    *("few_row_matmul.cpp", "float_products.cpp", "rounded_products.cpp", "widen_blocks.cpp", "attention.cpp"),
    *("threads.cpp", "block_matmul.h", "blocks.h", "float_rows.h", "int8_tiles.h", "interleaved.h", "rounded_rows.h"),
    *("vectors.h", "weight_chunks.h"),
)
SOURCES = [Path(__file__).with_name(name) for name in _NAMES]
# The sources write fused multiply-adds explicitly (vectors.h). No others are contracted, whatever Inductor allows:
# no result depends on the compiler. The order of floating-point exceptions need not be kept.
FLAGS = ("-ffp-contract=off", "-fno-trapping-math")
_MOST_BYTES = 2**24  # on disk
# Declarations for compiled programs.
SHIM = (
    "AOTITorchError aoti_torch_cpu_few_row_matmul(AtenTensorHandle x, const AtenTensorHandle* weights, "
    "int64_t num_weights, int64_t form, int64_t num_threads, AtenTensorHandle* result)"
)
WIDEN_SHIM = (
    "AOTITorchError aoti_torch_cpu_widen_rows(AtenTensorHandle matrix, AtenTensorHandle rows, int64_t form, "
    "int64_t width, int64_t num_threads, AtenTensorHandle* result)"
)
FORMS = {torch.float32: 0, torch.int8: 24, torch.bfloat16: 30}  # numbers in ggml, as those of blocks (blocks.py)
WEIGHT_DTYPES = tuple(FORMS)


@torch.library.custom_op("outrider::few_row_matmul", mutates_args=())
def few_row_matmul(x: Tensor, weights: Sequence[Tensor], form: int, num_threads: int) -> Tensor:
    """Products of the same few rows with several matrices, concatenated; each matrix is read once.

    Args:
        x: float32. [T, I]
        weights: of one type among WEIGHT_DTYPES, or bytes of blocks of one form, interleaved. [O, I] each; [O, bytes of
            a row]
        form: one of FORMS, or that of products with the blocks (blocks.py).

    Returns:
        float32, accumulated in float32. [T, sum of O]
    """
    y = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))
    x, weights = x.contiguous(), [weight.contiguous() for weight in weights]  # named, so that copies outlive the call
    into(y, x, weights, form, num_threads)()
    return y


def into(y: Tensor, x: Tensor, weights: Sequence[Tensor], form: int, num_threads: int) -> Callable[[], None]:
    """Kernel call that writes these products to ``y``. All tensors are contiguous and must outlive it."""
    kernel = library()
    assert kernel is not None and x.dtype == torch.float32
    assert form == FORMS.get(weights[0].dtype, form) and (form in FORMS.values()) == (weights[0].dtype in FORMS)
    return partial(
        kernel.outrider_few_row_matmul,
        ctypes.c_void_p(x.data_ptr()),
        *map(ctypes.c_int64, x.shape),
        (ctypes.c_void_p * len(weights))(*(weight.data_ptr() for weight in weights)),
        (ctypes.c_int64 * len(weights))(*(weight.shape[0] for weight in weights)),
        ctypes.c_int64(len(weights)),
        ctypes.c_int64(form),
        ctypes.c_void_p(y.data_ptr()),
        ctypes.c_int64(num_threads),
    )


@few_row_matmul.register_fake
def _(x: Tensor, weights: Sequence[Tensor], form: int, num_threads: int) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))


@torch.library.custom_op("outrider::widen_rows", mutates_args=())
def widen_rows(matrix: Tensor, rows: Tensor, form: int, width: int, num_threads: int) -> Tensor:
    """Numbers of some rows of a matrix in blocks.

    Args:
        matrix: bytes, interleaved. [O, bytes of a row]
        rows: int64 [N]
        form: of the blocks (blocks.py).
        width: I, numbers of a row.

    Returns:
        float32. [N, I]

    Raises:
        IndexError: a row is not there.
    """
    kernel, stored, places = library(), matrix.cpu().contiguous(), rows.cpu().contiguous()
    assert kernel is not None and stored.dtype == torch.uint8 and places.dtype == torch.int64
    wide = torch.empty(len(places), width)
    _write_rows(kernel.outrider_widen_rows, stored, places, form, width, num_threads, wide)
    return wide.to(matrix.device)


@widen_rows.register_fake
def _(matrix: Tensor, rows: Tensor, form: int, width: int, num_threads: int) -> Tensor:
    return matrix.new_empty(rows.shape[0], width, dtype=torch.float32)


def interleaved(matrix: Tensor, form: int, width: int, num_threads: int, result: Tensor) -> Tensor:
    """Interleave the rows of a matrix in blocks (interleaved.h), to ``result``. The other arguments are those of
    ``widen_rows``. [O, bytes of a row]"""
    kernel, matrix = library(), matrix.contiguous()
    assert kernel is not None and matrix.dtype == torch.uint8 and matrix.device.type == "cpu"
    assert result.shape == matrix.shape and result.dtype == matrix.dtype and result.is_contiguous()
    kernel.outrider_interleave(
        ctypes.c_void_p(matrix.data_ptr()),
        ctypes.c_int64(form),
        *map(ctypes.c_int64, (len(matrix), width)),
        ctypes.c_void_p(result.data_ptr()),
        ctypes.c_int64(num_threads),
    )
    return result


def separated(matrix: Tensor, rows: Tensor, form: int, width: int, num_threads: int) -> Tensor:
    """Some rows of a matrix in blocks, in the checkpoint's layout. The arguments and errors are those of
    ``widen_rows``. uint8 [N, bytes of a row]"""
    kernel, places = library(), rows.cpu().contiguous()
    assert kernel is not None and matrix.dtype == torch.uint8 and matrix.device.type == "cpu"
    assert matrix.is_contiguous() and places.dtype == torch.int64
    result = matrix.new_empty(len(places), matrix.shape[1])
    _write_rows(kernel.outrider_separate_rows, matrix, places, form, width, num_threads, result)
    return result


def _write_rows(
    kernel: Any, matrix: Tensor, rows: Tensor, form: int, width: int, num_threads: int, result: Tensor
) -> None:
    """Let a kernel write some rows of a matrix to ``result``. All tensors are contiguous, and on the CPU."""
    are_there = kernel(
        ctypes.c_void_p(matrix.data_ptr()),
        ctypes.c_int64(form),
        *map(ctypes.c_int64, (len(matrix), width)),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(result.data_ptr()),
        ctypes.c_int64(num_threads),
    )
    if not are_there:
        raise IndexError(f"the matrix has {len(matrix)} rows, and not all of those asked for")


@lru_cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, loaded so that programs find their symbols; None where they cannot be compiled: no
    compiler, or no folder that allows executables."""
    try:
        return _library()
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        _LOG.warning("the kernels for few rows cannot be compiled: %s", str(error).splitlines()[-1])
        return None


def check_threads(num_threads: int) -> None:
    """Load the kernels for programs with ``num_threads`` threads.

    Raises:
        CompileError: sums by such programs would be wrong here (threads.cpp).
    """
    kernels = library()
    if num_threads > 1 and kernels is not None and not kernels.outrider_threads_are_numbered():
        command, *_ = compiler()
        raise CompileError(
            f"with several threads its sums would be wrong, since {command} links another OpenMP than PyTorch's: "
            "set CXX=g++, or OMP_NUM_THREADS=1"
        )


def _library() -> ctypes.CDLL:
    sources = [path.read_bytes() for path in SOURCES]
    name = hashlib.sha256(repr((torch.__version__, processor(), compiler(), FLAGS, sources)).encode()).hexdigest()
    kernels = PrivateFolder(cache_folder("kernels"), _MOST_BYTES)
    # If several processes start together, the first compiles and the others wait.
    with alone(cache_folder("locks") / name), tempfile.TemporaryDirectory() as folder:
        kept = kernels.read(name)
        if kept is not None:
            path = Path(folder) / f"kept-{name}.so"
            path.write_bytes(kept)
            try:
                return _loaded(path)
            except OSError as error:  # a library that it needs is gone, for example
                _LOG.warning("%s cannot be loaded (%s): compiling it again", kernels.path / name, error)
        path = Path(folder) / f"{name}.so"
        _compile(path)
        loaded = _loaded(path)
        kernels.keep(name, path.read_bytes())
        return loaded


def _loaded(path: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    kernels.outrider_widen_rows.restype = kernels.outrider_separate_rows.restype = ctypes.c_bool
    return kernels


def _compile(path: Path) -> None:
    _LOG.info("compiling the kernels for few rows")
    of_objects: Any = CppTorchOptions(vec_isa=pick_vec_isa(), extra_flags=FLAGS, compile_only=True)
    sources = [source for source in SOURCES if source.suffix == ".cpp"]
    builders = [CppBuilder(source.stem, str(source), of_objects, str(path.parent)) for source in sources]
    with ThreadPoolExecutor(len(builders)) as threads:
        list(threads.map(CppBuilder.build, builders))
    options: Any = CppTorchOptions(vec_isa=pick_vec_isa(), extra_flags=FLAGS)
    objects = [one.get_target_file_path() for one in builders]
    CppBuilder(path.stem, objects, options, str(path.parent)).build()
