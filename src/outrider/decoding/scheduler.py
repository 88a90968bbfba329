"""Scheduler: which requests wait, are in prefill, and generate, and in which slots. It knows no tensors.

Rows take the lowest slots, since a round runs on the first slots up to the highest one in use. The caches of a free
slot still hold the keys and values of its last sequence; a prompt of the same client that shares a prefix with it
reuses them. (Others reuse what all may know: else the count of cached tokens would confirm guesses of a client's text.)
This module decides; the engine moves the tensors.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count, takewhile
from operator import eq
from typing import NamedTuple

from outrider.decoding.batch import Row
from outrider.decoding.fair_queue import FairQueue
from outrider.records import Request


class Load(NamedTuple):
    """Numbers of rows that generate, are in prefill, or wait for a slot; and of free slots."""

    num_running: int
    num_filling: int
    num_waiting: int
    num_free_slots: int


class Scheduler:
    """Queue of requests and their slots. A row that has a slot keeps it.

    ``submit``, ``cancel``, ``load`` and ``waiting`` may be called from any thread, all else from one.
    """

    def __init__(self, slots: Slots, queue: FairQueue[Row] | None = None) -> None:
        self.slots = slots
        self.filling: deque[Row] = deque()  # rows in prefill, the one that waited longest first
        self._lock = threading.Lock()
        self._indices = count()
        self._queue: FairQueue[Row] = FairQueue() if queue is None else queue
        self._cancelled: set[int] = set()

    def submit(self, request: Request, limit: int, room: int, client: str = "", priority: int = 0) -> int:
        """Queue a request, and return its index. Arguments: see ``Row``."""
        with self._lock:
            index = next(self._indices)
            row = Row(index, request, limit, room, client, priority, submitted_s=time.perf_counter())
            self._queue.push(row, client, priority)
        return index

    def cancel(self, index: int) -> None:
        with self._lock:
            self._cancelled.add(index)

    @property
    def load(self) -> Load:
        with self._lock:
            num_filling = len(self.filling)
            return Load(self.slots.num_used - num_filling, num_filling, len(self._queue), self.slots.num_free)

    @property
    def waiting(self) -> list[int]:
        with self._lock:
            return [row.index for row in self._queue]

    @property
    def has_waiting(self) -> bool:
        return len(self._queue) > 0

    @property
    def is_idle(self) -> bool:
        return self.slots.num_used == 0 and not self.has_waiting

    def take_cancelled(self) -> set[int]:
        """Indices of the requests cancelled since the last call. Waiting requests among them are dropped; the caller
        releases the others."""
        if not self._cancelled:  # a later one is seen in the next call
            return set()
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            self._queue.remove(lambda row: row.index in cancelled)
        return cancelled

    def admit(self) -> tuple[Row, SlotAssignment] | None:
        """Give a free slot to the next row, whose prefill begins. None if there is no slot or row; or if the row shares
        the prompt of a row in prefill, for which it waits, and the others behind it."""
        with self._lock:
            row = self._queue.first(self.slots.counts)
        # Without the lock, since prompts are compared.
        if row is None or not self.slots.num_free or self.slots.waits(row, self.filling):
            return None
        with self._lock:
            found = self._queue.pop(counts=self.slots.counts)  # or a row that has come before it meanwhile
            assert found is not None
            _, row = found
            assignment = self.slots.place(row)
            self.filling.append(row)
        row.slot, row.queued_s = assignment.slot, time.perf_counter() - row.submitted_s
        return row, assignment

    def row_to_pause(self) -> Row | None:
        """The row whose slot the next row is to get, if no slot is free: the shortest row of the client with most
        slots, if that client has at least two slots more than the next row's client. None if there is no such row. (So
        nobody waits for the end of a text, as long as there are no more clients than slots.)"""
        if self.slots.num_free or self._queue.has_priority_across_clients:
            return None
        counts = self.slots.counts
        with self._lock:
            following = self._queue.first(counts)
        able = [
            row
            for row in self.slots.rows
            if following is not None
            and counts[row.client] >= counts[following.client] + 2
            and row.length - row.prompt_length >= max(LEAST_GENERATED, row.length // MOST_READ)
            and row.request.media is None  # such a prompt is read at once
        ]
        return max(able, key=lambda row: (counts[row.client], -row.length), default=None)

    def resume(self, row: Row) -> None:
        """Queue the rest of a row that has left its slot for another, before the other rows of its client."""
        num_resumed = row.request.num_resumed + row.length - row.prompt_length
        request = replace(row.request, prompt_ids=row.token_ids, num_resumed=num_resumed)
        rest = replace(row, request=request, awaited=None, num_cached=0, num_filled=0, is_done=False)
        with self._lock:
            self._queue.push(rest, row.client, row.priority, is_back=True)

    def end_prefill(self, row: Row) -> None:
        with self._lock:
            self.filling.remove(row)

    def release(self, row: Row) -> None:
        slot, row.slot, row.is_done = row.slot, -1, True
        with self._lock:
            if row in self.filling:
                self.filling.remove(row)
            self.slots.release(slot)


LEAST_SHARED = 16  # tokens; copying fewer does not pay
# A row that is paused must be read again: for each token that it has generated in its slot at most so many tokens are.
LEAST_GENERATED, MOST_READ = 64, 16


class SlotAssignment(NamedTuple):
    """The slot of a row, and the copies to make first, in this order."""

    slot: int
    moved_to: int | None  # the slot that the cache of this slot is moved to; None if it is evicted
    source: int  # the slot whose first ``num_shared`` tokens are then copied (or kept, if it is the same slot)
    num_shared: int


@dataclass(slots=True)
class _Slot:
    row: Row | None = None  # that uses the slot
    token_ids: Sequence[int] = ()  # if free, the tokens whose keys and values the slot holds
    client: str = ""  # of the row that wrote them
    last_used: int = 0  # a counter, 0 if never

    @property
    def held(self) -> Sequence[int]:
        if self.row is None:
            return self.token_ids
        row = self.row
        if row.request.media is not None:  # tokens alone do not tell its keys
            return ()
        return row.token_ids[: row.num_filled if row.num_missing else row.length - 1]


class Slots:
    """S slots. Rows are placed, released and moved down."""

    def __init__(self, num_slots: int, take_over: Callable[[int, int], int], *, shares_parts: bool = True) -> None:
        """``take_over`` maps a slot and the length of a shared prefix to how much of the prefix may be reused. With
        ``shares_parts`` a part of a prompt may be reused, not only all of it."""
        self._take_over, self._shares_parts = take_over, shares_parts
        self.common: Sequence[Sequence[int]] = ()  # prefixes that all clients may share
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
        source, num_shared = self._longest_shared(row, slot)
        moved_to = None
        own = self._slots[slot]
        if len(own.token_ids) >= LEAST_SHARED and not (num_shared and source == slot):
            evicted = min(
                (i for i, one in enumerate(self._slots) if one.row is None and not (num_shared and i == source)),
                key=lambda i: self._slots[i].last_used,
            )
            if evicted != slot:
                moved_to = evicted
                self._slots[evicted] = replace(own)
        own.row, own.token_ids, own.client = row, (), row.client
        return SlotAssignment(slot, moved_to, source, num_shared)

    def waits(self, row: Row, filling: Collection[Row]) -> bool:
        """Whether a row should wait for the prefix that one of the rows in prefill will leave: then at least half of
        its prompt need not be fed. Prompts are compared again only when that row is no longer in prefill."""
        if row.awaited in filling:
            return True
        row.awaited = None
        num_shared, longest = 0, None
        for other in filling:
            fed = _shareable(other)
            num = self._num_shared(row, fed, other.client)
            if num > num_shared and (self._shares_parts or num == len(fed)):
                num_shared, longest = num, other
        if num_shared < LEAST_SHARED:
            return False
        _, num_now = self._longest_shared(row, self.lowest_free())
        if num_shared - num_now < max(LEAST_SHARED, (len(_shareable(row)) - num_now) / 2):
            return False
        row.awaited = longest
        return True

    def _num_shared(self, row: Row, held: Sequence[int], client: str) -> int:
        prompt = _shareable(row)
        num = _num_shared(prompt, held)
        if client == row.client:
            return num
        return min(num, max((_num_shared(prompt, one) for one in self.common), default=0))

    def _longest_shared(self, row: Row, slot: int) -> tuple[int, int]:
        """The slot with the longest prefix of a row, and its length; ``slot`` and 0 if the prefix is too short."""
        if len(_shareable(row)) < LEAST_SHARED:
            return slot, 0
        shared = [self._take_over(i, self._num_shared(row, one.held, one.client)) for i, one in enumerate(self._slots)]
        source = max(range(len(self._slots)), key=lambda i: (shared[i], i == slot))
        return (source, shared[source]) if shared[source] >= LEAST_SHARED else (slot, 0)

    @property
    def rows(self) -> list[Row]:
        return [one.row for one in self._slots if one.row is not None]

    @property
    def counts(self) -> Counter[str]:
        return Counter(row.client for row in self.rows)

    def release(self, slot: int) -> None:
        """Free the slot of a row that has ended. The slot's cache stays reusable, unless the row has spoilt it."""
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


def _shareable(row: Row) -> Sequence[int]:
    """Tokens of a prompt that another row may have cached: all but the last, which is always fed; none beside images,
    since tokens alone do not tell their keys."""
    return row.request.prompt_ids[:-1] if row.request.media is None else ()


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, a, b)))
