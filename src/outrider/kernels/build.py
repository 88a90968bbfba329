"""Compiles the C++ kernels to one library, by whatever C++ compiler is there. It needs no header but the standard's.

This happens when the package is installed from its source (hatch_build.py), so nothing here imports PyTorch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.kernels.levels import Level, levels_here

_LOG = logging.getLogger(__name__)
_HERE = Path(__file__).parent
SOURCES = sorted(_HERE.glob("*.cpp"))
HEADERS = sorted(_HERE.glob("*.h"))
# The sources write fused multiply-adds explicitly (vectors.h), and no others are contracted: no result depends on the
# compiler. The order of floating-point exceptions need not be kept.
FLAGS = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-trapping-math")
# Apple's compiler has no OpenMP of its own: the library uses the one that PyTorch has loaded.
_IS_APPLE = sys.platform == "darwin"
_OPENMP = ("-Xclang", "-fopenmp") if _IS_APPLE else ("-fopenmp",)
_LINKED = ("-shared", "-undefined", "dynamic_lookup") if _IS_APPLE else ("-shared", "-fopenmp")


INSTALLED = _HERE / "installed"
"""Folder of the library that was compiled when the package was installed."""


class CompilerError(Exception):
    """There is no compiler, or it fails. The message is one line."""


def compiler() -> list[str]:
    """Command of the C++ compiler: that of the variable CXX, or the first that is there.

    Raises:
        CompilerError: none is there.
    """
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [["g++"], ["clang++"]]:
        if shutil.which(command[0]) is not None:
            return command
    raise CompilerError(f"there is no {given[0] if given else 'C++ compiler'}: install g++, or set CXX")


def macros(command: Sequence[str], level: Level) -> str:
    """The compiler's predefined macros for a level: its version, and all that sources may ask for.

    Raises:
        CompilerError: it does not know the level.
    """
    return _output([*command, *FLAGS, *level.flags, "-x", "c++", "-dM", "-E", os.devnull])


def best_level(command: Sequence[str]) -> tuple[Level, str]:
    """The best level that the processor has and the compiler knows, and the compiler's macros for it.

    Raises:
        CompilerError: it does not even know the last one.
    """
    *better, last = levels_here()
    for level in better:
        with suppress(CompilerError):
            return level, macros(command, level)
    return last, macros(command, last)


def installed_path(level: Level) -> Path:
    """Where the library of these sources for a level is, if it was compiled with the package."""
    return INSTALLED / f"{level.name}-{_checksum(level)}.so"


def _checksum(level: Level, *others: str) -> str:
    sources = [path.read_bytes() for path in (*SOURCES, *HEADERS)]
    return hashlib.sha256(repr((*others, FLAGS, level.flags, sources)).encode()).hexdigest()


def cached_name(command: Sequence[str], level: Level, predefined: str) -> str:
    """Name in a cache of the library that this compiler, with these macros, makes of these sources."""
    return _checksum(level, *command, predefined)


def install() -> Path:
    """Compile the library for this processor into the package, in place of earlier ones.

    Raises:
        CompilerError, OSError
    """
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
    """Compile and link the library, to ``path``; files in between lie beside it.

    Raises:
        CompilerError
    """
    most, begin_s = len(SOURCES), time.monotonic()
    # A warning, which is shown by default: minutes of silence look like a fault.
    _LOG.warning(
        "compiling %d files of C++ kernels for %s: a minute, or several if the processor is busy; once",
        most,
        level.name,
    )
    objects = [path.with_name(f"{source.stem}.o") for source in SOURCES]
    compiled = [*command, "-O3", *FLAGS, *_OPENMP, *level.flags, "-c"]
    with ThreadPoolExecutor(most) as threads:
        names = {
            threads.submit(_output, [*compiled, str(source), "-o", str(to)]): source.name
            for source, to in zip(SOURCES, objects, strict=True)
        }
        for number, done in enumerate(as_completed(names), 1):
            done.result()
            _LOG.info(
                "%d of %d files are compiled, %s in %.0f s", number, most, names[done], time.monotonic() - begin_s
            )
    _output([*command, *_LINKED, *map(str, objects), "-o", str(path)])


def _output(command: Sequence[str]) -> str:
    """Standard output of a run of the compiler."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompilerError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CompilerError(f"{command[0]}: {next((line for line in lines if 'error' in line), lines[-1])}")
    return done.stdout
