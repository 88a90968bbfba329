"""Levels of vectors: sets of instructions that kernels are compiled for, and those of them that this processor has.

One library serves one level, whatever the processor on which it was compiled.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """Set of instructions.

    Attributes:
        name: of the library.
        flags: of the compiler.
        features: of the processor, as Linux names them.
    """

    name: str
    flags: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()


_AVX2 = frozenset("avx2 fma f16c bmi1 bmi2 movbe abm".split())
_AVX512 = _AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_V3, _V4, _VNNI = "-march=x86-64-v3", "-march=x86-64-v4", "-mavx512vnni"
# Levels of each machine, best first.
LEVELS = {
    "x86_64": (
        Level("amx", (_V4, _VNNI, "-mamx-tile", "-mamx-int8"), _AVX512 | {"avx512_vnni", "amx_tile", "amx_int8"}),
        Level("avx512-vnni", (_V4, _VNNI), _AVX512 | {"avx512_vnni"}),
        Level("avx512", (_V4,), _AVX512),
        Level("avx2-vnni", (_V3, "-mavxvnni"), _AVX2 | {"avx_vnni"}),
        Level("avx2", (_V3,), _AVX2),
    ),
    "aarch64": (Level("dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),),
}
BASELINE = Level("baseline")
_OTHER_NAMES = {"AMD64": "x86_64", "arm64": "aarch64"}
# What PyTorch's variable for its own kernels takes away: names that begin with this.
_WITHOUT = {"avx2": ("avx512", "amx"), "default": ("avx", "amx", "asimddp")}


def levels_here(features: Set[str] | None = None) -> list[Level]:
    """Levels that this processor has, best first. ``ATEN_CPU_CAPABILITY`` forbids some, as in PyTorch.

    Args:
        features: of the processor; None to ask the system.
    """
    machine = platform.machine()
    without = _WITHOUT.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), ())
    found = {name for name in (_features() if features is None else features) if not name.startswith(without)}
    known = LEVELS.get(_OTHER_NAMES.get(machine, machine), ())
    return [*(level for level in known if level.features <= found), BASELINE]


def _features() -> Set[str]:
    """Features of this processor, as Linux names them."""
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return _features_by_torch()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def _features_by_torch() -> Set[str]:
    """Features of this processor as far as PyTorch tells, where the system has no list."""
    if platform.machine() == "arm64":  # Apple's processors all have these
        return {"asimddp"}
    import torch

    return {"AVX512": _AVX512, "AVX2": _AVX2}.get(torch.backends.cpu.get_cpu_capability(), frozenset())
