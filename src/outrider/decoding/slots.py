"""Slots: which row has which slot, and the prefixes cached in free slots.

Rows take the lowest slots, since a round runs on the first slots up to the highest one in use. The caches of a free
slot still hold the keys and values of its last sequence; a prompt that shares a prefix with it reuses them. This module
decides; the engine moves the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from outrider.decoding.batch import Row

LEAST_SHARED = 16  # tokens; copying fewer does not pay


class SlotAssignment(NamedTuple):
    """The slot of a row, and the copies to make first, in this order.

    Attributes:
        slot: the row's.
        moved_to: the slot that the cache of this slot is moved to; None if it is evicted.
        source: the slot whose first ``num_shared`` tokens are then copied (or kept, if it is the same slot).
    """

    slot: int
    moved_to: int | None
    source: int
    num_shared: int


@dataclass(slots=True)
class _Slot:
    """
    Attributes:
        row: the row that uses it.
        token_ids: if free, the tokens whose keys and values it holds.
        last_used: a counter, 0 if never.
    """

    row: Row | None = None
    token_ids: Sequence[int] = field(default_factory=tuple)
    last_used: int = 0

    @property
    def held(self) -> Sequence[int]:
        """The tokens that are in the target's cache for certain."""
        if self.row is None:
            return self.token_ids
        row = self.row
        return row.token_ids[: row.num_filled if row.num_missing else row.length - 1]


class Slots:
    """S slots. Rows are placed, released and moved down."""

    def __init__(self, num_slots: int, take_over: Callable[[int, int], int]) -> None:
        """
        Args:
            take_over: (slot, length of a shared prefix) -> how much of it may be reused.
        """
        self._take_over = take_over
        self._slots = [_Slot() for _ in range(num_slots)]
        self._free = list(range(num_slots))  # a heap
        self._count = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._slots) - self.num_free

    @property
    def height(self) -> int:
        """One more than the highest slot in use."""
        return max((i + 1 for i, slot in enumerate(self._slots) if slot.row is not None), default=0)

    def lowest_free(self) -> int:
        return self._free[0]

    def place(self, row: Row) -> SlotAssignment:
        """Put a row into the lowest free slot. Evicts the least recently used cache of all free slots."""
        slot = heappop(self._free)
        source, num_shared = self._longest_shared(row.request.prompt_ids[:-1], slot)  # the last token is always fed
        moved_to = None
        own = self._slots[slot]
        if len(own.token_ids) >= LEAST_SHARED and not (num_shared and source == slot):
            evicted = min(
                (i for i, one in enumerate(self._slots) if one.row is None and not (num_shared and i == source)),
                key=lambda i: self._slots[i].last_used,
            )
            if evicted != slot:
                moved_to = evicted
                self._slots[evicted].token_ids, self._slots[evicted].last_used = own.token_ids, own.last_used
        own.row, own.token_ids = row, ()
        return SlotAssignment(slot, moved_to, source, num_shared)

    def _longest_shared(self, prompt: Sequence[int], slot: int) -> tuple[int, int]:
        """The slot that shares the longest prefix with a prompt, and its length; ``slot`` and 0 if it is too short."""
        if len(prompt) < LEAST_SHARED:
            return slot, 0
        shared = [self._take_over(i, _num_shared(prompt, one.held)) for i, one in enumerate(self._slots)]
        source = max(range(len(self._slots)), key=lambda i: (shared[i], i == slot))
        return (source, shared[source]) if shared[source] >= LEAST_SHARED else (slot, 0)

    def release(self, slot: int) -> None:
        """Free the slot of a row that has ended. Its cache stays reusable, unless it is spoilt."""
        self._count += 1
        one = self._slots[slot]
        assert one.row is not None
        one.token_ids = () if one.row.is_spoilt else one.held
        one.row, one.last_used = None, self._count
        heappush(self._free, slot)

    def move(self, source: int, slot: int) -> None:
        """Move a row to a free slot, whose cache is evicted."""
        self._slots[slot], self._slots[source] = self._slots[source], _Slot()
        self._free.remove(slot)
        heapify(self._free)
        heappush(self._free, source)

    def num_held(self, slot: int) -> int:
        """Number of tokens in the slot's cache for certain."""
        return len(self._slots[slot].held)


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(bool, map(eq, a, b)))
