"""Memory of the weights of a model, and whether devices have room for them. Nothing is loaded.

For the list of all models, sizes come from files (configuration and headers of the weights) or, for models that are not
on this disk, from the registry. For one model, they come from its skeleton, built from its configuration.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.errors import DeviceError, ModelCorrupt, OutriderError
from outrider.models.kinds import INDEX, WHOLE, auto_class, read_object
from outrider.models.registry import BYTES_PER_NUMBER, ModelSpec
from outrider.system.resources import available_bytes, size_text

if TYPE_CHECKING:
    import torch


class Sizes(NamedTuple):
    """Parameters, shared ones once; maximum sequence length; and bytes of a GGUF file, which stays as it is."""

    num_params: int
    context_len: int | None
    num_bytes: int | None = None

    def weights_bytes(self, dtype: str) -> int:
        return self.num_bytes or self.num_params * BYTES_PER_NUMBER[dtype]


def sizes_of(spec: ModelSpec) -> Sizes | None:
    """Sizes of a model; None if neither files nor the registry state them."""
    if spec.path is None or spec.gguf is not None:
        return None if spec.num_params is None else Sizes(spec.num_params, spec.context_len, spec.num_bytes)
    try:
        config: dict[str, Any] = json.loads((spec.path / "config.json").read_text(encoding="utf-8"))
        config |= config.get("text_config") or {}  # of multimodal models
        shapes = [shape for file in weight_files(spec.path) for shape in tensor_shapes(file).values()]
        context_len = config.get("max_position_embeddings") or config.get("n_positions")
        return Sizes(sum(map(math.prod, shapes)), context_len) if shapes else None
    except (OutriderError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def weight_files(folder: Path) -> list[Path]:
    """Weight files that Transformers loads. Some folders hold the weights twice: in another type, or for other
    programs. Raises ModelCorrupt, KeyError: their index is damaged, or names a file that is not there."""
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if (folder / INDEX).exists():
        files = [folder / name for name in indexed_files(folder / INDEX)]
        if missing := [file for file in files if not file.exists()]:
            raise ModelCorrupt(f"{missing[0]} is not there, but {INDEX} names it: download the model again")
        return files
    return []


def indexed_files(index: Path) -> list[str]:
    return sorted(set(read_object(index)["weight_map"].values()))


def types_of(files: list[Path]) -> set[str]:
    """Types of numbers in safetensors files, as they name them ("BF16")."""
    return {tensor["dtype"] for file in files for tensor in _tensors(file).values()}


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a safetensors file by name. Raises OSError, ValueError."""
    return {name: tuple(tensor["shape"]) for name, tensor in _tensors(file).items()}


def _tensors(file: Path) -> dict[str, dict[str, Any]]:
    """Tensors of a safetensors file, from its header: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length < file.stat().st_size:
            raise ValueError(f"{file} is cut or damaged: download it again")
        header = json.loads(stream.read(length))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def skeleton(config: Any, dtype: torch.dtype) -> Any:
    """Model without weight values, if the surrounding mode or device creates none (fake, or meta)."""
    from transformers.initialization import no_init_weights

    # Some initializations read values, which do not exist. Weights are tied during initialization.
    with no_init_weights():
        model = auto_class(config.model_type, config).from_config(config, dtype=dtype, trust_remote_code=False).eval()
    model.tie_weights()
    return model


def weights_bytes(model: Any, quantization: str = "none", parallel: int = 1) -> int:
    """Bytes that the weights and buffers of a skeleton, shared ones once, have after their quantization; for one of
    ``parallel`` processes, which share layers by the model's own plan."""
    from outrider.models.quantize import linear_bytes, quantizable
    from outrider.runtime.weight_tensors import stored_tensors

    layers = {} if quantization == "none" else quantizable(model, quantization)
    plan = {module for module, style in (model.tp_plan or {}).items() if not style.startswith("replicated")}
    shared = [re.compile(pattern.replace(".", r"\.").replace("*", r"\d+")) for pattern in plan]
    total, seen = 0, set[int]()
    for name, module in model.named_modules():
        is_shared = parallel > 1 and any(pattern.fullmatch(name) for pattern in shared)
        own = {id(one): one for one in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
        for tensor in (one for key, one in own.items() if key not in seen):
            if name in layers and tensor is module.weight:
                number = linear_bytes(quantization, module)
            else:
                number = sum(inner.numel() * inner.element_size() for inner in stored_tensors(tensor))
            total += number // parallel if is_shared else number
        seen |= own.keys()
    return total


def stored_bytes(spec: ModelSpec) -> int:
    """Bytes of the weights of a checkpoint on this disk; 0 if it is not here."""
    return 0 if spec.path is None else sum(file.stat().st_size for file in weight_files(spec.path))


def check_fits(
    name: str,
    needed: int,
    device: torch.device,
    device_map: str | Mapping[str, str] | None = None,
    limits: Mapping[int | str, str] | None = None,
) -> None:
    """Refuse a model if so many bytes of weights do not fit, with ``device_map`` and ``max_memory`` of
    ``from_pretrained``. Raises DeviceError, with the numbers."""
    import torch

    free: int | None
    if device_map is None:
        where, free = str(device), available_bytes(device)
    elif isinstance(device_map, str):
        from accelerate.utils import get_max_memory

        # By Accelerate's account: free memory of each device and the CPU, or the limits.
        by_place = get_max_memory(None if limits is None else dict(limits))
        where, free = "all devices together", sum(size for place, size in by_place.items() if place != "disk")
    else:
        known = [available_bytes(torch.device(place)) for place in sorted(set(device_map.values()))]
        where, free = "the devices of its map", None if None in known else sum(filter(None, known))
    if free is not None and needed > free:
        raise DeviceError(
            f"the weights of {name} need {size_text(needed)} on {where}, where {size_text(free)} are free: choose "
            "fewer bits (--quantize, --dtype; 'outrider models --target' has the sizes), or spread it over several "
            "devices (--device-map)"
        )
