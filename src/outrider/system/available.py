"""Memory that is still free on a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated now; None where nobody tells.

    On a CUDA device, memory that torch keeps for itself counts as free; on the CPU, a container's limit counts.
    """
    if device.type == "cuda":
        import torch

        unused, _ = torch.cuda.mem_get_info(device)
        return unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        import torch

        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return None
    free: int = psutil.virtual_memory().available
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such control group; or "max": no limit
        return None


def size_text(num_bytes: int) -> str:
    """ "3.1 GiB", "12.0 MiB"."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
