"""The kernels, compiled for other processors and by other compilers, against sums in double (thin_kernels.cpp)."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from outrider.runtime import thin_kernel

# Commands of compilers whose kernels must give equal results, to the bit, since their vectors are equally wide; and the
# emulator, if they take one. GCC 12 avoids some fused multiply-adds when it tunes for Zen, and Clang never does.
_TUNINGS = ("znver3", "znver4", "generic")
_TARGETS = {
    "x86-64-v2": ([*(f"g++ -march=x86-64-v2 -mtune={one}" for one in _TUNINGS), "clang++ -march=x86-64-v2"], ""),
    "x86-64-v3": ([*(f"g++ -march=x86-64-v3 -mtune={one}" for one in _TUNINGS), "clang++ -march=x86-64-v3"], ""),
    "x86-64-v4": ([*(f"g++ -march=x86-64-v4 -mtune={one}" for one in _TUNINGS), "clang++ -march=x86-64-v4"], ""),
    "ARM": (["aarch64-linux-gnu-g++ -static", "clang++ --target=aarch64-linux-gnu -static"], "qemu-aarch64"),
}


def test_sums_that_are_tuned_for_zen(tmp_path: Path) -> None:
    """Of 256 bits, by the native compiler: a row or query alone, and other numbers of threads, give equal bits."""
    _skip_unless_possible("x86-64-v3", "g++")
    _results("g++ -march=x86-64-v3 -mtune=znver3", "", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", _TARGETS)
def test_the_kernels_on_other_processors(target: str, tmp_path: Path) -> None:
    """Their results depend on the width of vectors alone, not on the compiler or on the processor it tunes for."""
    commands, emulator = _TARGETS[target]
    needed = (emulator, "aarch64-linux-gnu-g++") if emulator else ("g++",)
    _skip_unless_possible(target, *needed)
    results = {}
    for number, command in enumerate(commands):
        if shutil.which(command.split()[0]) is not None and _is_known(command):
            folder = tmp_path / str(number)
            folder.mkdir()
            results[command] = _results(command, emulator, folder)
    assert len(set(results.values())) == 1, results


def _skip_unless_possible(target: str, *needed: str) -> None:
    for one in needed:
        if shutil.which(one) is None:
            pytest.skip(f"{one} is not installed")
    if target != "ARM" and platform.machine() != "x86_64":
        pytest.skip("for x86-64")
    if target == "x86-64-v3" and not torch.cpu._is_avx2_supported():
        pytest.skip("for AVX2")
    if target == "x86-64-v4" and not torch.cpu._is_avx512_supported():
        pytest.skip("for AVX-512")


def _is_known(command: str) -> bool:
    """Whether this release of the compiler knows the processor."""
    compiler, *flags = command.split()
    tried = subprocess.run([compiler, *flags, "-E", "-x", "c++", "/dev/null"], capture_output=True)
    return tried.returncode == 0


def _results(command: str, emulator: str, folder: Path) -> str:
    """The number of results and a hash of their bits, as the program prints them."""
    compiler, *flags = command.split()
    sources = [path for path in thin_kernel.SOURCES if path.name.startswith("thin_") and path.suffix == ".cpp"]
    sources.append(Path(__file__).with_name("thin_kernels.cpp"))
    objects = [folder / f"{source.name}.o" for source in sources]
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    # The functions that programs call need torch; nobody calls them here, and they are left out.
    flags += ["-O3", "-std=c++20", "-w", *thin_kernel.FLAGS, "-ffunction-sections", "-Wl,--gc-sections", include]
    compiling = [
        subprocess.Popen([compiler, *flags, "-c", str(source), "-o", str(to)])
        for source, to in zip(sources, objects, strict=True)
    ]
    assert [one.wait() for one in compiling] == [0] * len(compiling)
    program = folder / "program"
    subprocess.run([compiler, *flags, *map(str, objects), "-o", str(program)], check=True)
    done = subprocess.run([*emulator.split(), str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout.split()[0]) > 500_000, done.stdout + done.stderr
    return done.stdout
