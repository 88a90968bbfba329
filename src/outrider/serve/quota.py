"""Admission control: how many rows of a model are running or waiting, per client and in all.

This module knows no threads: it is for the event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from outrider.serve.http_errors import too_many, unavailable
from outrider.serve.pending import EngineTask, Ticket

_SHARE_OF_ONE = 0.75  # of all, so that one client cannot fill the queue


class Quota:
    """Accepted requests that have not ended.

    Args:
        most_rows: maximum rows, running or waiting.
        most_of_one: maximum for one client; None leaves a quarter to others.

    Attributes:
        tickets, works: accepted and unfinished.
        places: clients of requests in preparation: see ``place``.
    """

    def __init__(self, most_rows: int, most_of_one: int | None) -> None:
        self.most_of_one = math.ceil(_SHARE_OF_ONE * most_rows) if most_of_one is None else min(most_of_one, most_rows)
        self.tickets: set[Ticket] = set()
        self.works: set[EngineTask] = set()
        self._most_rows = most_rows
        self.places: list[str] = []

    @property
    def num_open(self) -> int:
        """Unfinished rows and tasks."""
        return sum(ticket.num_open for ticket in self.tickets) + len(self.works)

    def check(self, num_rows: int, client: str, retry_after_s: int) -> None:
        """Raises Refusal if so many more rows exceed a limit."""
        taken = [(one.client, one.num_open) for one in self.tickets]
        taken += [(one, 1) for one in (*(work.client for work in self.works), *self.places)]
        num_all = sum(count for _, count in taken)
        if num_all + num_rows > self._most_rows:
            message = f"the queue is full (running or waiting: {num_all}): try again later"
            raise unavailable(message, retry_after_s)
        num_own = sum(count for one, count in taken if one == client)
        if num_own + num_rows > self.most_of_one:
            message = f"{num_own} of your requests are running or waiting (limit: {self.most_of_one}): try again later"
            raise too_many(message, retry_after_s)


@contextmanager
def place(rooms: Sequence[Quota], client: str) -> Iterator[Callable[[Quota], None]]:
    """Reserve one row while a request is prepared: in all rooms, as long as nobody knows in which it will be. Yields a
    function that gives up the others."""
    held = list(rooms)
    for room in held:
        room.places.append(client)

    def keep(own: Quota) -> None:
        for room in held:
            if room is not own:
                room.places.remove(client)
        held[:] = [own]

    try:
        yield keep
    finally:
        for room in held:
            room.places.remove(client)
