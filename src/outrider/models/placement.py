"""Devices of a placement, and processes that share a model. Nothing is loaded here.

In tensor parallelism the processes of a job share each layer of a model, by Transformers' plan for its kind. Models
that cannot be shared are refused by their configuration, before weights are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from outrider.errors import DeviceError, FileError, OptionError, UnsupportedModel
from outrider.models.registry import MAPS, Placement
from outrider.system.ranks import current_ranks, take_part

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """Device by name; ``auto`` takes CUDA, then MPS, then the CPU. Raises DeviceError: it does not exist here."""
    if name == "auto":
        has_mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    there = ["cpu"]
    if torch.cuda.is_available():
        there += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        there.append("mps")
    if name not in there:
        raise DeviceError(f"there is no device {name!r} here: choose auto, {', '.join(there)}")
    return torch.device(name)


def device_map_of(placement: Placement) -> str | dict[str, Any] | None:
    """The ``device_map`` of ``from_pretrained``. Raises FileError, DeviceError: the file cannot be read, or names a
    device that is not there."""
    word = placement.device_map
    if word in (None, "none"):
        return None
    if word in MAPS:
        return word
    path = Path(str(word))
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = f"is neither {', '.join(MAPS)} nor a JSON file that can be read"
        raise FileError(f"device_map = {word!r} {found}: {error}") from None
    if not isinstance(read, dict) or not read or not all(isinstance(value, (str, int)) for value in read.values()):
        raise FileError(f'{path}: expected an object of module names and devices, like {{"model.layers.0": "cuda:0"}}')
    places = {module: f"cuda:{value}" if isinstance(value, int) else value for module, value in read.items()}
    for place in set(places.values()):
        if place in ("auto", "disk"):
            raise FileError(f"{path}: {place!r} is not a device: choose one like cuda:0 or cpu")
        pick_device(place)
    return places


def max_memory_of(text: str | None) -> dict[int | str, str] | None:
    """Parse "0=20GiB,cpu=60GiB" for Accelerate. Raises OptionError."""
    if text is None:
        return None
    from accelerate.utils import convert_file_size_to_int

    limits: dict[int | str, str] = {}
    for part in text.split(","):
        device, _, size = (piece.strip() for piece in part.partition("="))
        try:
            convert_file_size_to_int(size)
        except ValueError:
            device = ""
        if not device.isdigit() and device not in ("cpu", "mps", "disk"):
            raise OptionError("max_memory", text, "write DEVICE=SIZE, like 0=20GiB,1=20GiB,cpu=60GiB")
        limits[int(device) if device.isdigit() else device] = size
    return limits


def num_shares(name: str, placed: Placement, *, is_target: bool) -> int:
    """Number of processes that share each layer of a model. By default all of the job share a target. (A draft is
    small: all-reduces would cost more time than sharing saves.) Raises OptionError, DeviceError: there are not as many
    processes, or devices, as stated."""
    stated = placed.tensor_parallel
    if stated is None:
        return current_ranks().size if is_target else 1
    size = take_part().size if stated > 1 else current_ranks().size
    if stated == size or (stated == 1 and not is_target):
        return stated
    remedy = f"torchrun --nproc-per-node {stated} -m outrider COMMAND ..." if stated > 1 else "run it without torchrun"
    raise OptionError("tensor_parallel", stated, f"{name} needs that many processes, not {size}: {remedy}")


def check_shares(
    name: str, size: int, placed: Placement, device: torch.device, config: Any, method: str | None
) -> None:
    """Refuse a model that ``size`` processes cannot share. Raises OptionError, DeviceError: it is placed otherwise, or
    quantized in a way that keeps weights whole; UnsupportedModel: there is no plan for its kind, or its heads cannot be
    divided."""
    shared = f"{name} is shared by {size} processes"
    if placed.device_map != "none":
        raise OptionError("device_map", placed.device_map, f"{shared}: choose sharing or a map")
    if method is not None or placed.quantization in ("int4", "8bit", "nf4"):
        remedy = f"{shared}, which works with torchao's int8 of a checkpoint that is not quantized"
        raise OptionError("quantization", method or placed.quantization, remedy)
    has_cuda = torch.cuda.is_available()
    if device.type != ("cuda" if has_cuda else "cpu") or device.index is not None:
        remedy = "leave out --device" if device.type != "cpu" else "hide the CUDA devices (CUDA_VISIBLE_DEVICES=)"
        places = "each on the CUDA device of its rank or, where there are none, on the CPU"
        raise DeviceError(f"{shared}, {places}, but not on {device}: {remedy}")
    text_config = config.get_text_config(decoder=True)
    plan: dict[str, str] = getattr(text_config, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModel(
            f"{name} ({config.model_type}) cannot be shared by {size} processes: Transformers has no tensor-parallel "
            "plan for it (base_model_tp_plan); spread its layers instead, with --device-map auto and without torchrun"
        )
    # Modules of which each process computes a part of the outputs.
    split = [module for module, style in plan.items() if style in ("colwise", "packed_colwise")]
    is_split = any(word in module for word in ("attn", "attention") for module in split)
    num_heads = text_config.num_attention_heads
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    for what, number in (("attention", num_heads), ("key-value", num_kv_heads)):
        if number % size and is_split:
            raise UnsupportedModel(
                f"{name} has {number} {what} heads, which {size} processes cannot share evenly: choose a divisor of "
                f"{number} for --nproc-per-node"
            )
