"""SlotCache: keys and values at fixed places, so that rolling back costs nothing; and states that wait at an anchor.

Each sequence has a row (slot) of a preallocated block, and the token at position j has place j in it, for good. A
forward writes its tokens at their own positions and sees, through the mask, only the places up to them. Rejected tokens
stay where they are: they lie beyond every later query until something else is written over them. So there is no length
to keep and nothing to crop, rows may be of different lengths, and shapes stay the same.

A recurrent state mixes all tokens up to one place, so it can be neither cropped nor written over. Here it waits at an
*anchor*, a position at or before the end of the committed text. A forward starts from the anchor: it feeds the tokens
since then once more, and its new tokens behind them. (So the cache remembers the ids of tokens, too, at their places.)
The state that it ends with stays only in rows where it consumed committed tokens and nothing else; padding would spoil
it as well. Then the anchor moves there. Models without states have none of this.

Where all states are inputs of convolutions, these have places as well, which later tokens use again (cache_layers.py).
There a forward starts where its tokens are, and the anchor is the lowest position from which it may.

This module does not know masks (lm.py) or rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.errors import DeviceError
from outrider.runtime.cache_layers import WINDOW, LayerShape, Plan, StateLayer, Windows, make_layers
from outrider.system.available import available_bytes, size_text

STRIDE = 8
"""A: rounds begin less than so many tokens behind the anchor. Rows further behind are advanced in whole multiples. A
large A makes the forwards of rounds wide, a small one makes many advances. Of 1, 4, 8 and 16 this one and 16 were the
fastest (benchmarks/results/states.txt)."""


def _check_room(shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> None:
    """Raises DeviceError: there is no memory for a cache, on one of the devices of the layers."""
    needed: dict[torch.device, int] = {}
    for shape in shapes:
        row_bytes = shape.bytes_per_token * (capacity + 1) + shape.bytes_per_row
        needed[shape.device] = needed.get(shape.device, 0) + row_bytes * num_rows
    for device, size in needed.items():
        free = available_bytes(device)
        if free is not None and size > free:
            raise DeviceError(
                f"a cache for {num_rows} rows of {capacity} tokens needs {size_text(size)} on {device}, where "
                f"{size_text(free)} are free: choose fewer rows or tokens, or leave more room (--max-memory)"
            )


class SlotCache(Cache):
    """The cache of B sequences of at most ``capacity`` tokens.

    Attributes:
        shapes: of the layers.
        storage: what may be taken apart into tensors, and put together again (``on``). First what is kept of each
            token, [B, L+1, H, D]: keys and values of each layer in turn, and the ids if states wait at anchors. Then
            what is kept of each row: the states, and the anchors, [B, ...].
        capacity: L.
        state_layers: those with states that wait at an anchor.
        num_token_stores: the first of ``storage``.
        bound: for programs: no row that is fed is further behind its text than so many tokens.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], storage: Sequence[Tensor], capacity: int, *, most_behind: int | None = None
    ) -> None:
        """
        Args:
            most_behind: no row is further behind its text than so many tokens. None: this is looked up in each forward,
                for which the host waits for the device.
        """
        self.shapes = tuple(shapes)
        self.storage = tuple(storage)
        self.capacity = capacity
        self._most_behind = most_behind
        self.bound = STRIDE - 1
        self._plan = Plan(capacity, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.bool))
        states = [state for shape in self.shapes for state in shape.states]
        self.num_token_stores = len(self.storage) - (len(states) + 1 if states else 0)
        self._width = max((state.width for state in states), default=0)
        self._reached = self._is_full = torch.empty(0)  # see ``from_anchors``
        self._heads: dict[int, SlotCache] = {}
        self._scratch: SlotCache | None = None
        tokens, rows = self.storage[: self.num_token_stores], self.storage[self.num_token_stores :]
        super().__init__(layers=make_layers(self.shapes, self._plan, iter(tokens), iter(rows)))
        self.state_layers = [layer for layer in self.layers if isinstance(layer, StateLayer)]

    @classmethod
    def empty(cls, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """A cache with nothing in it, all of its memory taken now."""
        # Zeros, not empty: a masked place still takes part in 0 * value, which must not be NaN.
        storage = [
            torch.zeros((num_rows, capacity + 1, shape.num_heads, dim), dtype=shape.dtype, device=shape.device)
            for shape in shapes
            if shape.num_heads
            for dim in (shape.key_dim, shape.value_dim)
        ]
        states = [(shape, state) for shape in shapes for state in shape.states]
        if states:
            device = shapes[0].device
            if not any(state.width for _, state in states):
                storage.append(torch.zeros((num_rows, capacity + 1, 1, 1), dtype=torch.long, device=device))
            storage += [
                torch.zeros((num_rows, *state.size), dtype=state.dtype, device=shape.device) for shape, state in states
            ]
            storage.append(torch.zeros(num_rows, dtype=torch.long, device=device))
        return cls(shapes, storage, capacity)

    @classmethod
    def allocate(cls, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """The same, if there is room for it.

        Raises:
            DeviceError
        """
        _check_room(shapes, num_rows, capacity)
        return cls.empty(shapes, num_rows, capacity)

    def on(self, storage: Sequence[Tensor]) -> SlotCache:
        """The same on other storage, for programs: shapes follow from the bound, not from the values of the anchors."""
        other = SlotCache(self.shapes, storage, self.capacity, most_behind=self.bound)
        other.bound = self.bound
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: one of the same form, with nothing in it."""
        num_rows = self.storage[0].shape[0] if self.storage else 0
        return _of_form, (self.shapes, num_rows, self.capacity, self.bound)

    def rows(self, begin: int, end: int) -> SlotCache:
        """The slots begin <= slot < end: a view of the same memory."""
        views = [store[begin:end] for store in self.storage]
        return SlotCache(self.shapes, views, self.capacity, most_behind=self._most_behind)

    def head(self, num_rows: int) -> SlotCache:
        """The first slots, a view that is kept."""
        if num_rows not in self._heads:
            self._heads[num_rows] = self.rows(0, num_rows)
        return self._heads[num_rows]

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """A slot now begins with the first tokens of another one, or of its own, of which it may ``take_over`` so
        many."""
        if source != slot:
            for store in self.storage[: self.num_token_stores]:
                store[slot, :num_tokens] = store[source, :num_tokens]
            for store in self.storage[self.num_token_stores :]:
                store[slot] = store[source]
        self._restart(slot, num_tokens)

    def erase(self, slot: int, begin: int = 0) -> None:
        """Write zeros over a slot from a place on. (Numbers that are not finite would spoil the next text even where it
        is masked.)"""
        for store in self.storage[: self.num_token_stores]:
            store[slot, begin:] = 0
        self._restart(slot, begin)

    def _restart(self, slot: int, num_tokens: int) -> None:
        """Where no state belongs to the tokens of a slot, it is at the beginning again."""
        if self._width and num_tokens == 0:
            self.anchors[slot] = 0
        if self.state_layers and int(self.anchors[slot]) > num_tokens:
            for store in self.storage[self.num_token_stores :]:
                store[slot] = 0

    def take_over(self, slot: int, num_tokens: int) -> int:
        """How many of the first tokens of a slot another text may begin with: all of them, or none if its states are
        beyond them."""
        has_anchor = len(self.storage) > self.num_token_stores
        return 0 if has_anchor and int(self.anchors[slot]) > num_tokens else num_tokens

    def num_spared(self, slot: int, num_tokens: int) -> int:
        """How many of the first tokens of a slot, which it holds, are not fed again: those before the anchor."""
        return min(num_tokens, int(self.anchors[slot])) if self.state_layers else num_tokens

    def at(self, positions: Tensor, view_len: int, *, is_single: bool, keeps_finite: bool = False) -> None:
        """Announce the next forward.

        Args:
            positions: of its tokens; -1 is padding. [B, T]
            view_len: above every position.
            is_single: layers with states are given single tokens.
            keeps_finite: what is not finite is written as zeros (``find_broken``).
        """
        assert view_len <= self.capacity
        self._plan.places = self._places(positions)
        self._plan.view_len = view_len
        self._plan.is_padding, self._plan.sums = positions < 0, [] if keeps_finite else None
        for layer in self.state_layers:
            layer.begin(is_single=is_single)
        if self._width:
            self._plan.windows = Windows.at(positions, self._width)
            lowest = positions.amax(dim=1) + 1 - (WINDOW - self._width)
            self.anchors.copy_(torch.maximum(self.anchors, lowest.to(self.anchors.device)))

    def kept(self, values: Tensor) -> Tensor:
        """Numbers of the tokens that are fed, on the way to a state: zeros for those that are not finite, if only
        finite ones may be kept. [B, T, D]"""
        return self._plan.kept(values, (2,))

    def find_broken(self) -> Tensor | None:
        """After a forward that kept the cache finite: the tokens with a number for it that is not. [B, T]"""
        sums, is_padding = self._plan.sums, self._plan.is_padding
        if not sums:
            return None
        return ~torch.stack([one.to(is_padding.device) for one in sums]).sum(dim=0).isfinite() & ~is_padding

    # The same for all layers: some models ask for it by a layer that has no attention.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._plan.view_len

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._plan.view_len, 0

    def _places(self, positions: Tensor) -> Tensor:
        """Indices into the flattened [B * (L+1)] block. [B * T]"""
        row_starts = torch.arange(positions.shape[0], device=positions.device)[:, None] * (self.capacity + 1)
        return (row_starts + torch.where(positions < 0, self.capacity, positions)).flatten()

    def kept_of(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The stores that keep something of each token, with the places in them of one token in each row. [B] each"""
        kept = [(store, positions) for store in self.storage[: self.num_token_stores]]
        if self._width:
            kept += [(store, positions % WINDOW) for store in self.storage[self.num_token_stores : -1]]
        return kept

    # States

    @property
    def has_states(self) -> bool:
        """Whether some wait at anchors."""
        return bool(self.state_layers)

    @property
    def anchors(self) -> Tensor:
        """Tokens that the states of each row have consumed; or the lowest position where tokens may be fed. [B]"""
        return self.storage[-1]

    @property
    def _ids(self) -> Tensor:
        """[B, L+1]"""
        return self.storage[self.num_token_stores - 1][:, :, 0, 0]

    def remember(self, ids: Tensor, positions: Tensor) -> None:
        """Note tokens that will be fed from the anchors on. [B, T] each"""
        self.storage[self.num_token_stores - 1].view(-1).index_copy_(0, self._places(positions), ids.flatten())

    def num_columns(self, positions: Tensor, least: int) -> int:
        """How wide a forward from the anchors must be to feed tokens up to these positions. [B, T]"""
        if self._most_behind is None:
            return max(least, int((positions.amax(dim=1) + 1 - self.anchors).amax()))
        self._most_behind += positions.shape[1]
        return max(least, self._most_behind)

    def from_anchors(self, lasts: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Announce that a forward feeds the remembered tokens from the anchors up to a position, -1 for none. [B]

        Returns:
            ids and positions, -1 for padding [B, W]
        """
        self._reached = self.anchors + width
        self._is_full = lasts + 1 == self._reached
        positions = self.anchors[:, None] + torch.arange(width, device=lasts.device)
        ids = self._ids.gather(1, positions.clamp_max(self.capacity))
        return ids, torch.where(positions <= lasts[:, None], positions, -1)

    def settle(self, num_committed: Tensor) -> None:
        """After a forward: its states stay in rows where all that they consumed is committed.

        Args:
            num_committed: tokens of each row that were fed, and are committed. [B]
        """
        if not self.state_layers:
            return
        is_kept = self._is_full & (self._reached <= num_committed.to(self._reached.device))
        if self._most_behind is None and not bool(is_kept.any()):
            return
        for layer in self.state_layers:
            layer.settle(is_kept)
        self.anchors.copy_(torch.where(is_kept, self._reached, self.anchors))

    def scratch(self) -> SlotCache:
        """A cache over the same keys, values and ids, with states of its own, which are as these are now. There is one,
        at fixed places: what is recorded for it can be used again."""
        states = self.storage[self.num_token_stores :]
        if self._scratch is None:
            storage = (*self.storage[: self.num_token_stores], *map(torch.empty_like, states))
            self._scratch = SlotCache(self.shapes, storage, self.capacity, most_behind=self._most_behind)
        for own, state in zip(self._scratch.storage[self.num_token_stores :], states, strict=True):
            own.copy_(state)
        return self._scratch


def _of_form(shapes: Sequence[LayerShape], num_rows: int, capacity: int, bound: int) -> SlotCache:
    cache = SlotCache.empty(shapes, num_rows, capacity)
    cache.bound = bound
    return cache.on(cache.storage)
