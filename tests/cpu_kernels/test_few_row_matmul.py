"""Products of few rows: the kernel against float64, and the graphs that call it. (Compiled, in test_compiled.py.)"""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from outrider.errors import CompileError
from outrider.kernels import library as kernel_library
from outrider.kernels.inductor_pass import MAX_KERNEL_ROWS, FewRowMatmulPass
from outrider.kernels.library import FORMS, WEIGHT_DTYPES, few_row_matmul
from outrider.system.files import cache_folder
from outrider.system.private import PrivateFolder

_EPSILON = 2.0**-24  # of float32, rounding to nearest


def _weights(number: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    numbers = torch.randn(number, width, generator=torch.Generator().manual_seed(seed))
    return (40.0 * numbers).clamp(-127, 127).to(dtype)


@given(
    num_rows=st.integers(1, MAX_KERNEL_ROWS + 3),
    width=st.integers(1, 150),
    channels=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    dtype=st.sampled_from(WEIGHT_DTYPES),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_against_float64(
    num_rows: int, width: int, channels: list[int], dtype: torch.dtype, num_threads: int, seed: int
) -> None:
    """Within the bound of a sum in any order; and each row as if it were alone, to the bit."""
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    weights = [_weights(number, width, dtype, seed + i) for i, number in enumerate(channels)]
    got = few_row_matmul(x, weights, FORMS[dtype], num_threads)
    matrix = torch.cat(weights).double()
    bound = 1.01 * width * _EPSILON * (x.double().abs() @ matrix.abs().T)
    assert ((got.double() - x.double() @ matrix.T).abs() <= bound).all()
    for t in range(num_rows):
        assert torch.equal(few_row_matmul(x[t : t + 1], weights, FORMS[dtype], 1)[0], got[t])


@given(
    num_rows=st.integers(1, 20),
    width=st.integers(1, 150),
    dtype=st.sampled_from(WEIGHT_DTYPES),
    outlier=st.sampled_from([0.0, 1e-38, 1e-20, 1e4, 1e12, 1e30]),
    seed=st.integers(0, 2**31),
)
def test_rows_with_one_number_far_above_the_others(
    num_rows: int, width: int, dtype: torch.dtype, outlier: float, seed: int
) -> None:
    """Within the bounds of docs/internals/numerics.md, of which one is that of tiles."""
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * min(1.0, outlier)
    x[:, seed % width] = outlier
    weights = _weights(33, width, dtype, seed)
    weights[:, seed % width] *= seed % 2  # what is far above may count for nothing
    got, want = few_row_matmul(x, [weights], FORMS[dtype], 2).double(), x.double() @ weights.double().T
    _, exponents = x.abs().amax(dim=1, keepdim=True).frexp()
    of_tiles = (
        weights.double().abs().sum(dim=1) * 2.0 ** (exponents.clamp_min(-90) - 31.0).double() + _EPSILON * want.abs()
    )
    bound = 1.01 * width * _EPSILON * (x.double().abs() @ weights.double().abs().T)
    is_by_tiles = dtype == torch.int8  # on some processors
    assert ((got - want).abs() <= torch.maximum(bound, of_tiles * is_by_tiles) + 2.0**-149).all()


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_numbers_that_are_not_next_to_one_another(dtype: torch.dtype) -> None:
    """Are copied; the copies live until the products are formed."""
    x, weights = torch.randn(3000, 5), [_weights(2000, 301, dtype, seed) for seed in (1, 2)]
    got = few_row_matmul(x.T[:, ::2][:, :301], [weight[::3] for weight in weights], FORMS[dtype], 1)
    want = few_row_matmul(x.T[:, ::2][:, :301].clone(), [weight[::3].clone() for weight in weights], FORMS[dtype], 1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_rows_that_are_not_finite_stay_alone(dtype: torch.dtype) -> None:
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    weights = [_weights(9, 37, dtype, 1)]
    want = few_row_matmul(x, weights, FORMS[dtype], 1)
    x[1], x[3, 36] = torch.nan, torch.inf
    got = few_row_matmul(x, weights, FORMS[dtype], 1)
    assert torch.equal(got[[0, 2, 4]], want[[0, 2, 4]])
    assert not got[1].isfinite().any() and not got[3].isfinite().any()


def test_the_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Kept on disk; and where it cannot be compiled, there is none."""
    assert kernel_library.library() is not None

    def fail(path: object) -> None:
        raise kernel_library.CppCompileError(["g++"], "no vectors")

    monkeypatch.setattr(kernel_library, "_compile", fail)
    assert kernel_library.library.__wrapped__() is not None
    monkeypatch.setattr(kernel_library, "compiler", lambda: ("another", "compiler", None))
    assert kernel_library.library.__wrapped__() is None
    assert "cannot be compiled" in caplog.text


def test_machines_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And those where what is compiled cannot be run."""
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert kernel_library.library.__wrapped__() is None
    assert "No working C++ compiler found" in caplog.text
    monkeypatch.setattr(kernel_library, "compiler", lambda: ("another", "compiler", None))
    monkeypatch.setattr(kernel_library, "_compile", lambda path: path.write_bytes(b"no library"))
    assert kernel_library.library.__wrapped__() is None


def test_threads_that_another_library_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in code by Clang: all have the number 0. Programs of a single thread are right."""
    command, *_ = kernel_library.compiler()
    if "clang" not in command:
        kernel_library.check_threads(2)
    (tmp_path / "another.cpp").write_text('extern "C" int omp_get_thread_num() { return 0; }')
    (threads,) = (path for path in kernel_library.SOURCES if path.name == "threads.cpp")
    flags = ["-shared", "-fPIC", "-fopenmp", "-Wl,-Bsymbolic", "-o", str(tmp_path / "threads.so")]
    subprocess.run([command, str(threads), str(tmp_path / "another.cpp"), *flags], check=True)
    monkeypatch.setattr(kernel_library, "library", lambda: ctypes.CDLL(str(tmp_path / "threads.so")))
    kernel_library.check_threads(1)
    with pytest.raises(CompileError, match="set CXX=g\\+\\+, or OMP_NUM_THREADS=1$"):
        kernel_library.check_threads(2)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux")
def test_checking_threads_leaves_none_behind() -> None:
    """With a second team of threads in the process, those of GCC's OpenMP sleep where they would wait."""
    program = """if True:
        import os, threading, time
        from outrider.kernels.library import library
        def check():
            before = len(os.listdir("/proc/self/task"))
            library().outrider_threads_are_numbered()
            until = time.monotonic() + 20  # they end beside us
            while (left := len(os.listdir("/proc/self/task")) - before) and time.monotonic() < until:
                time.sleep(0.01)
            print(left)
        assert library() is not None
        asking = threading.Thread(target=check)
        asking.start()
        asking.join()
    """
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_kernel_that_cannot_be_loaded_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_damaged: bool
) -> None:
    """A damaged one would end the process; another may need a library that has gone."""
    assert kernel_library.library.__wrapped__() is not None
    kept = max(cache_folder("kernels").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    folder = PrivateFolder(kept.parent, 2**30)
    library = folder.read(kept.name)
    assert library is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_library, "_compile", lambda path: path.write_bytes(library))  # without its seconds
    caplog.clear()  # the first call may have compiled
    assert kernel_library.library.__wrapped__() is not None and not caplog.text
    (file,) = cache_folder("kernels").iterdir()
    if is_damaged:
        whole, fifth = file.read_bytes(), len(library) // 5
        file.write_bytes(whole[: 2 * fifth] + bytes(fifth) + whole[3 * fifth :])
    else:
        PrivateFolder(file.parent, 2**30).keep(file.name, b"no library")
    again = kernel_library.library.__wrapped__()
    assert again is not None and ("is damaged" if is_damaged else "cannot be loaded") in caplog.text
    monkeypatch.setattr(kernel_library, "library", lambda: again)
    x, weights = torch.randn(3, 40), torch.randn(9, 40)
    assert torch.allclose(few_row_matmul(x, [weights], FORMS[torch.float32], 2), x @ weights.T, atol=1e-4)
    assert file.read_bytes()[32:] == library  # after its checksum


def test_who_comes_second_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the processes of one job do, which start together."""
    assert kernel_library.library.__wrapped__() is not None
    file = max(cache_folder("kernels").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    kept = file.read_bytes()[32:]  # after its checksum
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: list[object] = []
    second = threading.Thread(target=lambda: found.append(kernel_library.library.__wrapped__()))
    compiled: list[Path] = []

    def compile_(path: Path) -> None:
        compiled.append(path)
        if len(compiled) == 1:
            second.start()
            second.join(0.5)  # it would compile, too, if it did not wait
        path.write_bytes(kept)

    monkeypatch.setattr(kernel_library, "_compile", compile_)
    assert kernel_library.library.__wrapped__() is not None
    second.join()
    assert len(compiled) == 1 and found[0] is not None


def _two_products(x: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.relu()
    return functional.linear(rows, first), functional.linear(rows, second, bias)


def _rewritten(
    num_threads: int | None, arguments: list[Tensor], function: Callable[..., Any] = _two_products
) -> tuple[Any, list[str]]:
    """A function after the pass, and the names of the operators in it."""
    traced = make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*arguments)
    FewRowMatmulPass(num_threads)(traced.graph)
    traced.recompile()
    return traced, [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]


def _arguments(num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    shapes = (num_rows, 24), (7, 24), (9, 24), (9,)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("num_rows", [1, 5, MAX_KERNEL_ROWS])
def test_products_of_the_same_rows_are_one_call(num_rows: int, dtype: torch.dtype, tolerance: float) -> None:
    arguments = _arguments(num_rows, dtype)
    traced, names = _rewritten(1, arguments)
    assert names.count("outrider.few_row_matmul.default") == 1
    assert not {"aten.mm.default", "aten.addmm.default"} & set(names)
    for got, want in zip(traced(*arguments), _two_products(*(one.double() for one in arguments)), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_weights_that_are_widened_are_read_as_they_are(dtype: torch.dtype) -> None:
    """Not so those that are narrowed, or transposed twice."""
    x, weight = _arguments(5, torch.float32)[0], _weights(7, 24, dtype, 0)
    traced, names = _rewritten(1, [x, weight], lambda x, weight: functional.linear(x, weight.float()))
    assert names.count("outrider.few_row_matmul.default") == 1
    torch.testing.assert_close(traced(x, weight).double(), x.double() @ weight.double().T, rtol=0.0, atol=1e-3)
    for other in (
        lambda x, weight: functional.linear(x.bfloat16(), weight.bfloat16()),
        lambda x, weight: torch.mm(x, weight.T.contiguous()),
    ):
        _, names = _rewritten(1, [x, weight.float()], other)
        assert "outrider.few_row_matmul.default" not in names


def test_a_bias_may_come_after_the_first_product() -> None:
    """The weights are read before it is there."""
    arguments = [one.bfloat16() for one in _arguments(5, torch.float32)]

    def widened(x: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.float()
        return functional.linear(rows, first.float()), functional.linear(rows, second.float(), bias.float())

    traced, names = _rewritten(1, arguments, widened)
    traced.graph.lint()
    assert names.count("outrider.few_row_matmul.default") == 1
    for got, want in zip(traced(*arguments), widened(*arguments), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "num_threads"),
    [(5, torch.float32, None), (5, torch.float64, 1), (MAX_KERNEL_ROWS + 1, torch.float32, 1)],
    ids=["no kernel", "no kernel for the type", "many rows"],
)
def test_other_products_do_without_the_kernel(num_rows: int, dtype: torch.dtype, num_threads: int | None) -> None:
    _, names = _rewritten(num_threads, _arguments(num_rows, dtype))
    assert "outrider.few_row_matmul.default" not in names
    assert ("aten.mm.default" in names) == (num_rows > MAX_KERNEL_ROWS)
