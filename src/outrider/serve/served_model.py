"""The model of the server: a target with its drafter, an engine with its thread, a queue, and the requests of clients.

The event loop hands the engine thread functions and receives the chunks of all requests, in one call per round. Neither
waits for the other: chunks for a slow reader wait in memory, at most as many tokens as it requested.

This module does not know HTTP.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Container, Generator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from outrider.decoder import Decoder
from outrider.decoding import engine
from outrider.decoding.schedule import Schedule
from outrider.decoding.scheduler import Load
from outrider.errors import NumericsError, OutriderError
from outrider.records import Chunk, Round, Timing
from outrider.requests.loop_thread import LoopThread
from outrider.requests.state import RequestState
from outrider.runtime.lm import LM
from outrider.serve.admission import LEAST_RETRY_AFTER_S, Admission
from outrider.serve.fair_queue import Turns
from outrider.serve.fingerprint import fingerprint_of
from outrider.serve.http_errors import Refusal, unavailable
from outrider.serve.metrics import Metrics
from outrider.serve.pending import EngineTask, Event, Ticket, TicketRow, arrival
from outrider.serve.scoring import ScoredToken, prompt_logprobs

_LOG = logging.getLogger("outrider.serve")
_MOST_RETRY_AFTER_S = 60  # the openai client waits no longer
_NO_LOAD = Load(0, 0, 0, 0)

_NEWEST = 0.1  # weight of the latest row in the moving average of row times

LoadDecoder = Callable[[], Decoder]
_Queued = tuple[Ticket, TicketRow]
_Step = TypeVar("_Step")


class ServedModel:
    """Takes requests and delivers chunks. Call all methods from the event loop, except ``*_on_thread`` and ``join``.

    Attributes:
        names: the model's names for clients; responses use the first.
        decoder, capacity, schedule, fingerprint: set once the model is loaded; the decoder's models have names for
            clients.
        admission: the state of the server, and accepted requests.
        error: the reason of a failure.
    """

    decoder: Decoder
    capacity: int
    schedule: Schedule
    fingerprint: str
    _engine: engine.Engine
    _own_name: str

    def __init__(
        self,
        names: Sequence[str],
        load: LoadDecoder,
        *,
        num_slots: int,
        context_len: int,
        admission: Admission,
        waiting: Turns[_Queued],
        queue_timeout_s: float,
    ) -> None:
        """
        Args:
            load: loads the decoder, in the thread that will own it.
            context_len: maximum tokens of a sequence, prompt included.
            waiting: decides which row gets the next slot.
            queue_timeout_s: maximum wait for a first slot.
        """
        self.names, self.num_slots, self.admission = tuple(names), num_slots, admission
        self.metrics = Metrics(lambda: self.load, self.names[0])
        self.error: Exception | None = None
        self._is_open = False
        self._thread, self._waiting, self._load = LoopThread("outrider-engine"), waiting, load
        self._context_len, self._queue_timeout_s = context_len, queue_timeout_s
        self._rows: dict[int, _Queued] = {}  # rows with a slot, by the engine's row number
        self._row_s = 0.0  # moving average of how long a row keeps its slot
        self._works_on_thread: Turns[EngineTask] = Turns()
        self._alone_on_thread: Turns[EngineTask] = Turns()  # wait until the running one ends
        self._running_alone: EngineTask | None = None

    def start(self, on_ready: Callable[[], None], on_failure: Callable[[], None]) -> None:
        """Start loading. The event loop must be running; both callbacks are called in it."""

        def set_ready() -> None:
            if self.admission.state == "loading":  # else a shutdown signal came first
                self.admission.state = "ready"
                on_ready()

        def set_failed(error: Exception) -> None:
            self.admission.state, self.error = "failed", error
            self.abort(Refusal("the engine has failed", status=500, type_="server_error"))
            on_failure()

        def begin_on_thread() -> None:
            self._open_on_thread()
            self._thread.call(set_ready)

        def fail_on_thread(error: Exception) -> None:
            if not isinstance(error, OutriderError):
                _LOG.error("the engine has failed", exc_info=error)
            self._thread.call(set_failed, error)

        self._thread.start(self._run_on_thread, begin=begin_on_thread, fail=fail_on_thread)

    def stop(self) -> None:
        """Stop the thread after its current round."""
        self._thread.stop()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def drain(self) -> None:
        """Accept no more requests."""
        if self.admission.state in ("loading", "ready"):
            self.admission.state = "draining"

    @property
    def load(self) -> Load:
        """Load of the engine, including rows that wait here."""
        if not self._is_open:
            return _NO_LOAD
        return replace(self._engine.load, num_waiting=len(self._waiting))

    @property
    def most_rows(self) -> int:
        """Maximum rows per client, running or waiting."""
        return self.admission.most_of_one

    def reserve(self, client: str) -> AbstractContextManager[None]:
        """Count a request as one row while the request is prepared. Raises Refusal: not ready, or the queue is full."""
        return self.admission.reserve(client, self._retry_after_s())

    def submit(self, jobs: Sequence[RequestState], client: str, priority: int) -> Ticket:
        """Queue rows. The caller must ``close`` the ticket.

        Raises:
            Refusal: not ready, or the queue is full.
        """
        self.admission.check(len(jobs), client, self._retry_after_s())
        now_s = time.perf_counter()
        ticket = Ticket([TicketRow(job, which, now_s) for which, job in enumerate(jobs)], client, priority, now_s)
        self.admission.tickets.add(ticket)
        self._thread.post(lambda: self._queue_on_thread(ticket))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Cancel unfinished rows; they leave before the next round."""
        self.admission.tickets.discard(ticket)
        if ticket.num_open:
            ticket.num_open = 0
            self._thread.post(lambda: self._cancel_on_thread(ticket))

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
            self.admission.check(1, client, self._retry_after_s())
        work = EngineTask(steps, client, time.perf_counter(), is_alone)
        self.admission.tasks.add(work)
        waiting = self._alone_on_thread if is_alone else self._works_on_thread
        self._thread.post(lambda: waiting.push(work, client))
        try:
            while not isinstance(found := await arrival(work.found), StopIteration):
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            work.is_closed = True
            self.admission.tasks.discard(work)

    def abort(self, error: Exception) -> None:
        """End all running requests with an error."""
        for ticket in list(self.admission.tickets):
            for which in range(len(ticket.rows)):
                ticket.events.put_nowait((which, error))
            self.close(ticket)
        for work in self.admission.tasks:
            work.is_closed = True
            work.found.put_nowait(error)

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

    def _open_on_thread(self) -> None:
        """Load the model, build its engine, and run it once."""
        loaded = self._load()
        self.decoder = decoder = _client_view(loaded, self.names[0])
        self.capacity = min(self._context_len, decoder.target.context_len)
        self.fingerprint = fingerprint_of(decoder)
        # The costs of a pair are kept under its own names.
        self._engine, self._own_name = loaded.engine(self.num_slots, self.capacity), loaded.target.name
        self.schedule = self._engine.schedule
        self._is_open = True
        # Warm up: generating once detects models that cannot generate, and does one-time work like capturing. (NaN in
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

    def _run_on_thread(self) -> bool:
        """Run one round, and a step of other work. Returns whether there is more to do."""
        self._time_out_on_thread()
        self._begin_on_thread()
        round_ = self._engine.step()
        if round_ is not None:
            self._deliver_on_thread(round_)
        self._work_on_thread()
        return round_ is not None or bool(self._works_on_thread or self._alone_on_thread or self._waiting)

    def _queue_on_thread(self, ticket: Ticket) -> None:
        for row in ticket.rows:
            self._waiting.push((ticket, row), ticket.client, ticket.priority)

    def _begin_on_thread(self) -> None:
        """Submit the next rows to free slots. (The engine's own queue knows only the order of arrival.)"""
        while len(self._rows) < self.num_slots and (found := self._waiting.pop()) is not None:
            _, (ticket, row) = found
            row.index = self._engine.submit(row.job.request)
            self._rows[row.index], ticket.has_begun = (ticket, row), True
            row.begun_s = time.perf_counter()
            self.metrics.count_queue(row.begun_s - row.submitted_s)

    def _time_out_on_thread(self) -> None:
        """Refuse requests that waited too long for a first slot or forward."""
        least_s = time.perf_counter() - self._queue_timeout_s
        late = {ticket for ticket, _ in self._waiting if ticket.submitted_s < least_s and not ticket.has_begun}
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
        self.metrics.count_end(reason, self._waiting.remove(lambda queued: queued[0] in tickets))

    def _cancel_on_thread(self, ticket: Ticket) -> None:
        indices = [row.index for row in ticket.rows if row.index is not None]
        for index in indices:
            self._engine.cancel(index)
            del self._rows[index]
        self.metrics.count_end("abort", len(indices))
        self._drop_waiting_on_thread({ticket}, "abort")

    def _deliver_on_thread(self, round_: Round) -> None:
        now_s, timing = time.perf_counter(), round_.timing
        self.metrics.count_time(timing)
        events: list[tuple[Ticket, Event]] = []
        for row_round in round_.rows:
            ticket, row = self._rows[row_round.row]
            event: Chunk | Exception
            if row_round.error is not None:
                message = row_round.error.replace(f"the model {self._own_name} ", f"the model {self.names[0]} ")
                event, reason = NumericsError(message), "error"
            else:
                event = row.job.chunk(row_round, Timing(), row_round.row)
                reason = row_round.finish_reason or ""
                if row.first_s == 0.0:
                    row.first_s = now_s
                    self.metrics.count_first(event, row)
                self.metrics.count_chunk(event)
            if reason:
                row.last_s = now_s
                self.metrics.count_end(reason)
                if row_round.error is None:
                    self.metrics.count_latency(row)
                self._row_s += _NEWEST * (now_s - row.begun_s - self._row_s)
                del self._rows[row_round.row]
                row.index = None
            events.append((ticket, (row.which, event)))
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
            found = error
        if not isinstance(found, Exception):
            self._works_on_thread.push(work, client)
        elif work is self._running_alone:
            self._running_alone = None
        self._thread.call(work.found.put_nowait, found)


def _client_view(decoder: Decoder, name: str) -> Decoder:
    """A decoder that shows clients no path of this machine.

    Args:
        name: of the target. Those of drafts lose their folders.
    """

    def without_folders(draft: LM) -> LM:
        return draft.with_name("+".join(Path(part).absolute().name for part in draft.name.split("+")))

    return replace(decoder, target=decoder.target.with_name(name), drafter=decoder.drafter.with_models(without_folders))
