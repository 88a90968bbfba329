"""SlotCache: keys and values at fixed places, so that rolling back costs nothing.

Each sequence has a row (slot) of a preallocated block, and the token at position j has place j in it, for good. A
forward writes its tokens at their own positions and sees, through the mask, only the places up to them. Rejected tokens
stay where they are: they lie beyond every later query until something else is written over them. So there is no length
to keep and nothing to crop, rows may be of different lengths, and shapes stay the same.

This is the only file that knows the cache classes of Hugging Face. It does not know masks (lm.py) or rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, L+1, H, D]; the last place of a row takes what padding tokens write."""

    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def zeros(states: Tensor) -> Tensor:
            # Zeros, not empty: a masked place still takes part in 0 * value, which must not be NaN.
            num_rows, num_heads, _, head_dim = states.shape
            return states.new_zeros(num_rows, self._owner.capacity + 1, num_heads, head_dim)

        self.keys, self.values = zeros(key_states), zeros(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, D] at the positions announced by ``SlotCache.at``; give back all places in view."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, store: Tensor, states: Tensor) -> Tensor:
        places = self._owner.places.to(store.device)  # a model may be spread over devices
        store.flatten(0, 1).index_copy_(0, places, states.transpose(1, 2).flatten(0, 1))
        return store[:, : self._owner.view_len].transpose(1, 2)  # [B, H, view_len, D]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.view_len, 0

    def get_seq_length(self) -> int:
        return self._owner.view_len

    def get_max_length(self) -> int:
        return self._owner.capacity


class SlotCache(Cache):
    """The cache of B sequences of at most ``capacity`` tokens.

    Attributes:
        places: where the tokens of the next forward go, in the flattened [B * (L+1)] block.
        view_len: the next forward sees the places 0 .. view_len-1.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.view_len = 0
        self.places = torch.empty(0, dtype=torch.long)
        self._slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def at(self, positions: Tensor, view_len: int) -> None:
        """Announce the next forward.

        Args:
            positions: of its tokens; -1 is padding. [B, T]
            view_len: above every position.
        """
        assert view_len <= self.capacity
        self.view_len = view_len
        row_starts = torch.arange(positions.shape[0], device=positions.device)[:, None] * (self.capacity + 1)
        self.places = (row_starts + torch.where(positions < 0, self.capacity, positions)).flatten()

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order. [B']"""
        for layer in self._slot_layers:
            layer.keep(rows)
