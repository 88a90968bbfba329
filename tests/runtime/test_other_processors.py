"""The kernels, compiled for other processors and by other compilers, against sums in double (thin_kernels.cpp)."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from outrider.runtime import thin_kernel

pytestmark = pytest.mark.slow

# Compiler and flags, and the emulator, if it takes one.
_TARGETS = {
    "x86-64": ("g++ -march=x86-64", ""),
    "x86-64, Clang": ("clang++ -march=x86-64", ""),
    "AVX2": ("g++ -march=haswell", ""),
    "AVX2, Clang": ("clang++ -march=haswell", ""),
    "ARM": ("aarch64-linux-gnu-g++ -static", "qemu-aarch64"),
    "ARM, Clang": ("clang++ --target=aarch64-linux-gnu -static", "qemu-aarch64"),
}


@pytest.mark.parametrize("target", _TARGETS)
def test_the_kernels_on_other_processors(target: str, tmp_path: Path) -> None:
    command, emulator = _TARGETS[target]
    compiler, *flags = command.split()
    for needed in (compiler, emulator or compiler, "aarch64-linux-gnu-g++" if emulator else compiler):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    if not emulator and platform.machine() != "x86_64":
        pytest.skip("for x86-64")
    if "AVX2" in target and not torch.cpu._is_avx2_supported():
        pytest.skip("for AVX2")
    here, program = Path(__file__).parent, tmp_path / "program"
    sources = [str(path) for path in thin_kernel.SOURCES if path.name.startswith("thin_")]
    # The functions that programs call need torch; nobody calls them here, and they are left out.
    left_out = ["-ffunction-sections", "-Wl,--gc-sections"]
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    flags += ["-O3", "-std=c++20", "-w", *thin_kernel.FLAGS, *left_out, include, "-o", str(program)]
    subprocess.run([compiler, str(here / "thin_kernels.cpp"), *sources, *flags], check=True)
    done = subprocess.run([*emulator.split(), str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout.split()[0]) > 300_000, done.stdout + done.stderr
