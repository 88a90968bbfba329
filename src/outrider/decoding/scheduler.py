"""Scheduler: which requests wait, are in prefill, and generate, and in which slots. It knows no tensors."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import count

from outrider.decoding.batch import Row
from outrider.decoding.fair_queue import FairQueue
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
    """Queue of requests and their slots. A row that has a slot keeps it.

    ``submit``, ``cancel``, ``load`` and ``waiting`` may be called from any thread, all else from one.

    Attributes:
        slots: the rows' slots.
        filling: rows in prefill, the one that waited longest first.
    """

    def __init__(self, slots: Slots, queue: FairQueue[Row] | None = None) -> None:
        """
        Args:
            queue: decides which row gets the next slot; None: the clients in turn.
        """
        self.slots = slots
        self.filling: deque[Row] = deque()
        self._lock = threading.Lock()
        self._indices = count()
        self._queue: FairQueue[Row] = FairQueue() if queue is None else queue
        self._cancelled: set[int] = set()

    def submit(self, request: Request, limit: int, room: int, client: str = "", priority: int = 0) -> int:
        """Queue a request.

        Args:
            limit, room: see ``Row``.
            client, priority: see ``FairQueue``.

        Returns:
            Its index.
        """
        with self._lock:
            index = next(self._indices)
            self._queue.push(Row(index, request, limit, room, submitted_s=time.perf_counter()), client, priority)
        return index

    def cancel(self, index: int) -> None:
        """Cancel a request."""
        with self._lock:
            self._cancelled.add(index)

    @property
    def load(self) -> Load:
        with self._lock:
            num_filling = len(self.filling)
            return Load(self.slots.num_used - num_filling, num_filling, len(self._queue), self.slots.num_free)

    @property
    def waiting(self) -> list[int]:
        """Indices of the requests without a slot."""
        with self._lock:
            return [row.index for row in self._queue]

    @property
    def has_waiting(self) -> bool:
        return len(self._queue) > 0

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or has a slot."""
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
            row = self._queue.first()
            if row is None or not self.slots.num_free or self.slots.waits(row, self.filling):
                return None
            self._queue.pop()
            assignment = self.slots.place(row)
            self.filling.append(row)
        row.slot, row.queued_s = assignment.slot, time.perf_counter() - row.submitted_s
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
