"""Processor and C++ compiler: compiled code depends on them besides its source."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor() -> str:
    """Processor and its instruction sets, all of which the compiler may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


def compiler() -> tuple[str, str, str | None]:
    """The C++ compiler that Inductor calls: its command, its version text, and the processor that it compiles for, if
    not this one."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    command = get_cpp_compiler()
    return command, get_compiler_version_info(command), getattr(config.cpp, "march", None)  # not in PyTorch 2.11
