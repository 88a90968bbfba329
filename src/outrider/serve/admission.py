"""Admission control: whether the server accepts requests, and how many rows run or wait, per client and in all.

This module knows no threads: it is for the event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from outrider.serve.http_errors import too_many, unavailable
from outrider.serve.pending import EngineTask, Ticket

LEAST_RETRY_AFTER_S = 1
_SHARE_OF_ONE = 0.75  # of all, so that one client cannot fill the queue


class Admission:
    """The state of the server, and the accepted requests that have not ended.

    Args:
        most_rows: maximum rows, running or waiting.
        most_of_one: maximum for one client; None leaves a quarter to others.

    Attributes:
        tickets, tasks: accepted and unfinished.
    """

    def __init__(self, most_rows: int, most_of_one: int | None) -> None:
        self.most_of_one = math.ceil(_SHARE_OF_ONE * most_rows) if most_of_one is None else min(most_of_one, most_rows)
        self.state: Literal["loading", "ready", "draining", "failed"] = "loading"
        self.tickets: set[Ticket] = set()
        self.tasks: set[EngineTask] = set()
        self._most_rows = most_rows
        self._reserved: list[str] = []  # clients of requests in preparation

    @property
    def num_open(self) -> int:
        """Unfinished rows and tasks."""
        return sum(ticket.num_open for ticket in self.tickets) + len(self.tasks)

    def check_ready(self) -> None:
        """Raises Refusal: not ready."""
        if self.state == "loading":
            raise unavailable("the model is loading", LEAST_RETRY_AFTER_S)
        if self.state != "ready":
            raise unavailable("the server is shutting down", LEAST_RETRY_AFTER_S)

    def check(self, num_rows: int, client: str, retry_after_s: int) -> None:
        """Raises Refusal: not ready, or so many more rows exceed a limit."""
        self.check_ready()
        taken = [(one.client, one.num_open) for one in self.tickets]
        taken += [(one, 1) for one in (*(task.client for task in self.tasks), *self._reserved)]
        num_all = sum(count for _, count in taken)
        if num_all + num_rows > self._most_rows:
            message = f"the queue is full (running or waiting: {num_all}): try again later"
            raise unavailable(message, retry_after_s)
        num_own = sum(count for one, count in taken if one == client)
        if num_own + num_rows > self.most_of_one:
            message = f"{num_own} of your requests are running or waiting (limit: {self.most_of_one}): try again later"
            raise too_many(message, retry_after_s)

    @contextmanager
    def reserve(self, client: str, retry_after_s: int) -> Iterator[None]:
        """Count a request as one row while the request is prepared. Raises Refusal: see ``check``."""
        self.check(1, client, retry_after_s)
        self._reserved.append(client)
        try:
            yield
        finally:
            self._reserved.remove(client)
