"""Admission control, and the requests that were accepted: their rows, times and results; threads that serve clients in
turn.

Whether the server accepts requests, and how many rows run or wait, per client and in all, is for the event loop alone.

Streams send a comment every 15 seconds, since proxies close a connection after a minute of silence (nginx, AWS). (vLLM
does so if configured, llama.cpp by default.)
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from outrider.decoding.fair_queue import FairQueue
from outrider.records import Chunk
from outrider.requests.engine_loop import RequestState
from outrider.serve.http_errors import too_many, unavailable
from outrider.serve.logprobs import ScoredToken

LEAST_RETRY_AFTER_S = 1
_SHARE_OF_ONE = 0.75  # of all, so that one client cannot fill the queue
_KEEP_ALIVE_S = 15.0
_MOST_UNREAD_BYTES = 2**28  # of answers that clients do not read; those under way are not cut
_BYTES_A_CHUNK = 2**12  # about the memory of one that waits

Event = tuple[int, Chunk | Exception]
"""A row's number in its ticket, and its next chunk or its error. The last chunk has a ``finish_reason``."""
_Item = TypeVar("_Item")


async def arrival(queue: asyncio.Queue[_Item]) -> _Item | None:
    """Next item; None as a keep-alive after some seconds without one."""
    try:
        async with asyncio.timeout(_KEEP_ALIVE_S):  # not wait_for, which may lose a cancellation in Python 3.11
            return await queue.get()
    except TimeoutError:
        return None


@dataclass(slots=True, eq=False)
class TicketRow:
    """One row of a ticket. Times are in seconds of one clock; 0 if not reached. The engine thread sets them before it
    sends the event.

    Attributes:
        which: the row's number in the ticket.
        submitted_s: when the row was queued.
        begun_s: when the row got a slot, set with the first tokens.
        first_s, last_s: when the first and the last tokens came.
    """

    job: RequestState
    which: int
    submitted_s: float
    begun_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """Rows of one HTTP request.

    Attributes:
        client: the sender.
        priority: within a client, the lowest number goes first.
        events: in order.
        num_open: unfinished rows, as the event loop knows.
        has_begun: tokens of one of the rows have come, as the engine thread knows.
        scored: tokens of each prompt but the first, if their log-probabilities are requested.
    """

    rows: Sequence[TicketRow]
    client: str
    priority: int
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    num_open: int = field(init=False)
    has_begun: bool = False
    scored: list[list[ScoredToken]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_open = len(self.rows)

    @property
    def num_taken(self) -> int:
        """Rows that count: the unfinished ones, then one until the answer is sent."""
        return self.num_open or min(len(self.rows), 1)


@dataclass(slots=True, eq=False)
class EngineTask:
    """Other work of the engine thread, one step between two rounds: scoring a prompt, a race.

    Attributes:
        client: the sender.
        submitted_s: when the task was queued.
        found: results of the steps, in order; then an error, or StopIteration at the end.
        has_begun: its first step is done.
        is_closed: nobody waits for it any more.
    """

    steps: Generator[Any]
    client: str
    submitted_s: float
    found: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    has_begun: bool = False
    is_closed: bool = False


class Admission:
    """The state of the server, and the accepted requests that have not ended.

    Args:
        most_rows: maximum rows, running or waiting.
        most_of_one: maximum for one client; None leaves a quarter to others.

    Attributes:
        tickets, tasks: accepted and unfinished.
        unsent: bytes of answers that are being sent, by client.
    """

    def __init__(self, most_rows: int, most_of_one: int | None) -> None:
        self.most_of_one = math.ceil(_SHARE_OF_ONE * most_rows) if most_of_one is None else min(most_of_one, most_rows)
        self.state: Literal["loading", "ready", "draining", "failed"] = "loading"
        self.tickets: set[Ticket] = set()
        self.tasks: set[EngineTask] = set()
        self._most_rows = most_rows
        self._reserved: list[str] = []  # clients of requests in preparation
        self.unsent: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Rows and tasks that are not finished, or whose answers are not sent."""
        return sum(ticket.num_taken for ticket in self.tickets) + len(self.tasks)

    def unread(self) -> Counter[str]:
        """About the bytes of answers that clients have not read, by client."""
        self.unsent = +self.unsent  # without zeros
        waiting: Counter[str] = Counter()
        for ticket in self.tickets:
            waiting[ticket.client] += _BYTES_A_CHUNK * ticket.events.qsize()
        return self.unsent + waiting

    def check_ready(self) -> None:
        """Raises Refusal: not ready."""
        if self.state == "loading":
            raise unavailable("the model is loading", LEAST_RETRY_AFTER_S)
        if self.state != "ready":
            raise unavailable("the server is shutting down", LEAST_RETRY_AFTER_S)

    def check(self, num_rows: int, client: str, retry_after_s: int) -> None:
        """Raises Refusal: not ready, or so many more rows exceed a limit."""
        self.check_ready()
        taken = [(one.client, one.num_taken) for one in self.tickets]
        taken += [(one, 1) for one in (*(task.client for task in self.tasks), *self._reserved)]
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
    def reserve(self, client: str, retry_after_s: int) -> Iterator[None]:
        """Count a request as one row while the request is prepared. Raises Refusal: see ``check``."""
        self.check(1, client, retry_after_s)
        self._reserved.append(client)
        try:
            yield
        finally:
            self._reserved.remove(client)


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
