"""Slots: who is where, and which texts the free ones remember.

Rows keep to the bottom, since a round runs on the first slots up to the highest one in use. The caches of a free slot
still hold the keys and values of its last text; a prompt that begins like it takes them over. This module decides; the
engine moves the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from outrider.decoding.batch import Row

LEAST_SHARED = 16  # tokens; to copy fewer is not worth the while


class SlotAssignment(NamedTuple):
    """Where a row goes, and the copies to make before, in this order.

    Attributes:
        slot: the row's.
        moved_to: where the memory of this slot is moved first; None if it is given up.
        source: the slot whose first ``num_shared`` tokens are then copied (or stay, if it is the same slot).
    """

    slot: int
    moved_to: int | None
    source: int
    num_shared: int


@dataclass(slots=True)
class _Slot:
    """
    Attributes:
        row: in use by it.
        token_ids: where free, the tokens whose keys and values it holds.
        last_used: a counter, 0 where never.
    """

    row: Row | None = None
    token_ids: Sequence[int] = field(default_factory=tuple)
    last_used: int = 0

    @property
    def held(self) -> Sequence[int]:
        """The tokens that the target's cache holds for certain."""
        if self.row is None:
            return self.token_ids
        row = self.row
        return row.token_ids[: row.num_filled if row.num_missing else row.length - 1]


class Slots:
    """S slots. Rows are put in, taken out and moved down."""

    def __init__(self, num_slots: int, take_over: Callable[[int, int], int]) -> None:
        """
        Args:
            take_over: how many of the first tokens that a slot holds another text may begin with.
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
        """Put a row into the lowest free slot. The memory that is given up for it is the least recently used of all
        free slots."""
        slot = heappop(self._free)
        source, num_shared = self._longest_shared(row.request.prompt_ids[:-1], slot)  # the last token is always fed
        moved_to = None
        mine = self._slots[slot]
        if len(mine.token_ids) >= LEAST_SHARED and not (num_shared and source == slot):
            given_up = min(
                (i for i, one in enumerate(self._slots) if one.row is None and not (num_shared and i == source)),
                key=lambda i: self._slots[i].last_used,
            )
            if given_up != slot:
                moved_to = given_up
                self._slots[given_up].token_ids, self._slots[given_up].last_used = mine.token_ids, mine.last_used
        mine.row, mine.token_ids = row, ()
        return SlotAssignment(slot, moved_to, source, num_shared)

    def _longest_shared(self, prompt: Sequence[int], slot: int) -> tuple[int, int]:
        """The slot that shares most tokens with a prompt, and their number; ``slot`` and 0 if there are too few."""
        if len(prompt) < LEAST_SHARED:
            return slot, 0
        shared = [self._take_over(i, _num_shared(prompt, one.held)) for i, one in enumerate(self._slots)]
        source = max(range(len(self._slots)), key=lambda i: (shared[i], i == slot))
        return (source, shared[source]) if shared[source] >= LEAST_SHARED else (slot, 0)

    def release(self, slot: int) -> None:
        """The row has ended. Its text is remembered, unless it is spoilt."""
        self._count += 1
        one = self._slots[slot]
        assert one.row is not None
        one.token_ids = () if one.row.is_spoilt else one.held
        one.row, one.last_used = None, self._count
        heappush(self._free, slot)

    def move(self, source: int, slot: int) -> None:
        """Move a row to a free slot, whose memory is given up."""
        self._slots[slot], self._slots[source] = self._slots[source], _Slot()
        self._free.remove(slot)
        heapify(self._free)
        heappush(self._free, source)

    def num_held(self, slot: int) -> int:
        """Tokens that a slot holds for certain."""
        return len(self._slots[slot].held)


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(bool, map(eq, a, b)))
