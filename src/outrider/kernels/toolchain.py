"""What compiled code depends on besides its source: the processor, and the C++ compiler that Inductor calls."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor() -> str:
    """The processor with its instruction sets, all of which the compiler may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


def compiler() -> tuple[str, str, str | None]:
    """The C++ compiler: its command, what it says of itself, which another release changes, and the processor that it
    is told to compile for, if not for this one."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    command = get_cpp_compiler()
    return command, get_compiler_version_info(command), config.cpp.march
