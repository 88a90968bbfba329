"""Attention masks, built from positions alone: in a SlotCache a token's index is its position. A model may mix layer
types (full, sliding-window, chunked)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class Visibility:
    """Kinds of attention in a model."""

    layer_types: tuple[str, ...]  # the types of the model's attention layers
    window: int | None  # number of tokens that a token sees in sliding attention, itself included
    chunk: int | None  # size of the chunks in chunked attention, where a token sees its own chunk up to itself
    ignored_window: int | None = None  # a window that the configuration states and the modelling code does not apply

    @classmethod
    def of(cls, model: Any) -> Visibility:
        config = model.config.get_text_config(decoder=True)
        window: int | None = getattr(config, "sliding_window", None)
        chunk: int | None = getattr(config, "attention_chunk_size", None)
        layer_types = set(getattr(config, "layer_types", None) or ())
        ignored_window = None
        if not layer_types:
            # A configuration may state a window that the modelling code ignores.
            homes = {type(module).__module__ for module in model.modules()}
            makes_windows = any("create_sliding_window_causal_mask" in vars(sys.modules[home]) for home in homes)
            is_windowed = window is not None and makes_windows
            layer_types = {"sliding_attention" if is_windowed else "full_attention"}
            if not is_windowed and hasattr(type(config), "sliding_window"):  # a field of its type, not a stray one
                ignored_window = window
        # Layers without attention need no mask: padding is at the end only.
        return cls(tuple(sorted(layer_types & _ATTENDING or {"full_attention"})), window, chunk, ignored_window)

    def masks(self, positions: Tensor, view_len: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive masks: 0 for visible keys, the lowest number for hidden ones. [B, 1, T, view_len] Eager attention
        adds the mask; scaled-dot-product attention takes either form. Models with several layer types take a dictionary
        by type, the others one tensor."""
        places = torch.arange(view_len, device=positions.device)
        queries = positions[..., None]
        masks = {}
        for layer_type in self.layer_types:
            is_hidden = places > queries  # [B, T, view_len]
            if layer_type == "sliding_attention":
                assert self.window is not None
                is_hidden = is_hidden | (places <= queries - self.window)
            elif layer_type == "chunked_attention":
                assert self.chunk is not None
                is_hidden = is_hidden | (places // self.chunk != queries // self.chunk)
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=positions.device)
            masks[layer_type] = mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None]
        return masks if len(masks) > 1 else masks[self.layer_types[0]]
