"""The driver of an engine: requests of any number of callers come and go, and each caller gets its own chunks.

Iterating over one caller's chunks steps the engine for all; chunks of other callers are kept for them. Any thread may
iterate: one steps at a time, and the others find their chunks when it is their turn. Beside an event loop, a thread
steps instead (``AsyncSession``).

The cache grows: a sequence that does not fit waits until all rows have ended, and then a larger engine replaces this
one, without its prefixes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from outrider.decoding.engine import Engine
from outrider.errors import DeviceError, NumericsError, OutriderError, SessionError
from outrider.records import Chunk, Completion, Origin, Request, Round, RowRound, Timing
from outrider.text.row_text import RowText

Receive = Callable[[int, Chunk | OutriderError], None]
"""Takes the next chunk of a request, or the error that ends the request, with the request's number."""


def discard(number: int, item: Chunk | OutriderError) -> None:
    """Receive nothing."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in the loop, with its text so far."""

    request: Request  # with ``resume_ids``, ``num_resumed`` tokens, as part of the prompt
    text: RowText
    num_prompt_tokens: int
    num_resumed: int
    room: int  # the most tokens that rounds may commit, prompt included
    origins: list[Origin] = field(init=False)  # one for each token pushed to ``text``
    chunks: list[Chunk] = field(default_factory=list, init=False)  # so far, where they are collected
    # Where the chunks go, and whose turn it is; set when the request is submitted:
    number: int = 0
    receive: Receive = discard
    client: str = ""
    priority: int = 0
    index: int = -1  # the engine's number of the row; -1 while the request waits for an engine
    begun_s: float = 0.0  # when the row got its slot, by ``time.perf_counter``, as the next two; 0 before
    first_s: float = 0.0  # when its first tokens came
    last_s: float = 0.0  # when its last tokens came

    def __post_init__(self) -> None:
        self.origins = ["accepted"] * self.num_resumed  # their text was emitted, except characters held back

    def chunk(self, round_: RowRound, timing: Timing) -> Chunk:
        self.last_s = time.perf_counter()
        if self.first_s == 0.0:
            self.begun_s, self.first_s = self.begun_s + round_.queued_s, self.last_s
        self.origins.extend(round_.origins)
        if round_.finish_reason is not None:
            self.text.finish()
        seed = self.request.sampling.seed
        assert seed is not None
        # Text by origin: neighbouring tokens of the same origin are joined.
        groups = groupby(self.text.take(), key=lambda item: self.origins[item[0]])
        pieces = tuple(("".join(piece for _, piece in group), origin) for origin, group in groups)
        return Chunk.of(round_, pieces, timing, seed, row=self.number)

    @property
    def completion(self) -> Completion:
        """The sum of ``chunks``."""
        return Completion.of(self.chunks, self.num_prompt_tokens)


def collect(states: Sequence[RequestState], chunks: Iterable[Chunk]) -> list[Completion]:
    for chunk in chunks:
        states[chunk.row].chunks.append(chunk)
    return [state.completion for state in states]


class EngineLoop:
    """Submits requests to an engine, steps it, and delivers chunks. The engine is made when a request needs it.

    ``cancel`` may be called from anywhere, also by the garbage collector in the middle of a step.
    """

    def __init__(self, make: Callable[[int], Engine], *, least_capacity: int = 0, most_capacity: int) -> None:
        """``make`` makes an engine of a capacity between these bounds."""
        self._make, self._least_capacity, self._most_capacity = make, least_capacity, most_capacity
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that has the lock
        self._is_closed = False
        self._engine: Engine | None = None
        self._capacity = 0
        self._arriving: deque[RequestState] = deque()
        self._rows: dict[int, RequestState] = {}  # by the engine's index
        self._cancelled: deque[RequestState] = deque()

    def check_open(self) -> None:
        """Raises SessionError."""
        if self._is_closed:
            raise SessionError("the session is closed: open another")

    def chunks(self, states: Sequence[RequestState]) -> Iterator[Chunk]:
        """Generate for requests, one chunk per row and round; the requests are submitted with the first chunk. Raises
        NumericsError: of a row; SessionError, Exception: see ``step``."""
        arrived: deque[tuple[int, Chunk | OutriderError]] = deque()
        unfinished = dict(enumerate(states))
        try:
            self.submit(states, lambda number, item: arrived.append((number, item)))
            while unfinished:
                while not arrived:
                    self.step(skip_if=arrived)
                number, item = arrived.popleft()
                chunk = chunk_of(number, item, len(states))
                if chunk.finish_reason is not None:
                    del unfinished[number]
                yield chunk
        finally:
            self.cancel(unfinished.values())

    def submit(
        self,
        states: Sequence[RequestState],
        receive: Receive,
        *,
        first_number: int = 0,
        client: str = "",
        priority: int = 0,
    ) -> None:
        """Queue requests for the turn of a client (see ``FairQueue``). While the engine is stepped, ``receive`` takes
        their items, with the number of each. Raises SessionError."""
        with self._turn():
            self.check_open()
            for number, state in enumerate(states, first_number):
                state.number, state.receive, state.client, state.priority = number, receive, client, priority
            self._arriving.extend(states)

    def cancel(self, states: Iterable[RequestState]) -> None:
        """Cancel requests: they leave before the next round, and nothing more is received."""
        self._cancelled.extend(states)

    def step(self, skip_if: Sized = ()) -> bool:
        """Run one round, and return whether there are more rows; at once if ``skip_if`` is not empty by the time that
        no other thread steps. Raises Exception: any error of the engine, which ends all rows, and the next one gets a
        new engine; SessionError: called by a hook within a step."""
        with self._turn():
            if skip_if:
                return True
            self._leave_cancelled()
            try:
                self._begin()
                round_ = None if self._engine is None else self._engine.step()
                if round_ is not None:
                    self._deliver(round_)
            except BaseException as error:  # no stream goes on without a chunk that was lost
                self._end_all(error)
                raise
            return bool(self._rows or self._arriving)

    def waiting(self) -> list[RequestState]:
        engine = self._engine
        queued = [] if engine is None else [self._rows[index] for index in engine.waiting if index in self._rows]
        return [*queued, *self._arriving]

    def close(self) -> None:
        """End all rows, and free the engine. Raises SessionError when a hook calls it within a step."""
        with self._turn():
            self._is_closed = True
            self._end_all(SessionError("the session was closed before the output was complete"))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Exclude other threads. Raises SessionError within a turn of the same thread, which would wait for itself."""
        me = threading.get_ident()
        if self._owner == me:
            raise SessionError("a hook cannot use the session that calls it: open another session for it")
        with self._lock:
            try:
                self._owner = me
                yield
            finally:
                self._owner = None

    def _begin(self) -> None:
        while self._arriving:
            state = self._arriving[0]
            if self._engine is None or min(state.room, self._most_capacity) > self._capacity:
                if self._rows:
                    return
                self._engine = None  # its cache is freed before the next one is allocated
                self._enlarge(min(max(one.room for one in self._arriving), self._most_capacity))
            assert self._engine is not None
            state.begun_s = time.perf_counter()  # and later, by the time that the row waits for a slot
            state.index = self._engine.submit(state.request, state.client, state.priority)
            self._rows[state.index] = state
            self._arriving.popleft()

    def _enlarge(self, longest: int) -> None:
        """Make an engine with twice the capacity; or, if there is no memory for that, as much as is needed now."""
        capacity = min(max(longest, 2 * self._capacity, self._least_capacity), self._most_capacity)
        try:
            self._engine = self._make(capacity)
        except DeviceError:
            if capacity == longest:
                raise
            capacity = longest
        if self._engine is None:  # not within "except": the error keeps the memory of what had been made
            self._engine = self._make(capacity)
        self._capacity = capacity

    def _leave_cancelled(self) -> None:
        while self._cancelled:
            state = self._cancelled.popleft()
            if state in self._arriving:
                self._arriving.remove(state)
            elif self._rows.get(state.index) is state:
                del self._rows[state.index]
                assert self._engine is not None
                self._engine.cancel(state.index)

    def _deliver(self, round_: Round) -> None:
        timed = set()
        for row_round in round_.rows:
            state = self._rows[row_round.row]
            item: Chunk | OutriderError
            if row_round.error is not None:
                item = row_round.error
            else:
                # A caller's first chunk of a round carries the timing, so that the timings of its chunks add up.
                timing = Timing() if state.receive in timed else round_.timing
                timed.add(state.receive)
                item = state.chunk(row_round, timing)
            state.receive(state.number, item)
            if row_round.finish_reason is not None:
                del self._rows[state.index]

    def _end_all(self, error: BaseException) -> None:
        reason = error if isinstance(error, OutriderError) else None
        ended = [*self._rows.values(), *self._arriving]
        self._engine, self._capacity = None, 0
        self._rows.clear()
        self._arriving.clear()
        self._cancelled.clear()
        for state in ended:
            other = SessionError(f"the engine of the session has stopped ({type(error).__name__}): start again")
            state.receive(state.number, reason or other)


def chunk_of(number: int, item: Chunk | OutriderError, num_rows: int) -> Chunk:
    """The chunk of one of several rows. Raises the error that came in its place."""
    if isinstance(item, NumericsError | DeviceError) and num_rows > 1:
        raise type(item)(f"prompt {number}: {item}")
    if isinstance(item, OutriderError):
        raise item
    return item
