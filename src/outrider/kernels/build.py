"""Compiles the C++ kernels to one library, by whatever C++ compiler is there. It needs no header but the standard's.

This happens when the package is installed from its source, or a wheel built (hatch_build.py), so nothing here imports
PyTorch.

A library serves one level of vectors: a set of instructions, whatever the processor on which it was compiled.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from outrider.kernels.structures import HEADERS, layout_source

_LOG = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_PROCESSORS = Path("/proc/cpuinfo")
SOURCES = sorted(_HERE.glob("*.cpp"))
# The sources write fused multiply-adds explicitly (vectors.h), and no others are contracted: no result depends on the
# compiler. The order of floating-point exceptions need not be kept.
FLAGS = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-trapping-math")
# No OpenMP is linked: the library calls the one that PyTorch has loaded.
_IS_APPLE = sys.platform == "darwin"
_OPENMP = ("-Xclang", "-fopenmp") if _IS_APPLE else ("-fopenmp",)
_LINKED = ("-shared", "-undefined", "dynamic_lookup") if _IS_APPLE else ("-shared",)
# The libraries that came with the wheel, or the one that was compiled when the package was installed.
INSTALLED = _HERE / "installed"


class Level(NamedTuple):
    """Set of instructions."""

    name: str  # of the library
    flags: tuple[str, ...] = ()  # of the compiler
    features: frozenset[str] = frozenset()  # of the processor, as Linux names them


_AVX2 = frozenset("avx2 fma f16c bmi1 bmi2 movbe abm".split())
_AVX512 = _AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_V3, _V4, _VNNI = "-march=x86-64-v3", "-march=x86-64-v4", "-mavx512vnni"
_FAST_SUMS = "OUTRIDER_SUMS=fast"  # not a feature, but asked for
# Levels of each machine, best first.
LEVELS = {
    "x86_64": (
        Level("avx512-vnni", (_V4, _VNNI), _AVX512 | {"avx512_vnni"}),
        Level("avx512", (_V4,), _AVX512),
        Level("avx2-vnni", (_V3, "-mavxvnni"), _AVX2 | {"avx_vnni"}),
        Level("avx2", (_V3,), _AVX2),
        # The baseline emulates fused multiply-adds; without, float sums are faster, and have other bits than elsewhere.
        Level("baseline-fast", ("-DROUNDS_TWICE",), frozenset({_FAST_SUMS})),
    ),
    "aarch64": (Level("dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),),
}
BASELINE = Level("baseline")
_OTHER_NAMES = {"AMD64": "x86_64", "arm64": "aarch64"}
# What PyTorch's variable for its own kernels takes away: names that begin with this.
_WITHOUT = {"avx2": ("avx512",), "default": ("avx", "asimddp")}


def levels_here(features: Set[str] | None = None) -> list[Level]:
    """Levels that a processor with these features has, best first; None asks the system. ``ATEN_CPU_CAPABILITY``
    forbids some, as in PyTorch; ``OUTRIDER_SUMS=fast`` allows faster sums to the baseline; other levels need none.
    Raises CompilerError: OUTRIDER_SUMS is something else."""
    machine = platform.machine()
    without = _WITHOUT.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), ())
    found = {name for name in (_features() if features is None else features) if not name.startswith(without)}
    known = LEVELS.get(_OTHER_NAMES.get(machine, machine), ())
    sums = os.environ.get("OUTRIDER_SUMS", "")
    if sums not in ("", "fast"):
        raise CompilerError(f"OUTRIDER_SUMS is {sums!r}: set fast, or unset it")
    if sums:
        found.add(_FAST_SUMS)
    return [*(level for level in known if level.features <= found), BASELINE]


def _features() -> Set[str]:
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8").splitlines()
    except OSError:  # the system has no list: as far as PyTorch tells
        if platform.machine() == "arm64":  # Apple's processors all have these
            return {"asimddp"}
        import torch

        return {"AVX512": _AVX512, "AVX2": _AVX2}.get(torch.backends.cpu.get_cpu_capability(), frozenset())
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


class CompilerError(Exception):
    """There is no compiler, or it fails. The message is one line."""


def compiler() -> list[str]:
    """Command of the C++ compiler: that of the variable CXX, or the first that is there. Raises CompilerError."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [["g++"], ["clang++"]]:
        if shutil.which(command[0]) is not None:
            return command
    raise CompilerError(f"there is no {given[0] if given else 'C++ compiler'}: install g++, or set CXX")


def macros(command: Sequence[str], level: Level) -> str:
    """The compiler's predefined macros for a level: its version, and all that sources may ask for. Raises
    CompilerError: it does not know the level."""
    return _output([*command, *FLAGS, *level.flags, "-x", "c++", "-dM", "-E", os.devnull])


def machine(command: Sequence[str]) -> str:
    """Machine for which the compiler compiles, one of LEVELS. Raises CompilerError."""
    predefined = macros(command, BASELINE)
    for name in LEVELS:
        if f"#define __{name}__ 1" in predefined:
            return name
    raise CompilerError(f"{command[0]} compiles for none of {', '.join(LEVELS)}")


def best_level(command: Sequence[str]) -> tuple[Level, str]:
    """The best level that the processor has and the compiler knows, and the compiler's macros for it. Raises
    CompilerError: it does not even know the last one."""
    *better, last = levels_here()
    for level in better:
        with suppress(CompilerError):
            return level, macros(command, level)
    return last, macros(command, last)


def installed_path(level: Level) -> Path:
    """Where the library of these sources for a level is, if it was compiled with the package."""
    return INSTALLED / f"{level.name}-{checksum(level)}.so"


def checksum(level: Level, *others: str) -> str:
    """Hash of the sources and the flags of a level, and of others: of the compiler and its macros, in a cache."""
    sources = [*(path.read_bytes() for path in (*SOURCES, *HEADERS)), layout_source()]
    return hashlib.sha256(repr((*others, FLAGS, _LINKED, level.flags, sources)).encode()).hexdigest()


def install() -> Path:
    """Compile the library for this processor into the package, in place of others. Raises CompilerError, OSError."""
    command = compiler()
    level, _ = best_level(command)
    path = installed_path(level)
    INSTALLED.mkdir(exist_ok=True)
    for other in INSTALLED.glob("*.so"):
        if other != path:
            other.unlink()
    if not path.exists():
        with TemporaryDirectory(dir=INSTALLED) as folder:
            made = Path(folder) / path.name
            build(command, level, made)
            made.rename(path)
    return path


def build(command: Sequence[str], level: Level, path: Path) -> None:
    """Compile and link the library, to ``path``; files in between lie beside it. Raises CompilerError."""
    layout = path.with_name("layout.cpp")
    layout.write_text(layout_source(), encoding="utf-8")
    sources, begin_s = (*SOURCES, layout), time.monotonic()
    most = len(sources)
    # A warning, which is shown by default: minutes of silence look like a fault.
    _LOG.warning(
        "compiling %d files of C++ kernels for %s: a minute, or several if the processor is busy; once",
        most,
        level.name,
    )
    objects = [path.with_name(f"{source.stem}.o") for source in sources]
    compiled = [*command, "-O3", *FLAGS, *_OPENMP, *level.flags, f"-I{_HERE}", "-c"]
    with ThreadPoolExecutor(most) as threads:
        names = {
            threads.submit(_output, [*compiled, str(source), "-o", str(to)]): source.name
            for source, to in zip(sources, objects, strict=True)
        }
        for number, done in enumerate(as_completed(names), 1):
            done.result()
            _LOG.info(
                "%d of %d files are compiled, %s in %.0f s", number, most, names[done], time.monotonic() - begin_s
            )
    _output([*command, *_LINKED, *map(str, objects), "-o", str(path)])


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompilerError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CompilerError(f"{command[0]}: {next((line for line in lines if 'error' in line), lines[-1])}")
    return done.stdout
