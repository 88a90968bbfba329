"""Admission control; threads that serve clients in turn.

Whether the server accepts requests, and how many rows run or wait, per client and in all, is for the event loop alone.

Streams send a comment every 15 seconds, since proxies close a connection after a minute of silence (nginx, AWS). (vLLM
does so if configured, llama.cpp by default.)
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from outrider.decoding.fair_queue import FairQueue
from outrider.requests.async_session import Ticket
from outrider.serve.http_errors import too_many, unavailable

LEAST_RETRY_AFTER_S = 1
_SHARE_OF_ONE = 0.75  # of all, so that one client cannot fill the queue
_KEEP_ALIVE_S = 15.0
_MOST_UNREAD_BYTES = 2**28  # of answers that clients do not read; those under way are not cut
_BYTES_A_CHUNK = 2**12  # about the memory of one that waits

_Item = TypeVar("_Item")


async def arrival(ticket: Ticket) -> tuple[int, Any] | None:
    """Next result; None as a keep-alive after some seconds without one."""
    try:
        async with asyncio.timeout(_KEEP_ALIVE_S):  # not wait_for, which may lose a cancellation in Python 3.11
            return await ticket.arrived.get()
    except TimeoutError:
        return None


class Admission:
    """The state of the server, and the tickets of accepted requests and other work that have not ended. There are
    limits of rows, running or waiting, in all and of one client (None leaves a quarter to others). ``unsent`` has the
    bytes of answers that are being sent, by client."""

    def __init__(
        self, most_rows: int, most_of_one: int | None, tickets: Set[Ticket], retry_after_s: Callable[[], int]
    ) -> None:
        self.most_of_one = math.ceil(_SHARE_OF_ONE * most_rows) if most_of_one is None else min(most_of_one, most_rows)
        self.state: Literal["loading", "ready", "draining", "failed"] = "loading"
        self._most_rows, self._tickets, self._retry_after_s = most_rows, tickets, retry_after_s
        self._reserved: list[str] = []  # clients of requests in preparation
        self.unsent: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Rows and other work that are not finished, or whose answers are not sent."""
        return sum(map(_num_taken, self._tickets))

    def unread(self) -> Counter[str]:
        """About the bytes of answers that clients have not read, by client."""
        self.unsent = +self.unsent  # without zeros
        waiting: Counter[str] = Counter()
        for ticket in self._tickets:
            waiting[ticket.client] += _BYTES_A_CHUNK * ticket.arrived.qsize()
        return self.unsent + waiting

    def check_ready(self) -> None:
        """Raises Refusal: not ready."""
        if self.state == "loading":
            raise unavailable("the model is loading", LEAST_RETRY_AFTER_S)
        if self.state != "ready":
            raise unavailable("the server is shutting down", LEAST_RETRY_AFTER_S)

    def check(self, num_rows: int, client: str) -> None:
        """Raises Refusal: not ready, or so many more rows exceed a limit."""
        self.check_ready()
        retry_after_s = self._retry_after_s()
        taken = [(one.client, _num_taken(one)) for one in self._tickets] + [(one, 1) for one in self._reserved]
        num_all, num_own = (sum(count for one, count in taken if who in (None, one)) for who in (None, client))
        if num_all + num_rows > self._most_rows:
            raise unavailable(f"the queue is full (running or waiting: {num_all}): try again later", retry_after_s)
        if num_own + num_rows > self.most_of_one:
            message = f"{num_own} of your requests are running or waiting (limit: {self.most_of_one}): try again later"
            raise too_many(message, retry_after_s)
        unread = self.unread()
        if unread[client] > _SHARE_OF_ONE * _MOST_UNREAD_BYTES:
            message = f"{unread[client]} bytes of your answers wait to be read: read them, or close their connections"
            raise too_many(message, retry_after_s)
        if unread.total() > _MOST_UNREAD_BYTES:
            raise unavailable("too many bytes of answers wait to be read: try again later", retry_after_s)

    @contextmanager
    def reserve(self, client: str) -> Iterator[None]:
        """Count a request as one row while the request is prepared. Raises Refusal: see ``check``."""
        self.check(1, client)
        self._reserved.append(client)
        try:
            yield
        finally:
            self._reserved.remove(client)


def _num_taken(ticket: Ticket) -> int:
    """Rows that count: the unfinished ones, then one until the answer is sent."""
    return ticket.num_open or min(len(ticket.states), 1)


class FairThreads:
    """A few threads that serve clients in turn, and never all for the same client. For one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads, self._most_of_one = num_threads, max(num_threads - 1, 1)
        self._running: list[str] = []  # their clients
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def run(self, function: Callable[[], _Item], client: str) -> _Item:
        """Run a function and return its result. If the caller is cancelled before its turn, the function never runs."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.push(turn, client)
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(lambda one: one is turn)
            if not turn.cancelled():  # its turn has just come
                self._end(client)
            raise

        def end(work: Future[_Item]) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._end, client)

        work = self._executor.submit(function)
        work.add_done_callback(end)  # later than the caller, if the caller is cancelled
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while len(self._running) < self._num_threads:
            busy = {client for client in self._running if self._running.count(client) >= self._most_of_one}
            if (found := self._waiting.pop(busy)) is None:
                return
            client, turn = found
            if not turn.cancelled():
                self._running.append(client)
                turn.set_result(None)

    def _end(self, client: str) -> None:
        self._running.remove(client)
        self._begin()
