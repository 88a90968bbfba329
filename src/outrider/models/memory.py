"""How much memory a model needs: its weights, and the cache at a given context and batch.

Sizes come from files (configuration and the headers of the weights); nothing is loaded. For models that are not on this
disk they come from what the registry states.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.models.registry import BYTES_PER_NUMBER, ModelSpec
from outrider.runtime.shape_buckets import eager_length, prepared_length


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
    # Some folders hold the weights twice, for other programs under another name.
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise KeyError("no safetensors to count the parameters in")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))

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


def _num_params(file: Path) -> int:
    """Numbers in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is damaged")
        header = json.loads(stream.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
