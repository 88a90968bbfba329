"""Checks that a model fits its devices before its weights are read, and picks a GPU for a draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import DeviceError
from outrider.models.memory import weight_files, weights_bytes
from outrider.models.registry import QUANTIZATIONS, ModelSpec
from outrider.system.available import available_bytes, size_text


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One or several devices, in words, and their free bytes; None if unknown."""

    where: str
    free: int | None


def room_of(
    device: torch.device, device_map: str | Mapping[str, str] | None, limits: Mapping[int | str, str] | None
) -> DeviceMemory:
    """Memory that a placement gives a model.

    Args:
        device_map, limits: ``device_map`` and ``max_memory`` of ``from_pretrained``.
    """
    if device_map is None:
        return DeviceMemory(str(device), available_bytes(device))
    if not isinstance(device_map, str):
        devices = [torch.device(name) for name in sorted(set(device_map.values()))]
        return DeviceMemory("the devices of its map", _sum([available_bytes(one) for one in devices]))
    from accelerate.utils import get_max_memory

    # By Accelerate's account: free memory of each device and the CPU, or the limits.
    free = get_max_memory(None if limits is None else dict(limits))
    return DeviceMemory("all devices together", sum(size for place, size in free.items() if place != "disk"))


def _sum(sizes: list[int | None]) -> int | None:
    return None if None in sizes else sum(size for size in sizes if size is not None)


def stored_bytes(spec: ModelSpec) -> int:
    """Bytes of the weights of a checkpoint on this disk; 0 if it is not here."""
    return 0 if spec.path is None else sum(file.stat().st_size for file in weight_files(spec.path))


def forms(bare: Any, dtype: torch.dtype, quantization: str, parallel: int, device_type: str = "cpu") -> dict[str, int]:
    """Bytes of the weights in narrower types, by the options that choose them.

    Args:
        bare: the skeleton, of this type.
        quantization, parallel, device_type: see ``weights_bytes``.
    """
    found = {f"--quantize {one}": weights_bytes(bare, dtype, one, parallel, device_type) for one in QUANTIZATIONS}
    if dtype.itemsize > 2 and quantization == "none":
        found = {"--dtype bfloat16": weights_bytes(bare, dtype, "none", parallel) * 2 // dtype.itemsize} | found
    return found


def check_fits(name: str, needed: int, room: DeviceMemory, smaller: Callable[[], Mapping[str, int]]) -> None:
    """Refuse a model whose weights do not fit.

    Args:
        needed: bytes of its weights.
        smaller: returns the bytes in narrower types (see ``forms``), if they are needed.

    Raises:
        DeviceError: with the numbers, and what would fit.
    """
    if room.free is None or needed <= room.free:
        return
    fitting = [f"{option} ({size_text(size)})" for option, size in smaller().items() if size <= room.free]
    remedy = ", ".join(fitting) if fitting else "nothing here; or spread it over several devices (--device-map)"
    raise DeviceError(
        f"the weights of {name} need {size_text(needed)} on {room.where}, where {size_text(room.free)} are free; this "
        f"would fit: {remedy}"
    )


def fastest_with_room(needed: int) -> torch.device | None:
    """CUDA device with the highest memory bandwidth among those with twice the bytes free (for caches too); the
    first one of equals. None if there is none.

    The time of a draft step is that of reading its weights.
    """
    best: tuple[float, torch.device] | None = None
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        free, properties = available_bytes(device), torch.cuda.get_device_properties(device)
        bandwidth = properties.memory_clock_rate * properties.memory_bus_width
        if free is not None and 2 * needed <= free and (best is None or bandwidth > best[0]):
            best = bandwidth, device
    return None if best is None else best[1]
