"""The kernels, compiled for other processors and by other compilers, against sums in double (driver.cpp)."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.kernels.build import BASELINE, FLAGS, LEVELS, SOURCES, levels_here

_TUNINGS = ("generic", "znver3", "znver4")
_LEVELS = {level.name: " ".join(level.flags) for level in (*LEVELS["x86_64"], BASELINE)}
# Commands of compilers whose kernels must give equal results, to the bit.
_COMMANDS = {
    level: [
        *(f"g++ {flags} -mtune={one}" for one in _TUNINGS),
        f"g++ -O2 {flags} -mtune=znver3",  # GCC 12 avoids some fused multiply-adds of this width, and not others
        f"clang++ {flags}",
        f"clang++-16 {flags} -mtune=znver4",
    ]
    for level, flags in _LEVELS.items()
} | {"NEON": ["aarch64-linux-gnu-g++ -static", "clang++ --target=aarch64-linux-gnu -static"]}
_EMULATORS = {"NEON": "qemu-aarch64", "dotprod": "qemu-aarch64"}
_IN_AVX512 = "avx2-vnni in AVX-512's encoding"
# Levels of processors that can run these.
_RUN_BY = {_IN_AVX512: "avx512-vnni", "baseline-fast": "baseline"}
_FEW, _ALL = "5", "1"  # one of so many shapes


# Not optimized, since it is about the code for these vectors: that takes a third of the time. (The kernels of this
# processor, optimized as for everybody, are tested in test_matrices.py.)
_NOT_OPTIMIZED = {level: f"g++ -O0 {flags}" for level, flags in _LEVELS.items()} | {
    _IN_AVX512: "g++ -O0 -march=x86-64-v3 -mavx512vnni -mavx512vl",  # no processor at hand has the other encoding
    "NEON": "aarch64-linux-gnu-g++ -O0 -static",
    "dotprod": " ".join(("aarch64-linux-gnu-g++ -O0 -static", *LEVELS["aarch64"][0].flags)),
}


@pytest.mark.slow
def test_the_kernels_on_other_processors(tmp_path: Path) -> None:
    """A row alone, other threads, and other processors give equal bits; but for sums that round twice."""
    results = {}
    for level, command in _NOT_OPTIMIZED.items():
        if _missing(level, command) is None:
            folder = tmp_path / level
            folder.mkdir()
            results[level] = _results(command, level, _FEW, folder)
    print(results)  # with -s
    if not results:
        pytest.skip("there is no compiler")
    results.pop("baseline-fast", None)
    assert len(set(results.values())) <= 1, results


@pytest.mark.slow
def test_kernels_read_within_bounds(tmp_path: Path) -> None:
    """Nor undefined, by what the compiler checks."""
    checks = "-g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
    level = next(one.name for one in levels_here())
    if (missing := _missing(level, f"{_NOT_OPTIMIZED[level]} {checks}")) is not None:
        pytest.skip(missing)
    _results(f"{_NOT_OPTIMIZED[level]} {checks}", level, _FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("level", _COMMANDS)
def test_the_kernels_by_other_compilers(level: str, tmp_path: Path) -> None:
    commands = _COMMANDS[level]
    if (missing := _missing(level, commands[0])) is not None:
        pytest.skip(missing)
    results = {}
    for number, command in enumerate(commands):
        if shutil.which(command.split()[0]) is not None and _is_known(command):
            folder = tmp_path / str(number)
            folder.mkdir()
            results[command] = _results(command if "-O2" in command else f"{command} -O3", level, _ALL, folder)
    print(*results, sep="\n")  # with -s
    assert len(set(results.values())) == 1, results


def _missing(level: str, command: str) -> str | None:
    for needed in (command.split()[0], _EMULATORS.get(level, "")):
        if needed and shutil.which(needed) is None:
            return f"{needed} is not installed"
    if not _is_known(command):
        return f"this compiler cannot do {command}"
    if level not in _EMULATORS and platform.machine() != "x86_64":
        return "for x86-64"
    if level not in _EMULATORS and _RUN_BY.get(level, level) not in {one.name for one in levels_here()}:
        return f"for {level}"
    return None


def _is_known(command: str) -> bool:
    compiler, *flags = command.split()
    program = "#include <omp.h>\n#include <vector>\nint main() { return omp_get_thread_num(); }"
    tried = subprocess.run(
        [compiler, *flags, "-fopenmp", "-x", "c++", "-", "-o", "/dev/null"],
        input=program,
        capture_output=True,
        text=True,
    )
    return tried.returncode == 0


def _results(command: str, level: str, shapes: str, folder: Path) -> str:
    """The number of results and a hash of their bits, as the program prints them."""
    compiler, *flags = command.split()
    sources = [path for path in SOURCES if path.name != "threads.cpp"]
    sources += Path(__file__).parent.glob("*.cpp")
    objects = [folder / f"{source.name}.o" for source in sources]
    flags += ["-w", "-fopenmp", *FLAGS]
    for source, to in zip(sources, objects, strict=True):
        subprocess.run([compiler, *flags, "-c", str(source), "-o", str(to)], check=True)
    program = folder / "program"
    subprocess.run([compiler, *flags, *map(str, objects), "-o", str(program)], check=True)
    emulator = [_EMULATORS[level]] if level in _EMULATORS else []
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}  # there may be fewer processors than threads
    done = subprocess.run([*emulator, str(program), shapes], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout.split()[0]) > 400_000 // int(shapes), done.stdout + done.stderr
    return done.stdout
