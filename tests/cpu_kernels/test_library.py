"""The library of kernels: compiled once, for this processor, by the compiler that is there."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.kernels import build as kernel_build
from outrider.kernels import library as kernel_library
from outrider.kernels.build import SOURCES, compiler, installed_path, levels_here
from outrider.kernels.library import WEIGHT_TYPES, few_row_matmul
from outrider.kernels.structures import layout
from outrider.system.files import cache_folder
from outrider.system.private import PrivateFolder

_load = kernel_library.library.__wrapped__


def _fail(*_: object) -> None:
    raise AssertionError("it is there already")


@pytest.fixture(scope="module")
def compiled() -> bytes:
    path = installed_path(levels_here()[0])
    if not path.is_file():
        kept = max(cache_folder("kernels").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return kept.read_bytes()[32:]  # after its checksum
    return path.read_bytes()


@pytest.fixture(autouse=True)
def nothing_is_there(compiled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed or cached, and compiling takes no minute."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_build, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(kernel_library, "build", lambda command, level, path: path.write_bytes(compiled))


def test_an_installed_library_needs_no_compiler(
    compiled: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_build.INSTALLED.mkdir()
    (kernel_build.INSTALLED / "older.so").touch()
    monkeypatch.setattr(kernel_build, "build", lambda command, level, path: path.write_bytes(compiled))
    path = kernel_build.install()
    assert [*kernel_build.INSTALLED.iterdir()] == [path] and path.read_bytes() == compiled
    monkeypatch.setattr(kernel_build, "build", _fail)
    assert kernel_build.install() == path
    monkeypatch.setattr(kernel_library, "build", _fail)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert _load() is not None
    assert not caplog.text


def test_an_installed_library_that_cannot_be_loaded_is_compiled_anew(caplog: pytest.LogCaptureFixture) -> None:
    kernel_build.INSTALLED.mkdir()
    installed_path(levels_here()[0]).write_bytes(b"no library")
    caplog.set_level("INFO")
    assert _load() is not None and "cannot be loaded" in caplog.text


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no no-such-compiler: install g++, or set CXX"),
        ("#!/bin/sh\necho 'this.cpp:1: error: out of memory' >&2\nexit 1\n", "this.cpp:1: error: out of memory"),
        # It knows all levels, and compiles nothing.
        ("#!/bin/sh\ncase \"$*\" in *-dM*) exit 0;; esac\necho 'internal compiler error' >&2\nexit 4\n", "internal"),
    ],
)
def test_library_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str | None, reason: str
) -> None:
    monkeypatch.setattr(kernel_library, "build", kernel_build.build)
    monkeypatch.setenv("CXX", "no-such-compiler")
    if script is not None:
        (tmp_path / "c++").write_text(script)
        (tmp_path / "c++").chmod(0o700)
        monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    assert _load() is None
    assert reason in caplog.text and "PyTorch alone, several times slower" in caplog.text


def test_library_with_other_structures_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What the headers say is compared to the compiler's sizes. Or the system refuses to load, as with ``noexec``."""

    def refuse(path: str, *_: object) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    number, *numbers = layout()
    assert number == len(numbers) > 150
    with monkeypatch.context() as patch:
        patch.setattr(kernel_library, "layout", lambda: [number, *numbers[:-1], numbers[-1] + 8])
        assert _load() is None
    assert "its structures are not those of its headers" in caplog.text
    assert _load() is not None
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert _load() is None
    assert "failed to map segment" in caplog.text and "several times slower" in caplog.text


_of_linux = pytest.mark.skipif(sys.platform == "darwin", reason="macOS has one OpenMP, and its linker other options")


@_of_linux
def test_another_openmp_is_refused(tmp_path: Path) -> None:
    """As in code by Clang beside GCC's OpenMP: all threads have the number 0."""
    (tmp_path / "another.cpp").write_text('extern "C" int omp_get_thread_num() { return 0; }')
    (threads,) = (path for path in SOURCES if path.name == "threads.cpp")
    flags = ["-shared", "-fPIC", "-fopenmp", "-Wl,-Bsymbolic", "-o", str(tmp_path / "threads.so")]
    subprocess.run([*compiler(), str(threads), str(tmp_path / "another.cpp"), *flags], check=True)
    with pytest.raises(OSError, match="another OpenMP than PyTorch's: set CXX=g\\+\\+$"):
        kernel_library._load(tmp_path / "threads.so")


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_kernel_that_cannot_be_loaded_is_compiled_again(
    compiled: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_damaged: bool
) -> None:
    """A damaged one would end the process. No OpenMP is linked: a second one, or none, as in wheels."""
    assert b"omp.so" not in compiled and b"omp.dylib" not in compiled
    assert _load() is not None
    with monkeypatch.context() as patch:
        patch.setattr(kernel_library, "build", _fail)
        assert _load() is not None and not caplog.text
    (file,) = cache_folder("kernels").iterdir()
    if is_damaged:
        whole, fifth = file.read_bytes(), len(compiled) // 5
        file.write_bytes(whole[: 2 * fifth] + bytes(fifth) + whole[3 * fifth :])
    else:
        PrivateFolder(file.parent, 2**30).keep(file.name, b"no library")
    again = _load()
    assert again is not None and ("is damaged" if is_damaged else "cannot be loaded") in caplog.text
    monkeypatch.setattr(kernel_library, "library", lambda: again)
    x, weights = torch.randn(3, 40), torch.randn(9, 40)
    assert torch.allclose(few_row_matmul(x, weights, WEIGHT_TYPES[torch.float32], 2), x @ weights.T, atol=1e-4)
    assert file.read_bytes()[32:] == compiled  # after its checksum


_ZEN_3 = "avx2 fma f16c bmi1 bmi2 movbe abm sse4_2"
_ZEN_4 = f"{_ZEN_3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"


@pytest.mark.parametrize(
    ("machine", "features", "capability", "sums", "want"),
    [
        ("x86_64", "sse4_2 avx", "", "fast", "baseline-fast baseline"),  # asked for, and of the baseline alone
        ("x86_64", _ZEN_3, "", "fast", "avx2 baseline-fast baseline"),
        ("x86_64", _ZEN_4, "avx2", "", "avx2 baseline"),
        ("x86_64", _ZEN_4, "", "", "avx512-vnni avx512 avx2 baseline"),
        ("arm64", "fp asimd asimddp", "", "", "dotprod baseline"),
        ("riscv64", _ZEN_4, "", "", "baseline"),
        # Where the system lists no features, as on macOS and Windows, PyTorch tells.
        ("AMD64", None, "AVX512", "", "avx512 avx2 baseline"),
        ("x86_64", None, "DEFAULT", "", "baseline"),
        ("arm64", None, "DEFAULT", "", "dotprod baseline"),
    ],
)
def test_levels_of_processors(
    machine: str, features: Any, capability: str, sums: str, want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "" if features is None else capability)
    monkeypatch.setenv("OUTRIDER_SUMS", sums)
    monkeypatch.setattr(kernel_build, "_PROCESSORS", tmp_path / "none")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert [level.name for level in levels_here(features and set(features.split()))] == want.split()
    monkeypatch.setenv("OUTRIDER_SUMS", "Fast")
    with pytest.raises(kernel_build.CompilerError, match="OUTRIDER_SUMS is 'Fast': set fast"):
        levels_here()
