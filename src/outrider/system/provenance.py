"""Where a result comes from: versions, device, options. Written beside every result."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.system.ranks import current_ranks


def provenance(device: str) -> dict[str, Any]:
    """What is needed to understand a measurement later.

    Args:
        device: as torch names it.
    """
    import torch

    is_cuda = device.startswith("cuda")
    return {
        "outrider": version("outrider"),
        "commit": _git_commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "device": torch.cuda.get_device_name(device) if is_cuda else device,
        "num_threads": torch.get_num_threads(),
        "num_processes": current_ranks().size,
        "argv": sys.argv[1:],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git_commit() -> str | None:
    """The commit of the checkout that this file lies in; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def processor_name() -> str:
    """The model of the processor; where the system does not tell, its kind."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
