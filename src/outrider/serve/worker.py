"""The thread that owns the models: it loads them, then steps one engine as long as there are requests.

The event loop hands it functions, and gets back what each round adds to each request, in one call a round. Neither
waits for the other: a slow reader's chunks wait in memory, and there are no more of them than tokens it asked for.

This module does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

from outrider.decoder import Decoder
from outrider.decoding.engine import Engine, Load
from outrider.errors import NumericsError, OutriderError
from outrider.jobs import Job, chunk_of
from outrider.records import Chunk, Round, Timing, TokenLogprob
from outrider.serve.metrics import Metrics
from outrider.serve.refusal import Refusal, unavailable
from outrider.serve.scoring import prompt_logprobs
from outrider.system.available import size_text

_LOG = logging.getLogger("outrider.serve")
_RETRY_AFTER_S = 1
_NO_LOAD = Load(0, 0, 0, 0)

State = Literal["loading", "ready", "draining", "failed"]
Event = tuple[int, Chunk | Exception]


@dataclass(slots=True, eq=False)
class Ticket:
    """The rows of one HTTP request.

    Attributes:
        jobs: a row each.
        events: (which row, its next chunk or its error), in order. The last chunk of a row has a ``finish_reason``.
        num_open: rows that have not ended, as the event loop knows it.
        indices: the engine's number of each row that has not ended, as the worker knows it.
    """

    jobs: Sequence[Job]
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    num_open: int = field(init=False)
    indices: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_open = len(self.jobs)


@dataclass(slots=True, eq=False)
class _Row:
    """One row, as the worker sees it. Times in seconds of one clock."""

    ticket: Ticket
    which: int
    submitted_s: float
    first_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Scoring:
    """A prompt on its way to log-probabilities."""

    steps: Iterator[list[TokenLogprob]]
    result: asyncio.Future[list[TokenLogprob]]
    found: list[TokenLogprob] = field(default_factory=list)


class Worker:
    """Requests in, chunks out. All methods are for the event loop, but for those named ``_on_thread``, and ``join``.

    Attributes:
        state: "ready" when requests are taken.
        decoder, capacity, max_k: set when it is ready.
        error: why it failed.
    """

    decoder: Decoder
    capacity: int
    max_k: int
    _engine: Engine

    def __init__(
        self, load: Callable[[], Decoder], *, num_slots: int, context_len: int, max_queue: int, metrics: Metrics
    ) -> None:
        """
        Args:
            load: called in the thread.
            context_len: most tokens in a row, prompt included.
            max_queue: most rows that wait for a slot; more are refused.
        """
        self.state: State = "loading"
        self.error: Exception | None = None
        self.num_slots, self.metrics = num_slots, metrics
        self._load, self._context_len, self._max_queue = load, context_len, max_queue
        self._tickets: set[Ticket] = set()
        self._results: set[asyncio.Future[list[TokenLogprob]]] = set()
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._rows: dict[int, _Row] = {}
        self._scorings: deque[_Scoring] = deque()

    def start(self, on_ready: Callable[[], None], on_failure: Callable[[], None]) -> None:
        """Begin to load. Both are called in the event loop, which must be running."""
        self._loop = asyncio.get_running_loop()
        self._on_ready, self._on_failure = on_ready, on_failure
        self._thread = threading.Thread(target=self._run_on_thread, name="outrider-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The thread ends after the round that it is in."""
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def about(self) -> list[str]:
        """What it takes and does, for the log."""
        decoder = self.decoder
        lms = [decoder.target, *decoder.drafter.models]
        bytes_ = 0
        for lm in lms:
            per_token = sum(shape.bytes_per_token for shape in lm.layer_shapes)
            bytes_ += per_token * (lm.execution.round_length(self.capacity) + 1)
        by_load = ", chosen by the load" if decoder.num_draft_tokens == "auto" else ""
        return [
            f"{self.num_slots} slots of {self.capacity} tokens: {size_text(bytes_)} each, "
            f"{size_text(self.num_slots * bytes_)} in all, for {' and '.join(lm.name for lm in lms)}",
            f"drafts by {decoder.drafter.name}, K = {decoder.num_draft_tokens}{by_load} (at most {self.max_k}), "
            f"acceptance {decoder.acceptance}, {str(decoder.target.dtype).removeprefix('torch.')}",
        ]

    @property
    def load(self) -> Load:
        return self._engine.load if self.state in ("ready", "draining") else _NO_LOAD

    @property
    def num_open(self) -> int:
        """Rows and scorings that have been taken and have not ended."""
        return sum(ticket.num_open for ticket in self._tickets) + len(self._results)

    def check_ready(self) -> None:
        """Raises Refusal."""
        if self.state == "loading":
            raise unavailable("the models are being loaded", _RETRY_AFTER_S)
        if self.state != "ready":
            raise unavailable("the server is shutting down", _RETRY_AFTER_S)

    def submit(self, jobs: Sequence[Job]) -> Ticket:
        """Queue rows. ``close`` must be called when they are done with.

        Raises:
            Refusal: not ready, or the queue is full.
        """
        self._check_room(len(jobs))
        ticket = Ticket(jobs)
        self._tickets.add(ticket)
        self._inbox.put(lambda: self._submit_on_thread(ticket, time.perf_counter()))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Rows that have not ended are given up; they leave before the next round."""
        self._tickets.discard(ticket)
        if ticket.num_open:
            ticket.num_open = 0
            self._inbox.put(lambda: self._cancel_on_thread(ticket))

    async def score(self, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Log-probabilities of all tokens but the first, from the target's raw logits, beside ``num_top`` others.

        Raises:
            Refusal: not ready, or the queue is full.
        """
        if len(token_ids) < 2:
            return []
        self._check_room(1)
        result: asyncio.Future[list[TokenLogprob]] = self._loop.create_future()
        scoring = _Scoring(prompt_logprobs(self.decoder.target, token_ids, num_top), result)
        self._results.add(result)
        self._inbox.put(lambda: self._scorings.append(scoring))
        try:
            return await result
        finally:
            result.cancel()  # for the thread, where the client has gone
            self._results.discard(result)

    def drain(self) -> None:
        """Take no more requests."""
        if self.state in ("loading", "ready"):
            self.state = "draining"

    def abort(self, error: Exception) -> None:
        """End all that is running, with an error."""
        for ticket in list(self._tickets):
            for which in range(len(ticket.jobs)):
                ticket.events.put_nowait((which, error))
            self.close(ticket)
        for result in self._results:
            if not result.done():
                result.set_exception(error)

    def _check_room(self, num_rows: int) -> None:
        self.check_ready()
        num_open, most = self.num_open, self.num_slots + self._max_queue
        if num_rows > most:
            raise Refusal(f"a request of {num_rows} texts: this server takes {most} at a time", param="n")
        if num_open + num_rows > most:
            raise unavailable(f"{num_open} texts are being generated or wait: try again", _RETRY_AFTER_S)

    # In the event loop, called by the thread

    def _deliver(self, events: Sequence[tuple[Ticket, Event]]) -> None:
        for ticket, event in events:
            if ticket.num_open == 0:  # closed meanwhile
                continue
            if isinstance(event[1], Exception) or event[1].finish_reason is not None:
                ticket.num_open -= 1
            ticket.events.put_nowait(event)

    def _set_ready(self) -> None:
        if self.state == "loading":
            self.state = "ready"
        self._on_ready()

    def _set_failed(self, error: Exception) -> None:
        self.state, self.error = "failed", error
        self.abort(Refusal("the engine has failed", status=500, type_="server_error"))
        self._on_failure()

    # In the thread

    def _run_on_thread(self) -> None:
        try:
            self._open_on_thread()
            self._call(self._set_ready)
            is_idle = True
            while self._take_in_on_thread(is_idle):
                round_ = self._engine.step()
                if round_ is not None:
                    self._deliver_on_thread(round_)
                self._score_on_thread()
                is_idle = round_ is None and not self._scorings
        except Exception as error:  # whatever it is, clients must hear of it
            if not isinstance(error, OutriderError):
                _LOG.exception("the engine has failed")
            self._call(self._set_failed, error)

    def _open_on_thread(self) -> None:
        self.decoder = self._load()
        self.capacity = min(self._context_len, self.decoder.target.context_len)
        self._engine = self.decoder.engine(self.num_slots, self.capacity)
        self.max_k = self._engine.max_k
        # A server that is ready has generated, so that models that cannot are noticed, and what occurs only once, like
        # compiling, is done. (NaN in one text is no reason to refuse all.)
        is_prepared = self.decoder.target.execution.is_prepared
        sizes = [2**i for i in range(self.num_slots.bit_length())] if is_prepared else [1]
        num_tokens = min(2 * (self.max_k + 1), self.capacity - 1)
        for size in sizes:
            for _ in range(size):
                job = self.decoder.job([0], {"max_new_tokens": num_tokens, "ignore_eos": True})
                self._engine.submit(job.request)
            while self._engine.step() is not None:
                pass

    def _take_in_on_thread(self, is_idle: bool) -> bool:
        """Do what the event loop asked for; wait for it if there is nothing else to do. False at the end."""
        while is_idle or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            message()
            is_idle = False
        return True

    def _submit_on_thread(self, ticket: Ticket, now_s: float) -> None:
        for which, job in enumerate(ticket.jobs):
            index = self._engine.submit(job.request)
            ticket.indices[which] = index
            self._rows[index] = _Row(ticket, which, now_s)

    def _cancel_on_thread(self, ticket: Ticket) -> None:
        for index in ticket.indices.values():
            self._engine.cancel(index)
            del self._rows[index]
            self.metrics.count_end("abort")
        ticket.indices.clear()

    def _deliver_on_thread(self, round_: Round) -> None:
        now_s, timing = time.perf_counter(), round_.timing
        self.metrics.count_time(timing)
        events: list[tuple[Ticket, Event]] = []
        for row_round in round_.rows:
            row = self._rows[row_round.row]
            event: Chunk | Exception
            if row_round.error is not None:
                event, reason = NumericsError(row_round.error), "error"
            else:
                event = chunk_of(row_round, row.ticket.jobs[row.which], Timing())
                reason = row_round.finish_reason or ""
                if row.first_s == 0.0:
                    row.first_s = now_s
                    self.metrics.count_first(event, row.ticket.jobs[row.which], now_s - row.submitted_s)
                self.metrics.count_chunk(event)
            if reason:
                job = row.ticket.jobs[row.which]
                self.metrics.count_end(reason)
                self.metrics.count_latency(len(job.origins), now_s - row.first_s, now_s - row.submitted_s)
                del self._rows[row_round.row], row.ticket.indices[row.which]
            events.append((row.ticket, (row.which, event)))
        self._call(self._deliver, events)

    def _score_on_thread(self) -> None:
        """One forward of the prompt that has waited longest."""
        if not self._scorings:
            return
        scoring = self._scorings[0]
        part = None if scoring.result.cancelled() else next(scoring.steps, None)
        if part is not None:
            scoring.found += part
            return
        self._scorings.popleft()
        self._call(_resolve, scoring)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """In the event loop; nobody is left to hear of it once that has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self._inbox.put(None)


def _resolve(scoring: _Scoring) -> None:
    if not scoring.result.done():
        scoring.result.set_result(scoring.found)
