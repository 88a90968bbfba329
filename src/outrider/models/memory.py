"""How much memory the weights of a model need, and the cache at a given context and batch. Nothing is loaded.

For the list of all models, sizes come from files (configuration and the headers of the weights) or, for models that are
not on this disk, from what the registry states. For one model, they come from a skeleton of it, made from its
configuration; bench/predicted_memory.py runs the loop's steps on it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.registry import BYTES_PER_NUMBER, ModelSpec
from outrider.runtime.shape_buckets import eager_length, prepared_length

if TYPE_CHECKING:
    import torch


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_STATES = ("linear_", "mamba_", "ssm_", "conv_", "layers_block_type")  # beginnings of parameters


@dataclass(frozen=True, slots=True)
class Sizes:
    """What memory follows from. ``num_params`` counts shared weights once."""

    num_params: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_len: int

    def weights_bytes(self, dtype: str) -> int:
        return self.num_params * BYTES_PER_NUMBER[dtype]

    def cache_bytes(self, dtype: str, num_tokens: int, batch_size: int, *, is_prepared: bool = False) -> int:
        """What a generation takes in one piece for the keys and values of so many sequences of so many tokens.

        Args:
            is_prepared: compiled or captured, where fewer lengths occur.
        """
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_NUMBER[dtype]
        capacity = prepared_length(num_tokens) if is_prepared else eager_length(num_tokens)
        return per_token * (capacity + 1) * batch_size  # a place in each row takes what padding writes


def sizes_of(spec: ModelSpec) -> Sizes | None:
    """None where neither files nor the registry tell."""
    if spec.path is not None:
        try:
            return _from_files(spec.path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    stated = (spec.num_params, spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.context_len)
    return Sizes(*(value for value in stated if value is not None)) if None not in stated else None


def _from_files(folder: Path) -> Sizes:
    files = weight_files(folder)
    if not files:
        raise KeyError("no safetensors to count the parameters in")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if any(name.startswith(_OF_STATES) for name in config):
        raise KeyError("the memory of states does not follow from these numbers")

    def first(*names: str) -> int:
        return next(int(config[name]) for name in names if config.get(name) is not None)

    try:
        num_heads = first("num_attention_heads", "n_head")
        hidden_size = first("hidden_size", "n_embd")
        return Sizes(
            num_params=sum(_num_params(file) for file in files),
            num_layers=first("num_hidden_layers", "n_layer"),
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            context_len=first("max_position_embeddings", "n_positions"),
        )
    except StopIteration:
        raise KeyError("a size is missing") from None


def weight_files(folder: Path) -> list[Path]:
    """Those that Transformers loads, as far as they are there. Some folders hold the weights twice: in another type, or
    for other programs. Raises OSError, ValueError, KeyError: their index is damaged."""
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if (folder / INDEX).exists():
        return [path for name in indexed(folder / INDEX) if (path := folder / name).exists()]
    return sorted(folder.glob("*.safetensors"))


def indexed(index: Path) -> list[str]:
    """The names of the files over which weights are spread."""
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def _num_params(file: Path) -> int:
    """Numbers in a safetensors file."""
    return sum(math.prod(tensor["shape"]) for tensor in _tensors(file))


def only_type(files: list[Path]) -> str | None:
    """The type of all numbers in safetensors files, in their own words ("BF16"); None if there are several."""
    types = {tensor["dtype"] for file in files for tensor in _tensors(file)}
    return types.pop() if len(types) == 1 else None


def _tensors(file: Path) -> list[dict[str, Any]]:
    """The tensors in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is damaged")
        header = json.loads(stream.read(length))
    return [tensor for name, tensor in header.items() if name != "__metadata__"]


def skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The model without its numbers, where the surrounding mode or device makes none (fake, or meta)."""
    import transformers
    from transformers.initialization import no_init_weights

    # Some initializations read numbers, of which there are none. Weights are tied where they are initialized.
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    model.tie_weights()
    return model


def weights_bytes(model: Any, dtype: torch.dtype, quantization: str = "none", parallel: int = 1) -> int:
    """Bytes of the weights and buffers of a skeleton, shared ones once.

    Args:
        dtype: of the scales.
        quantization: "none", or one of QUANTIZATIONS; a skeleton is not quantized.
        parallel: processes that share layers by the model's own plan; the result is for one of them.
    """
    from outrider.models.quantize import group_size_of, linear_bytes, quantizable
    from outrider.runtime.tensor_parts import stored_tensors

    layers = {} if quantization == "none" else quantizable(model)
    group_size = group_size_of(layers, parallel)
    plan = {module for module, style in (model.tp_plan or {}).items() if not style.startswith("replicated")}
    shared = [re.compile(pattern.replace(".", r"\.").replace("*", r"\d+")) for pattern in plan]
    total, seen = 0, set()
    for name, module in model.named_modules():
        is_shared = parallel > 1 and any(pattern.fullmatch(name) for pattern in shared)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            number = sum(inner.numel() * inner.element_size() for inner in stored_tensors(tensor))
            if name in layers and tensor is module.weight:
                number = linear_bytes(quantization, module, dtype, group_size)
            total += number // parallel if is_shared else number
    return total
