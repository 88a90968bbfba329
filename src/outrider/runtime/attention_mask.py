"""Which tokens a token sees: masks of attention, made of positions alone, since place and position are one in a
SlotCache. Models differ in their kinds of layers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class Visibility:
    """
    Attributes:
        layer_types: of a model, those with attention.
        window: in sliding attention a token sees so many tokens, itself included.
        chunk: in chunked attention it sees those of its own chunk of so many, up to itself.
        ignored_window: one that models of this type state, and their code does not apply.
    """

    layer_types: tuple[str, ...]
    window: int | None
    chunk: int | None
    ignored_window: int | None = None

    @classmethod
    def of(cls, model: Any) -> Visibility:
        config = model.config.get_text_config(decoder=True)
        window: int | None = getattr(config, "sliding_window", None)
        chunk: int | None = getattr(config, "attention_chunk_size", None)
        layer_types = set(getattr(config, "layer_types", None) or ())
        ignored_window = None
        if not layer_types:
            is_windowed = window is not None and _makes_windows(model)
            layer_types = {"sliding_attention" if is_windowed else "full_attention"}
            if not is_windowed and hasattr(type(config), "sliding_window"):  # not one that is foreign to its type
                ignored_window = window
        # Layers without attention need no mask: what is fed is padded at its end alone.
        return cls(tuple(sorted(layer_types & _ATTENDING or {"full_attention"})), window, chunk, ignored_window)

    def masks(self, positions: Tensor, view_len: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive masks: 0 where a query may look, the least number elsewhere. [B, 1, T, view_len]

        Additive, since eager attention adds what it is given; scaled-dot-product attention takes both forms. Models
        with several kinds of layers take a dictionary, by kind; the others take one tensor.
        """
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


def _makes_windows(model: nn.Module) -> bool:
    """Whether the modelling code makes masks with a sliding window. A configuration may state one that it ignores."""
    homes = {type(module).__module__ for module in model.modules()}
    return any("create_sliding_window_causal_mask" in vars(sys.modules[home]) for home in homes)
