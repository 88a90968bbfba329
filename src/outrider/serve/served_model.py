"""The model of the server: a target with its drafter, the session that drives its engine, and the requests of clients.

Chunks for a slow reader wait in memory, at most as many tokens as it requested. This module does not know HTTP.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from outrider.decoder import Decoder
from outrider.decoding import engine
from outrider.decoding.batch import Row
from outrider.decoding.fair_queue import FairQueue
from outrider.decoding.schedule import Schedule
from outrider.decoding.scheduler import Load
from outrider.errors import NumericsError, OutriderError, PromptError
from outrider.records import Chunk
from outrider.requests.async_session import Arrived, AsyncSession, Ticket
from outrider.requests.engine_loop import EngineLoop, RequestState, discard
from outrider.requests.session import Session
from outrider.serve.about import fingerprint_of
from outrider.serve.admission import LEAST_RETRY_AFTER_S, Admission, arrival
from outrider.serve.http_errors import Refusal, unavailable
from outrider.serve.logprobs import ScoredToken, prompt_logprobs
from outrider.serve.metrics import Metrics
from outrider.text.tokenizer import encode

_LOG = logging.getLogger("outrider.serve")
_MOST_RETRY_AFTER_S = 60  # the openai client waits no longer
_NO_LOAD = Load(0, 0, 0, 0)

LoadDecoder = Callable[[], Decoder]
_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Server options."""

    num_slots: int = 8  # sequences generated concurrently
    context_len: int = 8192  # maximum tokens of a sequence, prompt included
    max_queue: int = 256  # maximum sequences waiting for a slot
    max_per_client: int | None = None  # maximum sequences, running or waiting; None is three quarters of all
    max_connections: int = 1024  # maximum open connections; requests beyond it get 503
    has_priority_across_clients: bool = False  # a request's ``priority`` is compared across clients
    queue_timeout_s: float = 600.0  # maximum wait for a first slot
    api_keys: tuple[str, ...] = ()  # accepted API keys; without any, no key is needed
    shutdown_timeout_s: float = 30.0  # how long running sequences may continue after a signal
    tool_parser: str = "auto"  # the format of the model's calls: see ``tool_format_of``
    reasoning_parser: str = "auto"  # the format of the model's thoughts: see ``thinking_of``
    shared_prompts: tuple[str, ...] = ()  # system prompts, or beginnings of texts, that all clients share in the cache


class ServedModel:
    """Takes requests and delivers chunks. Call all methods from the event loop."""

    _on_failure: Callable[[], None]
    # Set once the model is loaded; the decoder's models have names for clients:
    decoder: Decoder
    capacity: int
    schedule: Schedule
    fingerprint: str
    _own_name: str

    def __init__(self, names: Sequence[str], load: LoadDecoder, options: ServerOptions) -> None:
        """``load`` loads the decoder, in the thread that will own it. Clients know the model by at least one of the
        ``names``; responses use the first."""
        self.names, self._options, self._load = tuple(names), options, load
        self.session = AsyncSession(self._open_on_thread, watch=self._watch, fail=self._fail)
        most_rows = options.num_slots + options.max_queue
        self.admission = Admission(most_rows, options.max_per_client, self.session.tickets, self._retry_after_s)
        self.metrics = Metrics(lambda: self.load, lambda: self.admission.unread().total(), self.names[0])
        self.error: BaseException | None = None  # the reason of a failure
        self._engine: engine.Engine | None = None

    def start(self, on_ready: Callable[[], None], on_failure: Callable[[], None]) -> None:
        """Start loading. The event loop must be running; both callbacks are called in it."""

        def set_ready() -> None:
            if self.admission.state == "loading":  # else a shutdown signal came first
                self.admission.state = "ready"
                on_ready()

        self._on_failure = on_failure
        self.session.start(set_ready)

    def drain(self) -> None:
        if self.admission.state in ("loading", "ready"):
            self.admission.state = "draining"

    @property
    def load(self) -> Load:
        return _NO_LOAD if self._engine is None else self._engine.load

    def submit(self, jobs: Sequence[RequestState], client: str, priority: int) -> Ticket:
        """Queue rows. The caller must ``close`` the ticket. Raises Refusal: not ready, or the queue is full."""
        self.admission.check(len(jobs), client)
        return self.session.submit(Ticket(jobs, client, priority))

    def close(self, ticket: Ticket, error: Exception | None = None, reason: str = "abort") -> None:
        """Cancel unfinished rows; they leave before the next round. An error is for who waits for them."""
        if ticket.steps is None:
            self.metrics.count_end(reason, ticket.num_open)
        self.session.close(ticket, error)

    async def score(self, prompts: Sequence[Sequence[int]], num_top: int, client: str) -> list[list[ScoredToken]]:
        """Score prompts: log-probabilities of all tokens of each prompt but the first, from the target's raw logits,
        with ``num_top`` alternatives. For a request already accepted (``submit``): it is not refused halfway. Raises
        Refusal: it waited too long; NumericsError: the target returned NaN."""
        found: list[list[ScoredToken]] = [[] for _ in prompts]

        def steps() -> Generator[None]:
            for token_ids, own in zip(prompts, found, strict=True):
                for part in prompt_logprobs(self.decoder.target, token_ids, num_top) if len(token_ids) > 1 else ():
                    own += part
                    yield

        async with aclosing(self.between_rounds(steps(), client, is_taken=True)) as parts:
            async for _ in parts:
                pass
        return found

    async def between_rounds(
        self, steps: Generator[_Step], client: str, *, is_taken: bool = False
    ) -> AsyncGenerator[_Step | None]:
        """Run another task on the thread, one step after each round, in turn with other tasks; of an accepted request,
        or counted as one. Yields None as a keep-alive. Close the iterator (``aclosing``) so that the task ends when the
        client disconnects. Raises Refusal: not ready, the queue is full, or it waited too long."""
        if not is_taken:
            self.admission.check(1, client)
        ticket = self.session.submit(Ticket(client=client, steps=steps))
        try:
            while True:
                _, found = await arrival(ticket) or (0, None)
                if isinstance(found, StopIteration):
                    return
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            self.session.close(ticket)

    def abort(self, error: Exception) -> None:
        """End all running requests with an error."""
        for ticket in list(self.session.tickets):
            self.close(ticket, error)

    def time_out(self) -> None:
        """End the requests that have waited too long for a first slot."""
        least_s = time.perf_counter() - self._options.queue_timeout_s
        late = [one for one in self.session.tickets if one.submitted_s < least_s and one.num_open and not one.has_begun]
        if late:
            self.session.post(lambda: self._time_out_on_thread(late))

    def error_of(self, error: Exception) -> Exception:
        """The error of a row for clients, who know the model by another name."""
        if not isinstance(error, NumericsError):
            return error
        return NumericsError(str(error).replace(f"the model {self._own_name} ", f"the model {self.names[0]} "))

    def _retry_after_s(self) -> int:
        wait_s = self.metrics.row_s * self.load.num_waiting / self._options.num_slots
        return min(max(math.ceil(wait_s), LEAST_RETRY_AFTER_S), _MOST_RETRY_AFTER_S)

    # Called by the session, in the event loop

    def _watch(self, arrived: Arrived) -> None:
        self.metrics.count(arrived)
        for ticket, number, item in arrived:
            if isinstance(item, Chunk):
                ticket.states[number].chunks.append(item)

    def _fail(self, error: BaseException) -> Exception:
        if not isinstance(error, OutriderError):
            _LOG.error("the engine has failed", exc_info=error)
        self.admission.state, self.error = "failed", error
        self._on_failure()
        return Refusal("the engine has failed", status=500, type_="server_error")

    # In the thread

    def _open_on_thread(self) -> Session:
        """Load the model, build its engine, and run it once."""
        loaded, options = self._load(), self._options
        self.decoder = decoder = _client_view(loaded, self.names[0])
        self.capacity = min(options.context_len, decoder.target.context_len)
        self.fingerprint = fingerprint_of(decoder)
        # The costs of a pair are kept under its own names.
        queue: FairQueue[Row] = FairQueue(has_priority_across_clients=options.has_priority_across_clients)
        self._engine = own = loaded.engine(options.num_slots, self.capacity, queue=queue)
        self._own_name = loaded.target.name
        shared = [encode(decoder.tokenizer, text) for text in options.shared_prompts]
        for text in options.shared_prompts:
            with suppress(PromptError):  # no chat template, or it has no system messages
                chat = [{"role": "system", "content": text}, {"role": "user", "content": ""}]
                shared.append(encode(decoder.tokenizer, chat))
        own.share(shared)
        loop = EngineLoop(lambda capacity: own, least_capacity=self.capacity, most_capacity=self.capacity)
        self.schedule = own.schedule
        # Warm up: generating once detects models that cannot generate, and does one-time work like capturing. (NaN in
        # this sequence is no reason to refuse all requests.)
        sizes = [2**i for i in range(options.num_slots.bit_length())] if decoder.target.execution.is_prepared else [1]
        warm = {"max_new_tokens": min(2 * (self.schedule.max_k + 1), self.capacity - 1), "ignore_eos": True}
        for size in sizes:
            loop.submit([decoder.request([0], warm) for _ in range(size)], discard)
            while loop.step():
                pass
        return Session(decoder._requests, loop, decoder.target, self.capacity)

    def _time_out_on_thread(self, late: Sequence[Ticket]) -> None:
        message = f"the request waited {self._options.queue_timeout_s:g} seconds in the queue: try again later"
        for ticket in late:
            if self.session.cancel_on_thread(ticket, if_waiting=True):
                error = unavailable(message, self._retry_after_s())
                self.session.call(self.close, ticket, error, "timeout")


def _client_view(decoder: Decoder, name: str) -> Decoder:
    """A decoder that shows clients no path of this machine: its target has this name, and drafts lose their folders."""

    def without_folders(name: str) -> str:
        return "+".join(Path(part).absolute().name for part in name.split("+"))

    drafter = decoder.drafter.with_models(lambda draft: draft.with_name(without_folders(draft.name)))
    drafter = replace(drafter, name=without_folders(drafter.name))
    return replace(decoder, target=decoder.target.with_name(name), drafter=drafter)
