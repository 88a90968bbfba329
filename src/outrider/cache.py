"""SlotCache: keys and values at fixed places, so that rolling back costs nothing.

Each sequence has a row (slot) of a preallocated block, and the token at position j has place j in it, for good. A
forward writes its tokens at their own positions and sees, through the mask, only the places up to them. Rejected tokens
stay where they are: they lie beyond every later query until something else is written over them. So there is no length
to keep and nothing to crop, rows may be of different lengths, and shapes stay the same.

This is the only file that knows the cache classes of Hugging Face. It does not know masks (lm.py) or rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(slots=True)
class Plan:
    """What all layers need to know of the next forward. (Theirs to share: a layer that pointed back to its cache would
    keep both alive until the garbage collector comes by.)

    Attributes:
        capacity: L.
        places: where its tokens go, in the flattened [B * (L+1)] block.
        view_len: it sees the places 0 .. view_len-1.
    """

    capacity: int
    places: Tensor
    view_len: int = 0


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, L+1, H, D]; the last place of a row takes what padding tokens write."""

    is_sliding = False

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def zeros(states: Tensor) -> Tensor:
            # Zeros, not empty: a masked place still takes part in 0 * value, which must not be NaN.
            num_rows, num_heads, _, head_dim = states.shape
            return states.new_zeros(num_rows, self._plan.capacity + 1, num_heads, head_dim)

        self.keys, self.values = zeros(key_states), zeros(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, D] at the positions announced by ``SlotCache.at``; give back all places in view."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, store: Tensor, states: Tensor) -> Tensor:
        places = self._plan.places.to(store.device)
        store.flatten(0, 1).index_copy_(0, places, states.transpose(1, 2).flatten(0, 1))
        return store[:, : self._plan.view_len].transpose(1, 2)  # [B, H, view_len, D]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        if self.is_initialized:
            # A model may be spread over devices, and its layers with it.
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._plan.view_len, 0

    def get_seq_length(self) -> int:
        return self._plan.view_len

    def get_max_length(self) -> int:
        return self._plan.capacity


class SlotCache(Cache):
    """The cache of B sequences of at most ``capacity`` tokens."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self._plan = Plan(capacity, torch.empty(0, dtype=torch.long))
        self._slot_layers = [SlotLayer(self._plan) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def at(self, positions: Tensor, view_len: int) -> None:
        """Announce the next forward.

        Args:
            positions: of its tokens; -1 is padding. [B, T]
            view_len: above every position.
        """
        capacity = self._plan.capacity
        assert view_len <= capacity
        row_starts = torch.arange(positions.shape[0], device=positions.device)[:, None] * (capacity + 1)
        self._plan.places = (row_starts + torch.where(positions < 0, capacity, positions)).flatten()
        self._plan.view_len = view_len

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order. [B']"""
        for layer in self._slot_layers:
            layer.keep(rows)
