"""SlotCache: a preallocated KV cache, where rolling back costs nothing; and recurrent states, kept at an anchor.

Each sequence has a row (slot), and the token at position j is always stored at index (place) j. A forward writes its
tokens at their positions; the mask hides all later places. Rejected tokens are not removed: they lie beyond every
query until they are overwritten. So there is no length to keep, nothing to crop, rows may differ in length, and shapes
are static.

A recurrent state mixes all earlier tokens, so it can be neither cropped nor overwritten. It is kept at an *anchor*, a
position at or before the end of the committed sequence. A forward starts from the anchor and feeds the tokens since
then again, followed by the new ones (so the cache also stores token ids). Its final state is kept only in rows where it
consumed committed tokens and nothing else, not even padding; the anchor then moves there. Models without recurrent
states have none of this.

If all states are inputs of convolutions, these are stored by position in a ring buffer (cache_layers.py). Then a
forward starts at its own tokens, and the anchor is the lowest position at which it may start. So it is with the native
engine, which stores the inputs of its recurrences likewise: from the states at the anchor it consumes these again, not
the tokens (kernels/recurrence.h), and moves the anchor itself.

This module does not know masks (lm.py) or rounds.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outrider.errors import DeviceError
from outrider.runtime.cache_shapes import WINDOW, Feed, LayerShape, windows_at
from outrider.system.ranks import any_process, in_all_processes
from outrider.system.resources import available_bytes, memory_errors, size_text

STRIDE = 8
"""A: a round begins fewer than A tokens behind its sequence. Rows further behind are advanced by multiples of A. A
large A widens the forwards of rounds, a small A needs many advances. Of 1, 4, 8 and 16, 8 and 16 were the fastest
(benchmarks/results/states.txt)."""


def _sparse_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only where they are written to (on the CPU, except on Windows)."""
    plain, number = torch.empty(0, dtype=dtype, device=device), math.prod(shape)
    is_plain = plain.device.type == "cpu" and type(plain) is Tensor  # not fake
    if sys.platform == "win32" or not is_plain or number * dtype.itemsize < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, number * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=number).view(shape)


class SlotCache:
    """KV cache and states of B sequences of at most ``capacity`` tokens, L.

    Its ``storage`` (``on`` builds a cache over another) has first the tensors per token, [B, L+1, H, D]: keys and
    values of each layer in turn, and the ids if states are kept at anchors. Then those per row: the states and the
    anchors, [B, ...]; or the offsets of positions, [B]."""

    def __init__(
        self, shapes: Sequence[LayerShape], storage: Sequence[Tensor], capacity: int, *, most_behind: int | None = None
    ) -> None:
        # ``most_behind``: the most tokens that a row is behind its sequence. None: each forward reads this from the
        # anchors, which synchronizes host and device.
        self.shapes = tuple(shapes)
        self.storage = tuple(storage)
        self.capacity = capacity
        self._most_behind = most_behind
        self.bound = STRIDE - 1  # the most tokens that a fed row is behind its sequence, for recorded steps
        self.twin_key: int | None = None
        self._plan = Feed(capacity, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.bool))
        states = [state for shape in self.shapes for state in shape.states]
        self._has_offsets = any(shape.has_offset for shape in self.shapes)
        self.num_token_stores = len(self.storage) - (len(states) + 1 if states else int(self._has_offsets))
        self._width = max((state.width for state in states), default=0)
        self._reached = self._is_full = torch.empty(0)  # see ``from_anchors``
        self._heads: dict[int, SlotCache] = {}
        self._scratch: SlotCache | None = None
        self._states = states
        self.has_states = any(state.is_fed_again for state in states)  # fed again from the anchors on
        self.is_recurrent = any(not state.width for state in states)  # some mix all earlier tokens
        # Whether tokens before those of a forward may be rejected, so that anchors stay (see ``scratch``).
        self.is_ahead = False
        self.broken: Tensor | None = None  # tokens of a native forward that are not finite. [B, T]

    @cached_property
    def argument(self) -> Any:
        """The cache as models of Transformers take it (cache_layers.py, imported only then)."""
        from outrider.runtime.cache_layers import ModelCache

        tokens, rows = self.storage[: self.num_token_stores], self.storage[self.num_token_stores :]
        return ModelCache(self.shapes, self._plan, iter(tokens), iter(rows))

    @cached_property
    def state_layers(self) -> list[Any]:
        if not self.has_states:
            return []
        pairs = zip(self.shapes, self.argument.layers, strict=True)
        return [layer for shape, layer in pairs if any(state.is_fed_again for state in shape.states)]

    @classmethod
    def empty(cls, shapes: Sequence[LayerShape], num_rows: int, capacity: int, *, is_sparse: bool = False) -> SlotCache:
        """Allocate an empty cache. Of a sparse one little will be used: where possible, places take memory when they
        are written to."""
        # Zeros, since 0 * value of a masked place must not be NaN.
        zeros = _sparse_zeros if is_sparse else torch.zeros
        storage = [
            zeros((num_rows, capacity + 1, shape.num_heads, dim), dtype=shape.dtype, device=shape.device)
            for shape in shapes
            if shape.num_heads
            for dim in (shape.key_dim, shape.value_dim)
        ]
        states = [(shape, state) for shape in shapes for state in shape.states]
        if any(state.is_fed_again for _, state in states):
            storage.append(torch.zeros((num_rows, capacity + 1, 1, 1), dtype=torch.long, device=shapes[0].device))
        storage += [
            torch.zeros((num_rows, *state.size), dtype=state.dtype, device=shape.device) for shape, state in states
        ]
        if states or any(shape.has_offset for shape in shapes):
            storage.append(torch.zeros(num_rows, dtype=torch.long, device=shapes[0].device))  # anchors, or offsets
        return cls(shapes, storage, capacity)

    @classmethod
    @memory_errors()
    def allocate(cls, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """Allocate an empty cache. Raises DeviceError: a device of the layers lacks the memory."""
        needed: dict[torch.device, int] = {}
        for shape in shapes:
            row_bytes = shape.bytes_per_token * (capacity + 1) + shape.bytes_per_row
            needed[shape.device] = needed.get(shape.device, 0) + row_bytes * num_rows + shape.scratch_bytes
        for device, size in needed.items():
            free = available_bytes(device)
            if free is not None and size > free:
                raise DeviceError(
                    f"a cache for {num_rows} rows of {capacity} tokens needs {size_text(size)} on {device}, where "
                    f"{size_text(free)} are free: choose fewer rows or tokens, or free more memory (--max-memory)"
                )
        return cls.empty(shapes, num_rows, capacity)

    def on(self, storage: Sequence[Tensor]) -> SlotCache:
        """Cache over other storage, for programs: shapes follow from the bound, not from the values of the anchors."""
        other = SlotCache(self.shapes, storage, self.capacity, most_behind=self.bound)
        other.bound, other.twin_key = self.bound, self.twin_key
        return other

    @in_all_processes
    def rows(self, begin: int, end: int | None) -> SlotCache:
        views = [store[begin:end] for store in self.storage]
        return SlotCache(self.shapes, views, self.capacity, most_behind=self._most_behind)

    def first(self, num_rows: int) -> SlotCache:
        """View of the first slots, built once."""
        if num_rows not in self._heads:
            self._heads[num_rows] = self.rows(0, num_rows)
        return self._heads[num_rows]

    def of_layers(self, layers: Sequence[int]) -> SlotCache:
        pairs = zip(self.storage[::2], self.storage[1::2], strict=False)
        stores = [next(pairs) if shape.num_heads else () for shape in self.shapes]
        shapes = [replace(self.shapes[i], states=(), has_offset=False) for i in layers]
        return SlotCache(shapes, [store for i in layers for store in stores[i]], self.capacity)

    @in_all_processes
    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """Begin a slot with the first tokens of a slot (another or itself), at most what ``take_over`` allows."""
        if source != slot:
            for store in self.storage[: self.num_token_stores]:
                store[slot, :num_tokens] = store[source, :num_tokens]
            for store in self.storage[self.num_token_stores :]:
                store[slot] = store[source]
        self._restart(slot, num_tokens)

    @in_all_processes
    def erase(self, slot: int, begin: int = 0, end: int | None = None) -> None:
        """Zero a slot from a place on, or between two. (Numbers that are not finite would spoil the next sequence even
        if masked.)"""
        for store in self.storage[: self.num_token_stores]:
            store[slot, begin:end] = 0
        self._restart(slot, begin)

    @in_all_processes
    def is_finite(self, slot: int, num_tokens: int) -> bool:
        """Whether all numbers of a slot's first tokens, and of its states, are finite."""
        kept = [store[slot, :num_tokens] for store in self.storage[: self.num_token_stores]]
        kept += [store[slot] for store in self.storage[self.num_token_stores :]]
        is_finite = all(bool(one.sum(dtype=torch.float32).isfinite()) for one in kept if one.is_floating_point())
        return not any_process(torch.tensor(not is_finite))

    def _restart(self, slot: int, num_tokens: int) -> None:
        if self._width and num_tokens == 0:
            self.anchors[slot] = 0
        if self.has_states and int(self.anchors[slot]) > num_tokens:
            for store in self.storage[self.num_token_stores :]:
                store[slot] = 0

    def take_over(self, slot: int, num_tokens: int) -> int:
        """Length of the prefix of a slot that another sequence may reuse: all of it, or 0 if its states are beyond."""
        return 0 if self.has_anchors and int(self.anchors[slot]) > num_tokens else num_tokens

    @property
    def has_anchors(self) -> bool:
        """Whether a prefix may be too short to be reused."""
        return len(self.storage) > self.num_token_stores and not self._has_offsets

    def num_spared(self, slot: int, num_tokens: int) -> int:
        """Number of cached tokens that need not be fed again: those before the anchor."""
        return min(num_tokens, int(self.anchors[slot])) if self.has_states else num_tokens

    def at(self, positions: Tensor, view_len: int, *, is_single: bool, keeps_finite: bool = False) -> None:
        """Set up the next forward, of tokens at these positions, -1 for padding [B, T], all below ``view_len``. With
        ``is_single`` layers with states are called with one token at a time; with ``keeps_finite`` zeros are written
        for numbers that are not finite (see ``find_broken``)."""
        assert view_len <= self.capacity
        self._plan.places = self._places(positions)
        self._plan.view_len = view_len
        self._plan.is_padding, self._plan.sums = positions < 0, [] if keeps_finite else None
        for layer in self.state_layers:
            layer.begin(is_single=is_single)
        if self._width:
            self._plan.windows = windows_at(positions, self._width)
            lowest = positions.amax(dim=1) + 1 - (WINDOW - self._width)
            self.anchors.copy_(torch.maximum(self.anchors, lowest.to(self.anchors.device)))

    def kept(self, values: Tensor) -> Tensor:
        """Inputs of a state, with zeros for numbers that are not finite if the cache is to stay finite. [B, T, D]"""
        return self._plan.kept(values, (2,))

    def find_broken(self) -> Tensor | None:
        """Tokens of the last forward with a number that is not finite; None if it did not check. [B, T]"""
        sums, is_padding = self._plan.sums, self._plan.is_padding
        if not sums:
            return self.broken
        return ~torch.stack([one.to(is_padding.device) for one in sums]).sum(dim=0).isfinite() & ~is_padding

    def _places(self, positions: Tensor) -> Tensor:
        """Indices into the flattened block [B * (L+1)]. [B * T]"""
        row_starts = torch.arange(positions.shape[0], device=positions.device)[:, None] * (self.capacity + 1)
        return (row_starts + torch.where(positions < 0, self.capacity, positions)).flatten()

    def kept_of(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per-token tensors, each with the indices of one token per row. [B] each"""
        kept = [(store, positions) for store in self.storage[: self.num_token_stores]]
        by_place = zip(self._states, self.storage[self.num_token_stores :], strict=False)
        return kept + [(store, positions % WINDOW) for state, store in by_place if state.width]

    @property
    def offsets(self) -> Tensor | None:
        """Differences between the positions of tokens and their places; None in models where they are always 0. [B]"""
        return self.storage[-1] if self._has_offsets else None

    @in_all_processes
    def shift(self, slot: int, offset: int) -> None:
        """Set the offset of later tokens in a slot."""
        if self._has_offsets:
            self.storage[-1][slot] = offset

    # States

    @property
    def anchors(self) -> Tensor:
        """Tokens consumed by the states of each row; or the lowest position at which tokens may be fed. [B]"""
        return self.storage[-1]

    def remember(self, ids: Tensor, positions: Tensor) -> None:
        """Store the ids of tokens that will be fed from the anchors on. [B, T] each"""
        self.storage[self.num_token_stores - 1].view(-1).index_copy_(0, self._places(positions), ids.flatten())

    def num_columns(self, positions: Tensor, least: int) -> int:
        """Width of a forward from the anchors that feeds tokens up to these positions. [B, T]"""
        if self._most_behind is None:
            return max(least, int((positions.amax(dim=1) + 1 - self.anchors).amax()))
        self._most_behind += positions.shape[1]
        return max(least, self._most_behind)

    def from_anchors(self, lasts: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Start a forward over the stored tokens from the anchors to ``lasts`` [B], -1 for none. Returns their ids and
        positions, -1 for padding [B, W]."""
        self._reached = self.anchors + width
        self._is_full = lasts + 1 == self._reached
        positions = self.anchors[:, None] + torch.arange(width, device=lasts.device)
        stored = self.storage[self.num_token_stores - 1][:, :, 0, 0]  # [B, L+1]
        ids = stored.gather(1, positions.clamp_max(self.capacity))
        return ids, torch.where(positions <= lasts[:, None], positions, -1)

    def settle(self, num_committed: Tensor) -> None:
        """Keep the states of the last forward in rows where all tokens that it consumed are committed.
        ``num_committed`` tokens of each row were fed and are. [B]"""
        if self.has_states:
            self._settle(num_committed)

    @in_all_processes
    def _settle(self, num_committed: Tensor) -> None:
        is_kept = self._is_full & (self._reached <= num_committed.to(self._reached.device))
        if self._most_behind is None and not bool(is_kept.any()):
            return
        for layer in self.state_layers:
            layer.settle(is_kept)
        self.anchors.copy_(torch.where(is_kept, self._reached, self.anchors))

    @in_all_processes
    def scratch(self) -> SlotCache:
        """Cache over the same keys, values and ids, with a copy of the current states, if it has states. There is one,
        at fixed addresses, so that recorded graphs stay valid."""
        if not self.has_states:
            if self._scratch is None:
                self._scratch = self.rows(0, None)
                self._scratch.is_ahead = True
            return self._scratch
        states = self.storage[self.num_token_stores :]
        if self._scratch is None:
            storage = (*self.storage[: self.num_token_stores], *map(torch.empty_like, states))
            self._scratch = SlotCache(self.shapes, storage, self.capacity, most_behind=self._most_behind)
        for own, state in zip(self._scratch.storage[self.num_token_stores :], states, strict=True):
            own.copy_(state)
        return self._scratch
