"""Scheduler: which requests wait, are in prefill, and generate, and in which slots. It knows no tensors."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import count

from outrider.decoding.batch import Row
from outrider.decoding.slots import SlotAssignment, Slots
from outrider.records import Request


@dataclass(frozen=True, slots=True)
class Load:
    """Numbers of rows that generate, are in prefill, or wait for a slot; and of free slots."""

    num_running: int
    num_filling: int
    num_waiting: int
    num_free_slots: int


class Scheduler:
    """Queue of requests and their slots. First come, first served; a row that has a slot keeps it.

    ``submit``, ``cancel`` and ``load`` may be called from any thread, all else from one.

    Attributes:
        slots: the rows' slots.
        filling: rows in prefill, the one that waited longest first.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.filling: deque[Row] = deque()
        self._lock = threading.Lock()
        self._indices = count()
        self._waiting: deque[Row] = deque()
        self._cancelled: set[int] = set()

    def submit(self, request: Request, limit: int, room: int) -> int:
        """Queue a request.

        Args:
            limit, room: see ``Row``.

        Returns:
            Its index.
        """
        with self._lock:
            index = next(self._indices)
            self._waiting.append(Row(index, request, limit, room))
        return index

    def cancel(self, index: int) -> None:
        """Cancel a request."""
        with self._lock:
            self._cancelled.add(index)

    @property
    def load(self) -> Load:
        with self._lock:
            num_filling = len(self.filling)
            return Load(self.slots.num_used - num_filling, num_filling, len(self._waiting), self.slots.num_free)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or has a slot."""
        return self.slots.num_used == 0 and not self._waiting

    def take_cancelled(self) -> set[int]:
        """Indices of the requests cancelled since the last call. Waiting requests among them are dropped; the caller
        releases the others."""
        if not self._cancelled:  # a later one is seen in the next call
            return set()
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            self._waiting = deque(row for row in self._waiting if row.index not in cancelled)
        return cancelled

    def admit(self) -> tuple[Row, SlotAssignment] | None:
        """Give a free slot to the row that has waited longest, whose prefill begins. None if there is no slot or row;
        or if the row shares the prompt of a row in prefill, for which it waits, and the others behind it."""
        if not (self._waiting and self.slots.num_free) or self.slots.waits(self._waiting[0], self.filling):
            return None
        with self._lock:
            row = self._waiting.popleft()
            assignment = self.slots.place(row)
            self.filling.append(row)
        row.slot = assignment.slot
        return row, assignment

    def end_prefill(self, row: Row) -> None:
        """Note that the prefill of a row is complete."""
        with self._lock:
            self.filling.remove(row)

    def release(self, row: Row) -> None:
        """Free the slot of a row that has ended or was cancelled."""
        slot, row.slot, row.is_done = row.slot, -1, True
        with self._lock:
            if row in self.filling:
                self.filling.remove(row)
            self.slots.release(slot)
