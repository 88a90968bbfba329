"""Compiles the C++ kernels to one library, by whatever C++ compiler is there. It needs no header but the standard's."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from outrider.kernels.levels import Level

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
