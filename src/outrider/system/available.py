"""Free memory of a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated now; None if unknown.

    Memory in torch's caching allocator counts as free. On the CPU, the limit of a container applies.
    """
    if device.type == "cuda":
        import torch

        unused, _ = torch.cuda.mem_get_info(device)
        return unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        import torch

        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    if device.type != "cpu":
        return None
    free: int = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such control group; or "max": no limit
        return free
    # The page cache counts as used, and is freed when memory is needed.
    used -= int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return min(free, max(0, limit - used))


def size_text(num_bytes: int) -> str:
    """Size in words: "3.1 GiB", "12.0 MiB"."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
