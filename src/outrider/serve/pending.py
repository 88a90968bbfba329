"""Requests on their way through the worker: their rows, their times, and what has become of them.

Streams do not stay silent, since proxies close a connection on which nothing has come for a minute (nginx, AWS): a
comment goes to the client every 15 seconds. (vLLM sends such lines if it is told how often, llama.cpp by default.)

This module knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outrider.records import Chunk
from outrider.request_state import RequestState

_KEEP_ALIVE_S = 15.0

Event = tuple[int, Chunk | Exception]
_Item = TypeVar("_Item")


async def arrival(queue: asyncio.Queue[_Item]) -> _Item | None:
    """The next item; None where nothing has come for a while."""
    try:
        async with asyncio.timeout(_KEEP_ALIVE_S):  # not wait_for, which may lose a cancellation in Python 3.11
            return await queue.get()
    except TimeoutError:
        return None


@dataclass(slots=True)
class Times:
    """When things happened to a row, in seconds of one clock; 0 for those that have not.

    Attributes:
        submitted_s: it was queued.
        begun_s: it got a slot.
        first_s, last_s: its first tokens and its last ones were there.
    """

    submitted_s: float
    begun_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """The rows of one HTTP request.

    Attributes:
        jobs: a row each.
        client: who asked for it.
        priority: of the rows of one client those with the lowest number go first.
        submitted_s: see ``Times``.
        times: of each row. The worker writes them, before the event that they belong to.
        events: (which row, its next chunk or its error), in order. The last chunk of a row has a ``finish_reason``.
        num_open: rows that have not ended, as the event loop knows it.
        indices: the engine's number of each row that has a slot, as the worker knows it.
        has_begun: a row of it has had a slot.
    """

    jobs: Sequence[RequestState]
    client: str
    priority: int
    submitted_s: float
    times: list[Times] = field(init=False)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    num_open: int = field(init=False)
    indices: dict[int, int] = field(default_factory=dict)
    has_begun: bool = False

    def __post_init__(self) -> None:
        self.num_open = len(self.jobs)
        self.times = [Times(self.submitted_s) for _ in self.jobs]


@dataclass(frozen=True, slots=True)
class TicketRow:
    """One row of a ticket."""

    ticket: Ticket
    which: int

    @property
    def job(self) -> RequestState:
        return self.ticket.jobs[self.which]

    @property
    def times(self) -> Times:
        return self.ticket.times[self.which]


@dataclass(slots=True, eq=False)
class EngineTask:
    """Something else that the worker does, a step between two rounds: scoring a prompt, a race.

    Attributes:
        client: who asked for it.
        submitted_s: see ``Times``.
        is_alone: it has caches of its own, so that it waits for others of this kind to end.
        found: what the steps gave, in order; then an error, StopIteration at the end.
        has_begun: a step of it has been done.
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
        """Raises StopIteration."""
        self.has_begun = True
        return next(self.steps)
