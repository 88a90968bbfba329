"""One model of the server: a target with its drafter, an engine, a queue, and the requests of clients.

The event loop hands the engine thread functions and receives the chunks of all requests, in one call per round. Neither
waits for the other: chunks for a slow reader wait in memory, at most as many tokens as it requested.

This module does not know HTTP, and no other models.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Container, Generator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from outrider.decoder import Decoder
from outrider.decoding import engine
from outrider.decoding.schedule import Schedule
from outrider.errors import CompileError, NumericsError, OutriderError
from outrider.records import Chunk, Round, Timing
from outrider.requests.loop_thread import LoopThread
from outrider.requests.state import RequestState
from outrider.serve.fair_queue import Turns
from outrider.serve.fingerprint import fingerprint_of
from outrider.serve.http_errors import Refusal, unavailable
from outrider.serve.metrics import ModelMetrics
from outrider.serve.pending import EngineTask, Event, Ticket, TicketRow, arrival
from outrider.serve.quota import Quota
from outrider.serve.readiness import LEAST_RETRY_AFTER_S, Readiness
from outrider.serve.scoring import ScoredToken, prompt_logprobs

_LOG = logging.getLogger("outrider.serve")
_MOST_RETRY_AFTER_S = 60  # the openai client waits no longer
_NO_LOAD = engine.Load(0, 0, 0, 0)
_NO_PROGRAMS = "a request with a seed needs compiled programs, and compiling failed on this server: leave the seed out"

_NEWEST = 0.1  # weight of the latest row in the moving average of row times

LoadDecoder = Callable[[Sequence[Decoder]], Decoder]
_Step = TypeVar("_Step")


class ServedModel:
    """Takes requests and delivers chunks. Call all methods from the event loop, except ``*_on_thread``.

    Attributes:
        names: for clients; responses use the first.
        decoder, capacity, schedule, fingerprint: set when it is open.
        room: its rows, running and waiting.
        has_work: the engine thread has to run it, as that thread knows.
    """

    decoder: Decoder
    capacity: int
    schedule: Schedule
    fingerprint: str
    _engine: engine.Engine

    def __init__(
        self,
        thread: LoopThread,
        readiness: Readiness,
        names: Sequence[str],
        load: LoadDecoder,
        *,
        num_slots: int,
        context_len: int,
        room: Quota,
        waiting: Turns[TicketRow],
        queue_timeout_s: float,
    ) -> None:
        """
        Args:
            thread: the engine thread.
            readiness: of the server.
            load: called in the thread, with the decoders of the models before this one.
            context_len: maximum tokens of a sequence, prompt included.
            room: limits running and waiting rows; more are refused.
            waiting: decides which row gets the next slot.
            queue_timeout_s: maximum wait for a first slot.
        """
        self.names, self.num_slots, self.room = tuple(names), num_slots, room
        self.metrics = ModelMetrics(lambda: self.load, self.names[0])
        self.has_work = self._is_open = False
        self._thread, self._readiness, self._waiting, self._load = thread, readiness, waiting, load
        self._context_len, self._queue_timeout_s = context_len, queue_timeout_s
        self._rows: dict[int, TicketRow] = {}  # rows with a slot, by the engine's row number
        self._row_s = 0.0  # moving average of how long a row keeps its slot
        self._works_on_thread: Turns[EngineTask] = Turns()
        self._alone_on_thread: Turns[EngineTask] = Turns()  # wait until the running one ends
        self._running_alone: EngineTask | None = None

    @property
    def load(self) -> engine.Load:
        """Load of the engine, including rows that wait here."""
        if not self._is_open:
            return _NO_LOAD
        return replace(self._engine.load, num_waiting=len(self._waiting))

    @property
    def most_rows(self) -> int:
        """Maximum rows per client, running or waiting."""
        return self.room.most_of_one

    def check_room(self, num_rows: int, client: str) -> None:
        """Raises Refusal: not ready, or so many more rows exceed a limit."""
        self._readiness.check()
        self.room.check(num_rows, client, self._retry_after_s())

    def submit(self, jobs: Sequence[RequestState], client: str, priority: int) -> Ticket:
        """Queue rows. The caller must ``close`` the ticket.

        Raises:
            Refusal: not ready, or the queue is full.
        """
        self.check_room(len(jobs), client)
        ticket = Ticket(jobs, client, priority, time.perf_counter())
        self.room.tickets.add(ticket)
        self._post(lambda: self._queue_on_thread(ticket))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Cancel unfinished rows; they leave before the next round."""
        self.room.tickets.discard(ticket)
        if ticket.num_open:
            ticket.num_open = 0
            self._post(lambda: self._cancel_on_thread(ticket))

    async def score(self, prompts: Sequence[Sequence[int]], num_top: int, client: str) -> list[list[ScoredToken]]:
        """Score prompts: log-probabilities of all tokens of each prompt but the first, from the target's raw logits,
        with ``num_top`` alternatives. For a request already accepted (``submit``): it is not refused halfway.

        Raises:
            Refusal: it waited too long.
            NumericsError: the target returned NaN.
        """
        steps = (
            (which, part)
            for which, token_ids in enumerate(prompts)
            if len(token_ids) > 1
            for part in prompt_logprobs(self.decoder.target, token_ids, num_top)
        )
        found: list[list[ScoredToken]] = [[] for _ in prompts]
        async with aclosing(self.between_rounds(steps, client, is_taken=True)) as parts:
            async for step in parts:
                if step is not None:
                    which, part = step
                    found[which] += part
        return found

    async def between_rounds(
        self, steps: Generator[_Step], client: str, *, is_taken: bool = False, is_alone: bool = False
    ) -> AsyncGenerator[_Step | None]:
        """Run another task on the thread, one step after each round, in turn with other tasks. Yields None as a
        keep-alive. Close the iterator (``aclosing``) so that the task ends when the client disconnects.

        Args:
            is_taken: it belongs to an accepted request.
            is_alone: see ``EngineTask``.

        Raises:
            Refusal: not ready, the queue is full, or it waited too long.
        """
        if not is_taken:
            self.check_room(1, client)
        work = EngineTask(steps, client, time.perf_counter(), is_alone)
        self.room.works.add(work)
        waiting = self._alone_on_thread if is_alone else self._works_on_thread
        self._post(lambda: waiting.push(work, client))
        try:
            while not isinstance(found := await arrival(work.found), StopIteration):
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            work.is_closed = True
            self.room.works.discard(work)

    def abort(self, error: Exception) -> None:
        """End all running requests with an error."""
        for ticket in list(self.room.tickets):
            for which in range(len(ticket.jobs)):
                ticket.events.put_nowait((which, error))
            self.close(ticket)
        for work in self.room.works:
            work.is_closed = True
            work.found.put_nowait(error)

    def _post(self, function: Callable[[], None]) -> None:
        """Run a function in the thread, before this model's next round."""

        def run() -> None:
            function()
            self.has_work = True

        self._thread.post(run)

    def _retry_after_s(self) -> int:
        """Estimated time until the rows waiting now have slots."""
        wait_s = self._row_s * len(self._waiting) / self.num_slots
        return min(max(math.ceil(wait_s), LEAST_RETRY_AFTER_S), _MOST_RETRY_AFTER_S)

    # In the event loop, called by the thread

    def _deliver(self, events: Sequence[tuple[Ticket, Event]]) -> None:
        for ticket, event in events:
            if ticket.num_open == 0:  # closed meanwhile
                continue
            if isinstance(event[1], Exception) or event[1].finish_reason is not None:
                ticket.num_open -= 1
            ticket.events.put_nowait(event)

    # In the thread

    def open_on_thread(self, others: Sequence[Decoder]) -> None:
        """Load the model, build its engine, and run it once.

        Args:
            others: of the models before this one.
        """
        self.decoder = decoder = self._load(others)
        self.capacity = min(self._context_len, decoder.target.context_len)
        self.fingerprint = fingerprint_of(decoder)
        self._engine = decoder.engine(self.num_slots, self.capacity)
        self.schedule = self._engine.schedule
        self._is_open = True
        # Warm up: generating once detects models that cannot generate, and does one-time work like compiling. (NaN in
        # this sequence is no reason to refuse all requests.)
        is_prepared = decoder.target.execution.is_prepared
        sizes = [2**i for i in range(self.num_slots.bit_length())] if is_prepared else [1]
        num_tokens = min(2 * (self.schedule.max_k + 1), self.capacity - 1)
        for size in sizes:
            for _ in range(size):
                job = decoder.request([0], {"max_new_tokens": num_tokens, "ignore_eos": True})
                self._engine.submit(job.request)
            while self._engine.step() is not None:
                pass

    def run_on_thread(self) -> None:
        """Run one round, and a step of other work, and find out whether there is more."""
        self._time_out_on_thread()
        self._begin_on_thread()
        round_ = self._step_on_thread()
        if round_ is not None:
            self._deliver_on_thread(round_)
        self._work_on_thread()
        self.has_work = round_ is not None or bool(self._works_on_thread or self._alone_on_thread or self._waiting)

    def _queue_on_thread(self, ticket: Ticket) -> None:
        for which in range(len(ticket.jobs)):
            self._waiting.push(TicketRow(ticket, which), ticket.client, ticket.priority)

    def _begin_on_thread(self) -> None:
        """Submit the next rows to free slots. (The engine's own queue knows only the order of arrival.)"""
        while len(self._rows) < self.num_slots and (found := self._waiting.pop()) is not None:
            _, row = found
            index = self._engine.submit(row.job.request)
            self._rows[index], row.ticket.indices[row.which], row.ticket.has_begun = row, index, True
            row.times.begun_s = time.perf_counter()
            self.metrics.count_queue(row.times.begun_s - row.times.submitted_s)

    def _time_out_on_thread(self) -> None:
        """Refuse requests that waited too long for a first slot or forward."""
        least_s = time.perf_counter() - self._queue_timeout_s
        late = {row.ticket for row in self._waiting if row.ticket.submitted_s < least_s and not row.ticket.has_begun}
        both = (self._works_on_thread, self._alone_on_thread)
        works = {one for works in both for one in works if one.submitted_s < least_s and not one.has_begun}
        if not (late or works):
            return
        message = f"the request waited {self._queue_timeout_s:g} seconds in the queue: try again later"
        error = unavailable(message, self._retry_after_s())
        self._drop_waiting_on_thread(late, "timeout")
        self._thread.call(self._deliver, [(ticket, (0, error)) for ticket in late])
        for waiting in both:
            waiting.remove(lambda work: work in works)
        for work in works:
            self._thread.call(work.found.put_nowait, error)

    def _drop_waiting_on_thread(self, tickets: Container[Ticket], reason: str) -> None:
        self.metrics.count_end(reason, self._waiting.remove(lambda row: row.ticket in tickets))

    def _cancel_on_thread(self, ticket: Ticket) -> None:
        for index in ticket.indices.values():
            self._engine.cancel(index)
            del self._rows[index]
        self.metrics.count_end("abort", len(ticket.indices))
        ticket.indices.clear()
        self._drop_waiting_on_thread({ticket}, "abort")

    def _step_on_thread(self) -> Round | None:
        """Step the engine. If compiling fails, requests with a seed end with an error; the others continue eagerly."""
        while True:
            try:
                return self._engine.step()
            except CompileError as error:
                ended = {index: row for index, row in self._rows.items() if row.job.request.is_repeatable}
                if not ended:
                    raise
                _LOG.warning("%d requests with a seed ended: %s", len(ended), error)
                for index, row in ended.items():
                    self._engine.cancel(index)
                    del self._rows[index], row.ticket.indices[row.which]
                self.metrics.count_end("error", len(ended))
                refusal = Refusal(_NO_PROGRAMS, param="seed")  # with a status that clients do not retry
                self._thread.call(self._deliver, [(row.ticket, (row.which, refusal)) for row in ended.values()])

    def _deliver_on_thread(self, round_: Round) -> None:
        now_s, timing = time.perf_counter(), round_.timing
        self.metrics.count_time(timing)
        events: list[tuple[Ticket, Event]] = []
        for row_round in round_.rows:
            row = self._rows[row_round.row]
            times = row.times
            event: Chunk | Exception
            if row_round.error is not None:
                event, reason = NumericsError(row_round.error), "error"
            else:
                event = row.job.chunk(row_round, Timing(), row_round.row)
                reason = row_round.finish_reason or ""
                if times.first_s == 0.0:
                    times.first_s = now_s
                    self.metrics.count_first(event, row.job, times)
                self.metrics.count_chunk(event)
            if reason:
                times.last_s = now_s
                self.metrics.count_end(reason)
                if row_round.error is None:
                    self.metrics.count_latency(len(row.job.origins), times)
                self._row_s += _NEWEST * (now_s - times.begun_s - self._row_s)
                del self._rows[row_round.row], row.ticket.indices[row.which]
            events.append((row.ticket, (row.which, event)))
        self._thread.call(self._deliver, events)

    def _work_on_thread(self) -> None:
        """Run one step of the next task."""
        if self._running_alone is None and (next_alone := self._alone_on_thread.pop()) is not None:
            client, self._running_alone = next_alone
            self._works_on_thread.push(self._running_alone, client)
        if (next_work := self._works_on_thread.pop()) is None:
            return
        client, work = next_work
        found: Any
        try:
            if work.is_closed:
                work.steps.close()
                raise StopIteration
            found = work.step()
        except Exception as error:  # of this task alone: the engine continues
            if not isinstance(error, OutriderError | StopIteration):
                _LOG.exception("a task between rounds has failed")
            found = error
        if not isinstance(found, Exception):
            self._works_on_thread.push(work, client)
        elif work is self._running_alone:
            self._running_alone = None
        self._thread.call(work.found.put_nowait, found)
