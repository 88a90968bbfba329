"""SlotCache: keys and values at fixed places, so that rolling back costs nothing.

Each sequence has a row (slot) of a preallocated block, and the token at position j has place j in it, for good. A
forward writes its tokens at their own positions and sees, through the mask, only the places up to them. Rejected tokens
stay where they are: they lie beyond every later query until something else is written over them. So there is no length
to keep and nothing to crop, rows may be of different lengths, and shapes stay the same.

This is the only file that knows the cache classes of Hugging Face. It does not know masks (lm.py) or rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.errors import DeviceError
from outrider.system.available import available_bytes, size_text


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token: H keys of ``key_dim`` and H values of ``value_dim`` numbers."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def layer_shapes(model: Any, device: torch.device) -> tuple[LayerShape, ...]:
    """Learned from what the model puts into a cache of its own; configurations do not state all of it."""
    with torch.inference_mode():
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=True)
    if output.past_key_values is None:
        raise ValueError("it gives back no keys and values")
    shapes = []
    for layer in output.past_key_values.layers:
        _, num_heads, _, key_dim = layer.keys.shape
        shapes.append(LayerShape(num_heads, key_dim, layer.values.shape[-1], layer.keys.dtype, layer.keys.device))
    return tuple(shapes)


def _check_room(shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> None:
    """Raises DeviceError: there is no memory for a cache, on one of the devices of the layers."""
    needed: dict[torch.device, int] = {}
    for shape in shapes:
        needed[shape.device] = needed.get(shape.device, 0) + shape.bytes_per_token * (capacity + 1) * num_rows
    for device, size in needed.items():
        free = available_bytes(device)
        if free is not None and size > free:
            raise DeviceError(
                f"a cache for {num_rows} rows of {capacity} tokens needs {size_text(size)} on {device}, where "
                f"{size_text(free)} are free: choose fewer rows or tokens, or leave more room (--max-memory)"
            )


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

    def __init__(self, plan: Plan, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._plan = plan
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a slot layer is made with its storage")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, D] at the positions announced by ``SlotCache.at``; give back all places in view."""
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, store: Tensor, states: Tensor) -> Tensor:
        places = self._plan.places.to(store.device)
        store.flatten(0, 1).index_copy_(0, places, states.transpose(1, 2).flatten(0, 1))
        return store[:, : self._plan.view_len].transpose(1, 2)  # [B, H, view_len, D]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._plan.view_len, 0

    def get_seq_length(self) -> int:
        return self._plan.view_len

    def get_max_length(self) -> int:
        return self._plan.capacity


class SlotCache(Cache):
    """The cache of B sequences of at most ``capacity`` tokens.

    Attributes:
        storage: keys and values of each layer in turn, [B, L+1, H, D] each. A cache may be taken apart into these and
            put together again (see execution.py).
        capacity: L.
    """

    def __init__(self, storage: Sequence[Tensor], capacity: int) -> None:
        self.storage = tuple(storage)
        self.capacity = capacity
        self._plan = Plan(capacity, torch.empty(0, dtype=torch.long))
        pairs = zip(self.storage[0::2], self.storage[1::2], strict=True)
        super().__init__(layers=[SlotLayer(self._plan, *pair) for pair in pairs])

    @classmethod
    def empty(cls, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """A cache with nothing in it, all of its memory taken now."""
        storage = []
        for shape in shapes:
            for dim in (shape.key_dim, shape.value_dim):
                # Zeros, not empty: a masked place still takes part in 0 * value, which must not be NaN.
                size = (num_rows, capacity + 1, shape.num_heads, dim)
                storage.append(torch.zeros(size, dtype=shape.dtype, device=shape.device))
        return cls(storage, capacity)

    @classmethod
    def allocate(cls, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """The same, if there is room for it.

        Raises:
            DeviceError
        """
        _check_room(shapes, num_rows, capacity)
        return cls.empty(shapes, num_rows, capacity)

    def rows(self, begin: int, end: int) -> SlotCache:
        """The slots begin <= slot < end: a view of the same memory."""
        return SlotCache([store[begin:end] for store in self.storage], self.capacity)

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for store in self.storage:
            store[slot, :num_tokens] = store[source, :num_tokens]

    def erase(self, slot: int, begin: int = 0) -> None:
        """Write zeros over a slot from a place on. (Numbers that are not finite would spoil the next text even where it
        is masked.)"""
        for store in self.storage:
            store[slot, begin:] = 0

    def at(self, positions: Tensor, view_len: int) -> None:
        """Announce the next forward.

        Args:
            positions: of its tokens; -1 is padding. [B, T]
            view_len: above every position.
        """
        assert view_len <= self.capacity
        row_starts = torch.arange(positions.shape[0], device=positions.device)[:, None] * (self.capacity + 1)
        self._plan.places = (row_starts + torch.where(positions < 0, self.capacity, positions)).flatten()
        self._plan.view_len = view_len
