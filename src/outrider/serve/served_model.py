"""The model of the server: a target with its drafter, an engine with its thread, a queue, and the requests of clients.

The event loop hands the engine thread functions and receives the chunks of all requests, in one call per round. Neither
waits for the other: chunks for a slow reader wait in memory, at most as many tokens as it requested.

This module does not know HTTP.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from outrider.decoder import Decoder
from outrider.decoding import engine
from outrider.decoding.batch import Row
from outrider.decoding.fair_queue import FairQueue
from outrider.decoding.schedule import Schedule
from outrider.decoding.scheduler import Load
from outrider.errors import NumericsError, OutriderError, PromptError
from outrider.records import Chunk
from outrider.requests.engine_loop import EngineLoop, LoopThread, RequestState, discard
from outrider.serve.about import fingerprint_of
from outrider.serve.admission import LEAST_RETRY_AFTER_S, Admission, EngineTask, Event, Ticket, TicketRow, arrival
from outrider.serve.http_errors import Refusal, unavailable
from outrider.serve.logprobs import ScoredToken, prompt_logprobs
from outrider.serve.metrics import Metrics
from outrider.text.tokenizer import encode

_LOG = logging.getLogger("outrider.serve")
_MOST_RETRY_AFTER_S = 60  # the openai client waits no longer
_NO_LOAD = Load(0, 0, 0, 0)

_NEWEST = 0.1  # weight of the latest row in the moving average of row times

LoadDecoder = Callable[[], Decoder]
_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Server options.

    Attributes:
        num_slots: sequences generated concurrently.
        context_len: maximum tokens of a sequence, prompt included.
        max_queue: maximum sequences waiting for a slot.
        max_per_client: maximum sequences per client, running or waiting; None is three quarters of all.
        max_connections: maximum open connections; requests beyond it get 503.
        has_priority_across_clients: a request's ``priority`` is compared across clients.
        queue_timeout_s: maximum wait for a first slot.
        api_keys: accepted API keys; without any, no key is needed.
        shutdown_timeout_s: how long running sequences may continue after a signal.
        tool_parser: the format of the model's calls: see ``tool_format_of``.
        reasoning_parser: the format of its thoughts: see ``thinking_of``.
        shared_prompts: system prompts, or beginnings of texts, that all clients share in the cache.
    """

    num_slots: int = 8
    context_len: int = 8192
    max_queue: int = 256
    max_per_client: int | None = None
    max_connections: int = 1024
    has_priority_across_clients: bool = False
    queue_timeout_s: float = 600.0
    api_keys: tuple[str, ...] = ()
    shutdown_timeout_s: float = 30.0
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    shared_prompts: tuple[str, ...] = ()


class ServedModel:
    """Takes requests and delivers chunks. Call all methods from the event loop, except ``*_on_thread`` and ``join``.

    Attributes:
        names: the model's names for clients; responses use the first.
        decoder, capacity, schedule, fingerprint: set once the model is loaded; the decoder's models have names for
            clients.
        admission: the state of the server, and accepted requests.
        thread: runs the engine.
        error: the reason of a failure.
    """

    decoder: Decoder
    capacity: int
    schedule: Schedule
    fingerprint: str
    _engine: engine.Engine
    _own_name: str

    def __init__(self, names: Sequence[str], load: LoadDecoder, options: ServerOptions) -> None:
        """``load`` loads the decoder, in the thread that will own it."""
        self.names, self._options, self._load = tuple(names), options, load
        self.admission = Admission(options.num_slots + options.max_queue, options.max_per_client)
        self.metrics = Metrics(lambda: self.load, lambda: self.admission.unread().total(), self.names[0])
        self.error: BaseException | None = None
        self._is_open = False
        self.thread = LoopThread("outrider-engine")
        self._rows: dict[int, tuple[Ticket, TicketRow]] = {}  # unfinished rows, as the thread numbers them
        self._num_submitted = 0
        self._arrived: list[tuple[Ticket, Event]] = []  # in the current round
        self._row_s = 0.0  # moving average of how long a row keeps its slot
        self._tasks_on_thread: FairQueue[EngineTask] = FairQueue()

    def start(self, on_ready: Callable[[], None], on_failure: Callable[[], None]) -> None:
        """Start loading. The event loop must be running; both callbacks are called in it."""

        def set_ready() -> None:
            if self.admission.state == "loading":  # else a shutdown signal came first
                self.admission.state = "ready"
                on_ready()

        def set_failed(error: BaseException) -> None:
            self.admission.state, self.error = "failed", error
            self.abort(Refusal("the engine has failed", status=500, type_="server_error"))
            on_failure()

        def begin_on_thread() -> None:
            self._open_on_thread()
            self.thread.call(set_ready)

        def fail_on_thread(error: BaseException) -> None:
            if not isinstance(error, OutriderError):
                _LOG.error("the engine has failed", exc_info=error)
            self.thread.call(set_failed, error)

        self.thread.start(self._run_on_thread, begin=begin_on_thread, fail=fail_on_thread)

    def drain(self) -> None:
        if self.admission.state in ("loading", "ready"):
            self.admission.state = "draining"

    @property
    def load(self) -> Load:
        return self._engine.load if self._is_open else _NO_LOAD

    def reserve(self, client: str) -> AbstractContextManager[None]:
        """Count a request as one row while the request is prepared. Raises Refusal: not ready, or the queue is full."""
        return self.admission.reserve(client, self._retry_after_s())

    def submit(self, jobs: Sequence[RequestState], client: str, priority: int) -> Ticket:
        """Queue rows. The caller must ``close`` the ticket. Raises Refusal: not ready, or the queue is full."""
        self.admission.check(len(jobs), client, self._retry_after_s())
        now_s = time.perf_counter()
        ticket = Ticket([TicketRow(job, which, now_s) for which, job in enumerate(jobs)], client, priority)
        self.admission.tickets.add(ticket)
        self.thread.post(lambda: self._submit_on_thread(ticket))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Cancel unfinished rows; they leave before the next round."""
        self.admission.tickets.discard(ticket)
        if ticket.num_open:
            ticket.num_open = 0
            self.thread.post(lambda: self._cancel_on_thread(ticket, "abort"))

    async def score(self, prompts: Sequence[Sequence[int]], num_top: int, client: str) -> list[list[ScoredToken]]:
        """Score prompts: log-probabilities of all tokens of each prompt but the first, from the target's raw logits,
        with ``num_top`` alternatives. For a request already accepted (``submit``): it is not refused halfway. Raises
        Refusal: it waited too long; NumericsError: the target returned NaN."""
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
        self, steps: Generator[_Step], client: str, *, is_taken: bool = False
    ) -> AsyncGenerator[_Step | None]:
        """Run another task on the thread, one step after each round, in turn with other tasks; of an accepted request,
        or counted as one. Yields None as a keep-alive. Close the iterator (``aclosing``) so that the task ends when the
        client disconnects. Raises Refusal: not ready, the queue is full, or it waited too long."""
        if not is_taken:
            self.admission.check(1, client, self._retry_after_s())
        task = EngineTask(steps, client, time.perf_counter())
        self.admission.tasks.add(task)
        self.thread.post(lambda: self._tasks_on_thread.push(task, client))
        try:
            while not isinstance(found := await arrival(task.found), StopIteration):
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            task.is_closed = True
            self.admission.tasks.discard(task)

    def abort(self, error: Exception) -> None:
        """End all running requests with an error."""
        for ticket in list(self.admission.tickets):
            for which in range(len(ticket.rows)):
                ticket.events.put_nowait((which, error))
            self.close(ticket)
        for task in self.admission.tasks:
            task.is_closed = True
            task.found.put_nowait(error)

    def _retry_after_s(self) -> int:
        wait_s = self._row_s * self.load.num_waiting / self._options.num_slots
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
        loaded, options = self._load(), self._options
        self.decoder = decoder = _client_view(loaded, self.names[0])
        self.capacity = min(options.context_len, decoder.target.context_len)
        self.fingerprint = fingerprint_of(decoder)
        # The costs of a pair are kept under its own names.
        queue: FairQueue[Row] = FairQueue(has_priority_across_clients=options.has_priority_across_clients)
        self._engine = loaded.engine(options.num_slots, self.capacity, queue=queue)
        self._own_name = loaded.target.name
        shared = [encode(decoder.tokenizer, text) for text in options.shared_prompts]
        for text in options.shared_prompts:
            with suppress(PromptError):  # no chat template, or it has no system messages
                chat = [{"role": "system", "content": text}, {"role": "user", "content": ""}]
                shared.append(encode(decoder.tokenizer, chat))
        self._engine.share(shared)
        bounds = {"least_capacity": self.capacity, "most_capacity": self.capacity}
        self._loop = EngineLoop(lambda capacity: self._engine, **bounds)
        self.schedule = self._engine.schedule
        self._is_open = True
        # Warm up: generating once detects models that cannot generate, and does one-time work like capturing. (NaN in
        # this sequence is no reason to refuse all requests.)
        sizes = [2**i for i in range(options.num_slots.bit_length())] if decoder.target.execution.is_prepared else [1]
        own = {"max_new_tokens": min(2 * (self.schedule.max_k + 1), self.capacity - 1), "ignore_eos": True}
        for size in sizes:
            self._loop.submit([decoder.request([0], own) for _ in range(size)], discard)
            while self._loop.step():
                pass

    def _run_on_thread(self) -> bool:
        """Run one round, and a step of other work. Returns whether there is more to do."""
        self._time_out_on_thread()
        has_more = self._loop.step()
        if self._arrived:
            self.thread.call(self._deliver, self._arrived)
            self._arrived = []
        self._work_on_thread()
        return has_more or bool(self._tasks_on_thread)

    def _submit_on_thread(self, ticket: Ticket) -> None:
        first, now_s = self._num_submitted, time.perf_counter()
        for row in ticket.rows:
            row.begun_s = now_s  # when the engine got the row; until its first tokens come
        self._num_submitted += len(ticket.rows)
        self._rows |= {number: (ticket, row) for number, row in enumerate(ticket.rows, first)}
        self._loop.submit(
            [row.job for row in ticket.rows],
            self._receive_on_thread,
            first_number=first,
            client=ticket.client,
            priority=ticket.priority,
        )

    def _time_out_on_thread(self) -> None:
        least_s = time.perf_counter() - self._options.queue_timeout_s
        late = {ticket for ticket, row in self._rows.values() if row.submitted_s < least_s and not ticket.has_begun}
        if late:
            waiting = set(self._loop.waiting())
            late = {ticket for ticket in late if all(row.job in waiting for row in ticket.rows)}
        tasks = {one for one in self._tasks_on_thread if one.submitted_s < least_s and not one.has_begun}
        if not (late or tasks):
            return
        message = f"the request waited {self._options.queue_timeout_s:g} seconds in the queue: try again later"
        error = unavailable(message, self._retry_after_s())
        for ticket in late:
            self._cancel_on_thread(ticket, "timeout")
        self.thread.call(self._deliver, [(ticket, (0, error)) for ticket in late])
        self._tasks_on_thread.remove(lambda task: task in tasks)
        for task in tasks:
            self.thread.call(task.found.put_nowait, error)

    def _cancel_on_thread(self, ticket: Ticket, reason: str) -> None:
        numbers = [number for number, (own, _) in self._rows.items() if own is ticket]
        self._loop.cancel([self._rows.pop(number)[1].job for number in numbers])
        self.metrics.count_end(reason, len(numbers))

    def _receive_on_thread(self, number: int, item: Chunk | OutriderError) -> None:
        now_s, (ticket, row) = time.perf_counter(), self._rows[number]
        ticket.has_begun = True
        if isinstance(item, Chunk):
            reason = item.finish_reason
            self.metrics.count_chunk(item)
            if row.first_s == 0.0:
                row.begun_s, row.first_s = row.begun_s + item.queued_s, now_s
                self.metrics.count_first(item, row)
        else:
            reason = "error"
            if isinstance(item, NumericsError):
                item = NumericsError(str(item).replace(f"the model {self._own_name} ", f"the model {self.names[0]} "))
        if reason is not None:
            row.last_s = now_s
            self.metrics.count_end(reason)
            if row.first_s:
                self._row_s += _NEWEST * (now_s - row.begun_s - self._row_s)
            if reason != "error":
                self.metrics.count_latency(row)
            del self._rows[number]
        self._arrived.append((ticket, (row.which, item)))

    def _work_on_thread(self) -> None:
        if (next_task := self._tasks_on_thread.pop()) is None:
            return
        client, task = next_task
        found: Any
        try:
            if task.is_closed:
                task.steps.close()
            task.has_begun = True
            found = next(task.steps)
            self._tasks_on_thread.push(task, client)
        except Exception as error:  # of this task alone: the engine continues; StopIteration at its end
            found = error
        self.thread.call(task.found.put_nowait, found)


def _client_view(decoder: Decoder, name: str) -> Decoder:
    """A decoder that shows clients no path of this machine: its target has this name, and drafts lose their folders."""

    def without_folders(name: str) -> str:
        return "+".join(Path(part).absolute().name for part in name.split("+"))

    drafter = decoder.drafter.with_models(lambda draft: draft.with_name(without_folders(draft.name)))
    drafter = replace(drafter, name=without_folders(drafter.name))
    return replace(decoder, target=decoder.target.with_name(name), drafter=drafter)
