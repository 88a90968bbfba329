"""Resources of this machine: processor cores worth a thread each, free memory; and a pause of garbage collection.

Every thread of a forward gets an equal share of the work, so the slowest one sets the time: a thread on an efficiency
core, on the second half of a physical core, or beyond the quota of a container makes the others wait.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import DeviceError

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")
_ROOT = Path("/")
# Before PyTorch is imported: with OMP_PROC_BIND, its OpenMP binds this thread to one core.
_ALLOWED = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
_SLOW = 0.5  # cores below this part of the capacity of the fastest are efficiency cores


def useful_threads(allowed: Set[int] | None = None, root: Path = _ROOT) -> int | None:
    """Number of physical cores that this process may use, without efficiency cores, up to its container's quota: at
    least 1; None where the system does not tell (macOS, Windows). ``allowed``: numbers of the processors that it may
    use; those that it might use at its start unless given. ``root``: of the file systems ``/sys`` and ``/proc``."""
    allowed = _ALLOWED if allowed is None else allowed
    if allowed is None:
        return None
    processors = root / "sys/devices/system/cpu"
    fast = _fast(root, allowed) or allowed
    siblings = {_text(processors / f"cpu{number}/topology/thread_siblings_list") or str(number) for number in fast}
    return max(1, min(len(siblings), _quota(root)))


def _fast(root: Path, allowed: Set[int]) -> set[int]:
    """Performance cores; empty if unknown."""
    listed = _text(root / "sys/devices/cpu_core/cpus")  # of Intel's hybrid processors
    if listed:
        return _numbers(listed) & allowed
    processors = root / "sys/devices/system/cpu"
    capacities = {number: _text(processors / f"cpu{number}/cpu_capacity") for number in allowed}  # of ARM's
    known = {number: int(text) for number, text in capacities.items() if text}
    return {number for number, capacity in known.items() if capacity >= _SLOW * max(known.values())}


def _quota(root: Path) -> int:
    """Processors that the control groups of this process (version 2) allow to be busy all the time."""
    lines = _text(root / "proc/self/cgroup").splitlines()
    own = Path(next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), ""))
    most = sys.maxsize
    for group in (own, *own.parents):  # in a container the path is the host's, and the root is the container's group
        text = _text(root / "sys/fs/cgroup" / group / "cpu.max")
        limit = [int(word) for word in text.split() if word.isdecimal()]
        most = min(most, limit[0] // limit[1] if len(limit) == 2 else sys.maxsize)  # else "max"
    return most


def _numbers(listed: str) -> set[int]:
    ranges = (part.split("-") for part in listed.split(","))
    return {number for first, *last in ranges for number in range(int(first), int(last[0] if last else first) + 1)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def available_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated now; None if unknown.

    Memory in torch's caching allocator counts as free. On the CPU, the limit of a container applies.
    """
    # Imported here, since the package is also imported to be built, where nothing is installed.
    if device.type != "cpu":
        import torch

        if device.type == "cuda":
            unused, _ = torch.cuda.mem_get_info(device)
            return unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        is_mps = device.type == "mps"
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory() if is_mps else None
    import psutil

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


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise DeviceError where memory cannot be allocated. (On the CPU, PyTorch has no type for that.)"""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        remedy = "free some, or choose fewer rows or tokens"
        raise DeviceError(f"there is not enough memory on the CPU: {remedy}") from None


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect no garbage meanwhile: each collection would look through all that is there, a sixth of the time that
    PyTorch and Transformers take to be imported."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
