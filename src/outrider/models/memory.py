"""Memory of the weights of a model, and of the cache at a given context and batch size; and whether devices have room
for the weights. Nothing is loaded.

For the list of all models, sizes come from files (configuration and headers of the weights) or, for models that are not
on this disk, from the registry. For one model, they come from its skeleton, built from its configuration;
bench/predicted_memory.py runs the loop's steps on it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import DeviceError
from outrider.models.kinds import INDEX, WHOLE, auto_class
from outrider.models.registry import BYTES_PER_NUMBER, ModelSpec
from outrider.runtime.shape_buckets import eager_length, prepared_length
from outrider.system.resources import available_bytes, size_text

if TYPE_CHECKING:
    import torch

_OF_STATES = ("linear_", "mamba_", "ssm_", "conv_", "layers_block_type")  # prefixes of configuration fields


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that determine memory. ``num_params`` counts shared weights once; ``num_embedding_params`` are those of
    them that quantization leaves as they are, or None if that is unknown. ``num_bytes`` is the size of a GGUF file,
    which on the CPU stays as it is, with a cache in float32."""

    num_params: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    num_embedding_params: int | None = None
    num_bytes: int | None = None

    def weights_bytes(self, dtype: str) -> int:
        return self.num_bytes or self.num_params * BYTES_PER_NUMBER[dtype]

    def quantized_bytes(self, dtype: str, bits: float) -> int | None:
        """Bytes of the weights if layers take ``bits`` for each number, scales included, and embeddings stay in
        ``dtype``; None if the share of embeddings is unknown, or for a GGUF file."""
        if self.num_embedding_params is None or self.num_bytes is not None:
            return None
        kept = self.num_embedding_params * BYTES_PER_NUMBER[dtype]
        return kept + int((self.num_params - self.num_embedding_params) * bits / 8)

    def cache_bytes(self, dtype: str, num_tokens: int, batch_size: int, *, is_prepared: bool = False) -> int:
        """Bytes of the cache for keys and values of ``batch_size`` sequences of ``num_tokens``, allocated at once.

        Args:
            is_prepared: captured, where fewer lengths occur.
        """
        number = BYTES_PER_NUMBER[dtype if self.num_bytes is None else "float32"]
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * number
        capacity = prepared_length(num_tokens) if is_prepared else eager_length(num_tokens)
        return per_token * (capacity + 1) * batch_size  # each row has a place for the writes of padding


def sizes_of(spec: ModelSpec) -> Sizes | None:
    """Sizes of a model; None if neither files nor the registry state them."""
    if spec.path is not None and spec.gguf is None:
        try:
            return _from_files(spec.path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    stated = {field.name: getattr(spec, field.name) for field in fields(Sizes)}
    needed = (stated[field.name] for field in fields(Sizes) if field.default is MISSING)
    return None if None in needed else Sizes(**stated)


def _from_files(folder: Path) -> Sizes:
    files = weight_files(folder)
    if not files:
        raise KeyError("there are no safetensors to count parameters in")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config") or {}  # of multimodal models
    if any(name.startswith(_OF_STATES) for name in config):
        raise KeyError("these numbers do not determine the memory of states")

    def first(*names: str) -> int:
        return next(int(config[name]) for name in names if config.get(name) is not None)

    try:
        shapes = [tensor["shape"] for file in files for tensor in _tensors(file)]
        num_heads = first("num_attention_heads", "n_head")
        hidden_size = first("hidden_size", "n_embd")
        return Sizes(
            num_params=sum(map(math.prod, shapes)),
            num_layers=first("num_hidden_layers", "n_layer"),
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            context_len=first("max_position_embeddings", "n_positions"),
            # Embeddings and the last layer, which are stored once if they are tied.
            num_embedding_params=sum(map(math.prod, (s for s in shapes if s == [first("vocab_size"), hidden_size]))),
        )
    except StopIteration:
        raise KeyError("a size is missing") from None


def weight_files(folder: Path) -> list[Path]:
    """Weight files that Transformers loads, as far as they exist. Some folders hold the weights twice: in another type,
    or for other programs. Raises OSError, ValueError, KeyError: their index is damaged."""
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if (folder / INDEX).exists():
        return [path for name in indexed_files(folder / INDEX) if (path := folder / name).exists()]
    return sorted(folder.glob("*.safetensors"))


def indexed_files(index: Path) -> list[str]:
    """Names of the files in an index of weights."""
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def only_type(files: list[Path]) -> str | None:
    """Type of all numbers in safetensors files, as they name it ("BF16"); None if there are several."""
    types = {tensor["dtype"] for file in files for tensor in _tensors(file)}
    return types.pop() if len(types) == 1 else None


def _tensors(file: Path) -> list[dict[str, Any]]:
    """Tensors of a safetensors file, from its header: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is damaged")
        header = json.loads(stream.read(length))
    return [tensor for name, tensor in header.items() if name != "__metadata__"]


def skeleton(config: Any, dtype: torch.dtype) -> Any:
    """Model without weight values, if the surrounding mode or device creates none (fake, or meta)."""
    from transformers.initialization import no_init_weights

    # Some initializations read values, which do not exist. Weights are tied during initialization.
    with no_init_weights():
        model = auto_class(config.model_type, config).from_config(config, dtype=dtype, trust_remote_code=False).eval()
    model.tie_weights()
    return model


def weights_bytes(model: Any, quantization: str = "none", parallel: int = 1) -> int:
    """Bytes of the weights and buffers of a skeleton, shared ones once.

    Args:
        quantization: "none", or one of QUANTIZATIONS; a skeleton is not quantized.
        parallel: processes that share layers by the model's own plan; the result is for one of them.
    """
    from outrider.models.quantize import linear_bytes, quantizable
    from outrider.runtime.weight_tensors import stored_tensors

    layers = {} if quantization == "none" else quantizable(model, quantization)
    plan = {module for module, style in (model.tp_plan or {}).items() if not style.startswith("replicated")}
    shared = [re.compile(pattern.replace(".", r"\.").replace("*", r"\d+")) for pattern in plan]
    total, seen = 0, set()
    for name, module in model.named_modules():
        is_shared = parallel > 1 and any(pattern.fullmatch(name) for pattern in shared)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if name in layers and tensor is module.weight:
                number = linear_bytes(quantization, module)
            else:
                number = sum(inner.numel() * inner.element_size() for inner in stored_tensors(tensor))
            total += number // parallel if is_shared else number
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
    """Refuse a model whose weights do not fit.

    Args:
        needed: bytes of its weights.
        device_map, limits: ``device_map`` and ``max_memory`` of ``from_pretrained``.

    Raises:
        DeviceError: with the numbers.
    """
    where, free = _room(device, device_map, limits)
    if free is not None and needed > free:
        raise DeviceError(
            f"the weights of {name} need {size_text(needed)} on {where}, where {size_text(free)} are free: choose "
            "fewer bits (--quantize, --dtype; 'outrider models --target' has the sizes), or spread it over several "
            "devices (--device-map)"
        )


def _room(
    device: torch.device, device_map: str | Mapping[str, str] | None, limits: Mapping[int | str, str] | None
) -> tuple[str, int | None]:
    """Devices in words, and their free bytes; None if unknown."""
    import torch

    if device_map is None:
        return str(device), available_bytes(device)
    if isinstance(device_map, str):
        from accelerate.utils import get_max_memory

        # By Accelerate's account: free memory of each device and the CPU, or the limits.
        free = get_max_memory(None if limits is None else dict(limits))
        return "all devices together", sum(size for place, size in free.items() if place != "disk")
    known = [available_bytes(torch.device(name)) for name in sorted(set(device_map.values()))]
    return "the devices of its map", None if None in known else sum(filter(None, known))
