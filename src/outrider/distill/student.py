"""A draft before training: its shape and initial weights.

A draft has the target's architecture with fewer layers and a smaller width, so that any engine that runs the target
runs the draft too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import OptionError
from outrider.models.kinds import auto_class
from outrider.models.weights import widened_weights

# Fused weights: their leading part is not composed of leading parts.
_FUSED = ("qkv", "query_key_value", "gate_up", "c_attn", "Wqkv", "att_proj")
_LAYER = re.compile(r"^(.*\.(?:layers|h|blocks)\.)(\d+)(\..*)$")  # weight names in most of Transformers


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers and widths of a draft.

    Attributes:
        intermediate_size: feed-forward width; None: in proportion to the width, as in the target.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("num_layers", self.num_layers), ("hidden_size", self.hidden_size)):
            if value < 1:
                raise OptionError(name, value, "a whole number >= 1")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise OptionError("intermediate_size", self.intermediate_size, "a whole number >= 1")


def default_shape(target_config: Any) -> Shape:
    """Shallow and wide shape: 1/16 of the layers, at least one, at its width (docs/benchmarks.md)."""
    text = target_config.get_text_config(decoder=True)
    return Shape(max(1, round(text.num_hidden_layers / 16)), text.hidden_size)


def draft_config(target_config: Any, shape: Shape) -> Any:
    """Configuration of a draft: the target's with other numbers of layers and heads, and other widths.

    Raises:
        OptionError: the width does not divide into heads, or the architecture has no feed-forward width to choose.
    """
    source = target_config.get_text_config(decoder=True)
    config = copy.deepcopy(source)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # a draft is trained in full precision
    num_heads, num_kv = source.num_attention_heads, getattr(source, "num_key_value_heads", None)
    config.num_hidden_layers = shape.num_layers
    config.hidden_size = shape.hidden_size
    config.num_attention_heads = max(1, round(num_heads * shape.hidden_size / source.hidden_size))
    if getattr(source, "head_dim", None) is None and shape.hidden_size * num_heads % source.hidden_size:
        # Heads keep their size, so that they can be copied from the target.
        raise OptionError(
            "hidden_size", shape.hidden_size, f"a multiple of {head_size(source)}, the target's head size"
        )
    if num_kv is not None:
        # As many query heads per key head as in the target, if divisible; otherwise one.
        per_key = num_heads // num_kv
        is_whole = config.num_attention_heads % per_key == 0
        config.num_key_value_heads = config.num_attention_heads // (per_key if is_whole else 1)
    if getattr(source, "intermediate_size", None) is not None:
        in_proportion = max(16, round(source.intermediate_size * shape.hidden_size / source.hidden_size / 16) * 16)
        config.intermediate_size = shape.intermediate_size or in_proportion
    elif shape.intermediate_size is not None:
        raise OptionError(
            "intermediate_size", shape.intermediate_size, f"{source.model_type} has no such parameter: leave it out"
        )
    if getattr(source, "layer_types", None):
        config.layer_types = [source.layer_types[i] for i in kept_layers(source.num_hidden_layers, shape.num_layers)]
    return config


def head_size(config: Any) -> int:
    """Size of a key vector."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def kept_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """Indices of the target's layers that initialise a draft: evenly spaced, including the first and the last."""
    if num_layers == 1:
        return [0]
    return [round(i * (num_target_layers - 1) / (num_layers - 1)) for i in range(num_layers)]


def new_draft(target_config: Any, shape: Shape, seed: int) -> Any:
    """Create a draft with random weights, in float32."""
    with torch.random.fork_rng(devices=[]):  # weights are created on the CPU
        torch.manual_seed(seed)
        config = draft_config(target_config, shape)
        auto = auto_class("the draft", config)
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model


@torch.no_grad()
def copy_slices(target: Any, draft: Any) -> None:
    """Initialise from the target: the leading part of every weight, from some of its layers.

    The leading features and heads of the target become those of the draft. That is not a good model, but a better start
    than random weights (its embeddings relate to each other like the target's).

    Raises:
        OptionError: some of the target's weights cannot be sliced.
    """
    source = widened_weights(target)
    num_target = target.config.get_text_config(decoder=True).num_hidden_layers
    layers = kept_layers(num_target, draft.config.num_hidden_layers)
    parts: dict[str, Tensor] = {}
    for name, weight in draft.state_dict().items():
        whole = source.get(_source_name(name, layers))
        is_fused = any(part in name for part in _FUSED) and whole is not None and whole.shape != weight.shape
        if whole is None or is_fused or not whole.is_floating_point() or not _fits(whole.shape, weight.shape):
            raise OptionError(
                "init", "target", f"{type(target).__name__} has nothing to copy for the draft's {name}: use scratch"
            )
        parts[name] = whole[tuple(slice(size) for size in weight.shape)]
    draft.load_state_dict(parts)


def _source_name(name: str, layers: Sequence[int]) -> str:
    match = _LAYER.match(name)
    return name if match is None else f"{match[1]}{layers[int(match[2])]}{match[3]}"


def _fits(source: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(source) == len(wanted) and all(a >= b for a, b in zip(source, wanted, strict=True))
