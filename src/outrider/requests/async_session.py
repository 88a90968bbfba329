"""A session for an event loop: one thread steps the engine, and runs other work between rounds.

The event loop hands the thread functions and receives the results of all tickets, in one call for each round. Neither
waits for the other: results for a slow reader wait in memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Self

from outrider.decoding.fair_queue import FairQueue
from outrider.errors import OutriderError, SessionError
from outrider.records import Chunk, Completion
from outrider.requests.calls import GenerationCalls
from outrider.requests.engine_loop import EngineLoop, RequestState, chunk_of, collect
from outrider.requests.session import Session

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Ticket:
    """Work of one caller for the thread of a session, and the results: requests, or steps of anything else."""

    states: Sequence[RequestState] = ()
    client: str = ""  # whose turn it is, like the priority (see ``FairQueue``)
    priority: int = 0
    steps: Generator[Any] | None = None  # other work: one after each round, in turn with those of other clients
    submitted_s: float = field(default_factory=lambda: time.perf_counter())
    # In order, the number of a request and its next chunk or the error that ends it; or 0 and the result of a step, and
    # in the end StopIteration or an error:
    arrived: asyncio.Queue[tuple[int, Any]] = field(default_factory=asyncio.Queue)
    num_open: int = field(init=False)  # requests or steps that have not ended, as the event loop knows
    has_begun: bool = False  # there is a result, as the thread knows

    def __post_init__(self) -> None:
        self.num_open = len(self.states) if self.steps is None else 1


Arrived = Sequence[tuple[Ticket, int, Any]]
"""Results of one step of the thread, each as in ``Ticket.arrived``."""


class AsyncSession(
    GenerationCalls[AsyncGenerator[Chunk], Coroutine[Any, Any, list[Completion]], Coroutine[Any, Any, Completion]]
):
    """``Session`` for one event loop: a thread steps the engine, and many tasks share it. See
    ``Decoder.async_session``.

    Concurrent tasks are batched. A task that is cancelled, or closes its stream (``contextlib.aclosing``), leaves
    before the next round. Chunks for a slow reader wait in memory. Errors come from the iterator, those of options too.

    Its calls use ``start``, ``submit``, ``close`` and ``stop``, as others may that make their own requests. Use these
    and ``post`` in the event loop, and ``call`` in the thread.

    Attributes:
        tickets: those that are not closed.
    """

    def __init__(
        self,
        open_: Callable[[], Session],
        *,
        watch: Callable[[Arrived], None] = lambda arrived: None,
        fail: Callable[[BaseException], Exception] | None = None,
    ) -> None:
        """Take what opens the session, in the thread; what sees all results in the event loop, before their tickets get
        them; and what takes the error that has ended the thread, in the event loop, and returns the error of all
        tickets. Without ``fail`` errors of the engine end those alone that have requests in it; the next engine is
        new."""
        self._open, self._watch, self._fail = open_, watch, fail
        self._session: Session | None = None
        self._is_open = False
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.tickets: set[Ticket] = set()
        # Of the thread: other work, and the results of the current step.
        self._work: FairQueue[Ticket] = FairQueue()
        self._arrived: list[tuple[Ticket, int, Any]] = []

    async def __aenter__(self) -> Self:
        if self._is_open:
            raise SessionError("the session is open already: each 'async with' needs its own")
        opened = asyncio.Event()
        self.start(opened.set)
        await opened.wait()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_open = False
        self.stop()
        await asyncio.to_thread(self.join)

    async def _stream(self, *call: Any) -> AsyncGenerator[Chunk]:
        async with aclosing(self._chunks(await self._states(*call))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _complete(self, *call: Any) -> list[Completion]:
        states = await self._states(*call)
        return collect(states, [chunk async for chunk in self._chunks(states)])

    async def _only(self, completions: Awaitable[list[Completion]]) -> Completion:
        (completion,) = await completions
        return completion

    async def _states(self, *call: Any) -> list[RequestState]:
        if self._session is None:
            raise SessionError("the session is not open: use it as 'async with decoder.async_session() as session'")
        states, _ = await asyncio.to_thread(self._session._open, *call)  # tokenizing is slow
        return states

    async def _chunks(self, states: Sequence[RequestState]) -> AsyncGenerator[Chunk]:
        ticket, num_open = self.submit(Ticket(states)), len(states)
        try:
            while num_open:
                chunk = chunk_of(*await ticket.arrived.get(), len(states))
                num_open -= chunk.finish_reason is not None
                yield chunk
        finally:
            self.close(ticket)

    def start(self, opened: Callable[[], None]) -> None:
        """Start the thread. ``opened`` is called in the event loop."""
        self._loop, self._is_open = asyncio.get_running_loop(), True
        self._thread = threading.Thread(target=self._run_thread, args=(opened,), name="outrider-engine", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> Ticket:
        """Queue a ticket. The caller must ``close`` it. Raises SessionError."""
        if not self._is_open:
            raise SessionError("the session is not open any more: open another")
        self.tickets.add(ticket)
        self.post(lambda: self._submit_on_thread(ticket))
        return ticket

    def close(self, ticket: Ticket, error: Exception | None = None) -> None:
        """Cancel what has not ended, before the next round, with an error for a reader of the ticket."""
        self.tickets.discard(ticket)
        if error is not None:
            ticket.arrived.put_nowait((0, error))
        if ticket.num_open:
            ticket.num_open = 0
            self.post(lambda: self.cancel_on_thread(ticket))

    def post(self, function: Callable[[], object]) -> None:
        """Run a function in the thread, before its next step."""
        self._inbox.put(function)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, unless the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self.stop()

    def stop(self) -> None:
        """Close the session after the current step, and end the thread. May be called from any thread."""
        self._inbox.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    # In the event loop, called by the thread

    def _deliver(self, arrived: Arrived) -> None:
        self._watch(arrived)
        for ticket, number, item in arrived:
            if ticket.num_open:  # else closed meanwhile
                is_chunk = isinstance(item, Chunk)
                ticket.num_open -= isinstance(item, Exception) or (is_chunk and item.finish_reason is not None)
                ticket.arrived.put_nowait((number, item))

    def _end_all(self, error: BaseException) -> None:
        self._is_open = False
        reason = SessionError("the thread of the session has failed: open another session")
        found = reason if self._fail is None else self._fail(error)
        for ticket in list(self.tickets):
            self.close(ticket, found)

    # In the thread

    def _run_thread(self, opened: Callable[[], None]) -> None:
        try:
            self._session = self._open()
            self.call(opened)
            has_work = False
            while self._take_in(has_work):
                has_work = self._step_on_thread(self._session.loop)
        except BaseException as error:  # somebody must learn of any error: a panic of Rust is no Exception
            if self._fail is None:
                _LOG.error("the thread of a session has failed", exc_info=error)
            self.call(self._end_all, error)
        finally:
            if self._session is not None:
                self._session.close()
                self._deliver_on_thread()

    def _take_in(self, has_work: bool) -> bool:
        """Run what has been posted; wait for it when there is no work. Returns False at the end."""
        while not (has_work and self._inbox.empty()):
            if (function := self._inbox.get()) is None:
                return False
            function()
            has_work = True
        return True

    def _step_on_thread(self, loop: EngineLoop) -> bool:
        """Run one round, and a step of other work. Returns whether there is more to do."""
        try:
            has_more = loop.step()
        except BaseException as error:  # SystemExit of a hook, too. All rows have received it; the next engine is new
            if self._fail is not None:
                raise
            has_more = False
            if not isinstance(error, OutriderError):
                _LOG.exception("the engine of a session has failed")
        self._deliver_on_thread()
        if (found := self._work.pop()) is not None:
            _, ticket = found
            assert ticket.steps is not None
            try:
                self._receive_on_thread(ticket, 0, next(ticket.steps))
                self._work.push(ticket, ticket.client)
            except Exception as error:  # of this ticket alone: the engine continues; StopIteration at its end
                self._receive_on_thread(ticket, 0, error)
            self._deliver_on_thread()
        return has_more or bool(self._work)

    def _submit_on_thread(self, ticket: Ticket) -> None:
        assert self._session is not None
        if ticket.steps is not None:
            self._work.push(ticket, ticket.client)
        receive = partial(self._receive_on_thread, ticket)
        self._session.loop.submit(ticket.states, receive, client=ticket.client, priority=ticket.priority)

    def cancel_on_thread(self, ticket: Ticket, *, if_waiting: bool = False) -> bool:
        """Cancel a ticket; or with ``if_waiting`` only if it has not begun. Returns whether it was cancelled."""
        assert self._session is not None
        loop = self._session.loop
        if if_waiting and (ticket.has_begun or not set(loop.waiting()).issuperset(ticket.states)):
            return False
        loop.cancel(ticket.states)
        if ticket.steps is not None:
            self._work.remove(lambda one: one is ticket)
            ticket.steps.close()
        return True

    def _receive_on_thread(self, ticket: Ticket, number: int, item: Any) -> None:
        ticket.has_begun = True
        self._arrived.append((ticket, number, item))

    def _deliver_on_thread(self) -> None:
        """Hand what a step has given to the event loop, in one call."""
        if self._arrived:
            self.call(self._deliver, self._arrived)
            self._arrived = []
