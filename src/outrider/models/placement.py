"""Placement of a model: device or devices, number type, quantization.

The command line, the Python API and model files use the same words. Nothing is loaded here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.errors import DeviceError, FileError, OptionError
from outrider.models.registry import ARITHMETICS, EXECUTIONS, QUANTIZATIONS, STORES, ModelSpec

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # inferred by Accelerate


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement options of one model. "auto" and None defer to the model's entry (``[models.NAME]``), then to the
    machine.

    Attributes:
        device: "auto" (CUDA, then MPS, then the CPU), "cpu", "cuda", "cuda:1", "mps".
        dtype: compute type, and type of all weights that are not quantized: "auto" (float32 on the CPU, else the
            checkpoint's own), "float64", "float32", "bfloat16", "float16".
        quantization: of the weights of linear layers, while loading: "none", "int8", "int4", "fp8", "8bit", "nf4" (see
            quantize.py); or "a32", "a15" or "a8", of the activations that are multiplied with a checkpoint's blocks.
        device_map: spreads the layers over several devices: "none", "auto", "balanced" (by Accelerate), or a JSON file
            from module names to devices.
        store: on the CPU with float32: "auto" keeps large matrices in the checkpoint's type, mostly bfloat16, and
            multiplies few rows with them by a kernel compiled for the processor. With "plain", or if the kernel cannot
            be compiled, all weights are tensors of ``dtype``. Results differ in the order of sums.
        max_memory: limits of a device map: "0=20GiB,1=20GiB,cpu=60GiB".
        tensor_parallel: number of processes that share each layer (``torchrun``).
        allow_pickle: read weights from a pickled file (pytorch_model.bin) where there are no others.
        execution: how forwards run: "auto", "eager" (any model), "native" (known families on the CPU; not available
            yet) or "captured" (CUDA graphs). "auto" is the last of these on a CUDA device, where steps that cannot be
            captured run eagerly.
    """

    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    device_map: str | None = None
    max_memory: str | None = None
    tensor_parallel: int | None = None
    store: str | None = None
    allow_pickle: bool = False
    execution: str = "auto"

    def over(self, spec: ModelSpec) -> Placement:
        """Fill in open choices from the spec, and check all.

        Raises:
            OptionError
        """
        placed = Placement(
            device=spec.device or "auto" if self.device == "auto" else self.device,
            dtype=spec.dtype or "auto" if self.dtype == "auto" else self.dtype,
            quantization=self.quantization or spec.quantization or "none",
            device_map=self.device_map or spec.device_map or "none",
            max_memory=self.max_memory or (spec.max_memory if self.device_map is None else None),
            tensor_parallel=spec.tensor_parallel if self.tensor_parallel is None else self.tensor_parallel,
            store=self.store or spec.store or "auto",
            allow_pickle=self.allow_pickle,
            execution=spec.execution or "auto" if self.execution == "auto" else self.execution,
        )
        if placed.dtype != "auto" and placed.dtype not in DTYPES:
            raise OptionError("dtype", placed.dtype, f"choose auto, {', '.join(DTYPES)}")
        if placed.quantization not in ("none", *QUANTIZATIONS, *ARITHMETICS):
            names = ", ".join(("none", *QUANTIZATIONS, *ARITHMETICS))
            raise OptionError("quantization", placed.quantization, f"choose one of {names}")
        if placed.store not in STORES:
            raise OptionError("store", placed.store, f"choose {' or '.join(STORES)}")
        if placed.execution not in EXECUTIONS:
            raise OptionError("execution", placed.execution, f"choose {', '.join(EXECUTIONS)}")
        if placed.tensor_parallel is not None and placed.tensor_parallel < 1:
            raise OptionError("tensor_parallel", placed.tensor_parallel, "a whole number >= 1")
        if placed.max_memory is not None and placed.device_map not in _MAPS:
            raise OptionError("max_memory", placed.max_memory, "it limits a device map: choose --device-map auto")
        return placed

    def inheriting(self, target: Placement) -> Placement:
        """Placement of a draft: the target's device and dtype, and eager execution if chosen for the target, unless
        stated. If pickles are allowed, then for both."""
        return replace(
            self,
            device=target.device if self.device == "auto" else self.device,
            dtype=target.dtype if self.dtype == "auto" else self.dtype,
            allow_pickle=self.allow_pickle or target.allow_pickle,
            execution="eager" if (self.execution, target.execution) == ("auto", "eager") else self.execution,
        )

    def name_of(self, spec: ModelSpec) -> str:
        """Model name, with the quantization unless the name implies it."""
        if self.quantization in (None, spec.quantization) or (self.quantization, spec.quantization) == ("none", None):
            return spec.name
        return f"{spec.name.removesuffix(f':{spec.quantization}')}:{self.quantization}"


def pick_device(name: str) -> torch.device:
    """Device by name; ``auto`` takes CUDA, then MPS, then the CPU.

    Raises:
        DeviceError: it does not exist here.
    """
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
    """The ``device_map`` of ``from_pretrained``.

    Raises:
        FileError, DeviceError: the file cannot be read, or names a device that is not there.
    """
    word = placement.device_map
    if word in (None, "none"):
        return None
    if word in _MAPS:
        return word
    path = Path(str(word))
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(
            f"device_map = {word!r} is neither {', '.join(_MAPS)} nor a JSON file that can be read: {error}"
        ) from None
    if not isinstance(read, dict) or not read or not all(isinstance(value, (str, int)) for value in read.values()):
        raise FileError(f'{path}: expected an object of module names and devices, like {{"model.layers.0": "cuda:0"}}')
    places = {module: f"cuda:{value}" if isinstance(value, int) else value for module, value in read.items()}
    for place in set(places.values()):
        if place in ("auto", "disk"):
            raise FileError(f"{path}: {place!r} is not a device: choose one like cuda:0 or cpu")
        pick_device(place)
    return places


def max_memory_of(text: str | None) -> dict[int | str, str] | None:
    """Parse "0=20GiB,cpu=60GiB" for Accelerate.

    Raises:
        OptionError
    """
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
