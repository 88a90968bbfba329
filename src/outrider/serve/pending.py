"""Requests handed to the engine thread: their rows, times and results.

Streams send a comment every 15 seconds, since proxies close a connection after a minute of silence (nginx, AWS). (vLLM
does so if configured, llama.cpp by default.)

This module knows neither the engine nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outrider.records import Chunk
from outrider.requests.state import RequestState
from outrider.serve.scoring import ScoredToken

_KEEP_ALIVE_S = 15.0

Event = tuple[int, Chunk | Exception]
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
        submitted_s: when the rows were queued.
        events: (row's number, its next chunk or its error), in order. The last chunk of a row has a ``finish_reason``.
        num_open: unfinished rows, as the event loop knows.
        has_begun: tokens of one of the rows have come, as the engine thread knows.
        scored: tokens of each prompt but the first, if their log-probabilities are requested.
    """

    rows: Sequence[TicketRow]
    client: str
    priority: int
    submitted_s: float
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    num_open: int = field(init=False)
    has_begun: bool = False
    scored: list[list[ScoredToken]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_open = len(self.rows)


@dataclass(slots=True, eq=False)
class EngineTask:
    """Other work of the engine thread, one step between two rounds: scoring a prompt, a race.

    Attributes:
        client: the sender.
        submitted_s: when the task was queued.
        is_alone: it allocates its own caches, so only one such task runs at a time.
        found: results of the steps, in order; then an error, or StopIteration at the end.
        has_begun: its first step is done.
        is_closed: nobody waits for it any more.
    """

    steps: Generator[Any]
    client: str
    submitted_s: float
    is_alone: bool = False
    found: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    has_begun: bool = False
    is_closed: bool = False

    def step(self) -> Any:
        """Run one step. Raises StopIteration."""
        self.has_begun = True
        return next(self.steps)
