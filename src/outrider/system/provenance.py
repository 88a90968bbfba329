"""Provenance of a result: versions, device, options. Written with every result."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.system.ranks import current_ranks


def provenance(device: str) -> dict[str, Any]:
    """Facts needed to interpret a measurement on a device (as torch names it) later."""
    import torch

    is_cuda = device.startswith("cuda")
    return {
        "outrider": version("outrider"),
        "commit": _git_commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "device": torch.cuda.get_device_name(device) if is_cuda else device,
        "num_threads": torch.get_num_threads(),
        "num_processes": current_ranks().size,
        "argv": sys.argv[1:],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def sha256_of(texts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(ids) for ids in texts]).encode()).hexdigest()


def _git_commit() -> str | None:
    """Commit of the checkout of this file; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def processor_name() -> str:
    """Model of the processor, or its kind if the system does not state the model."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
