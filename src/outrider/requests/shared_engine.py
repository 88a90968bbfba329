"""One engine for several streams, which come and go.

Iterating over one stream steps the engine; chunks of other streams are kept for them. Any thread may iterate: one steps
at a time, and the others find their chunks when it is their turn.

The cache grows: a sequence that does not fit waits until all rows have ended, and then a larger engine replaces this
one, without its prefixes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.decoding.engine import Engine
from outrider.errors import DeviceError, NumericsError, OutriderError, SessionError
from outrider.records import Chunk, Round, Timing
from outrider.requests.state import RequestState

Item = Chunk | OutriderError
"""The next chunk of a row, or the error that ends it."""


Receive = Callable[[int, Item], None]
"""Takes the items of some rows, with the number that each row has there."""


@dataclass(slots=True, eq=False)
class SharedRow:
    """A row of one stream.

    Attributes:
        room: the most tokens that its rounds may commit, prompt included.
        index: the engine's number of it; -1 while it waits here.
    """

    number: int
    state: RequestState
    room: int
    receive: Receive
    index: int = -1


class SharedEngine:
    """An engine that is made when a row needs it.

    ``drop`` may be called from anywhere, also by the garbage collector in the middle of a step.
    """

    def __init__(self, make: Callable[[int], Engine], *, least_capacity: int = 0, most_capacity: int) -> None:
        """
        Args:
            make: a capacity -> an engine.
            least_capacity, most_capacity: the bounds of the engine's capacity.
        """
        self._make, self._least_capacity, self._most_capacity = make, least_capacity, most_capacity
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._capacity = 0
        self._is_closed = False
        self._owner: int | None = None  # the thread that has the lock
        self._waiting: deque[SharedRow] = deque()
        self._rows: dict[int, SharedRow] = {}
        self._dropped: deque[SharedRow] = deque()

    def check_open(self) -> None:
        """Raises SessionError."""
        if self._is_closed:
            raise SessionError("the session is closed: open another")

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

    def submit(self, rows: Sequence[SharedRow]) -> None:
        """Queue rows. Raises SessionError."""
        with self._turn():
            self.check_open()
            self._waiting.extend(rows)

    def drop(self, rows: Iterable[SharedRow]) -> None:
        """Cancel rows: they leave before the next round, and nothing more is received."""
        self._dropped.extend(rows)

    def step(self, unless: Sized = ()) -> bool:
        """Run one round, unless something is in ``unless`` by the time that no other thread does.

        Returns:
            Whether there are more rows.

        Raises:
            Exception: any error of the engine. It ends all rows; the next one gets a new engine.
            SessionError: called by a hook within a step.
        """
        with self._turn():
            if unless:
                return True
            self._leave_dropped()
            try:
                self._begin()
                round_ = None if self._engine is None else self._engine.step()
                if round_ is not None:
                    self._deliver(round_)
            except BaseException as error:  # no stream goes on without a chunk that was lost
                self._end_all(error)
                raise
            return bool(self._rows or self._waiting)

    def close(self) -> None:
        """End all rows, and free the engine. Raises SessionError when a hook calls it within a step."""
        with self._turn():
            self._is_closed = True
            self._end_all(SessionError("the session was closed before the output was complete"))

    def _begin(self) -> None:
        """Submit rows in the order of their arrival."""
        while self._waiting:
            row = self._waiting[0]
            if self._engine is None or row.room > self._capacity:
                if self._rows:
                    return
                self._engine = None  # its cache is freed before the next one is allocated
                self._enlarge(max(row.room for row in self._waiting))
            assert self._engine is not None
            self._waiting.popleft()
            row.index = self._engine.submit(row.state.request)
            self._rows[row.index] = row

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

    def _leave_dropped(self) -> None:
        while self._dropped:
            row = self._dropped.popleft()
            if row in self._waiting:
                self._waiting.remove(row)
            elif self._rows.get(row.index) is row:
                del self._rows[row.index]
                assert self._engine is not None
                self._engine.cancel(row.index)

    def _deliver(self, round_: Round) -> None:
        timed = set()
        for row_round in round_.rows:
            row = self._rows[row_round.row]
            if row_round.error is not None:
                item: Item = NumericsError(row_round.error)
            else:
                # The first chunk of a round carries its timing, so that the timings of a stream's chunks add up.
                timing = Timing() if row.receive in timed else round_.timing
                timed.add(row.receive)
                item = row.state.chunk(row_round, timing, row.number)
            if row_round.finish_reason is not None:
                del self._rows[row.index]
            row.receive(row.number, item)

    def _end_all(self, error: BaseException) -> None:
        reason = error if isinstance(error, OutriderError) else None
        rows = [*self._rows.values(), *self._waiting]
        self._engine, self._capacity = None, 0
        self._rows.clear()
        self._waiting.clear()
        for row in rows:
            other = SessionError(f"the engine of the session has stopped ({type(error).__name__}): start again")
            row.receive(row.number, reason or other)


class RowStream:
    """The rows of one caller, who iterates over pairs: the number of a row and its next item."""

    def __init__(self, engine: SharedEngine) -> None:
        self._engine = engine
        self._arrived: deque[tuple[int, Item]] = deque()
        self._open: dict[int, SharedRow] = {}

    @property
    def num_open(self) -> int:
        """Rows that have not ended."""
        return len(self._open)

    def submit(self, number: int, state: RequestState, room: int) -> None:
        """Add a row. Raises SessionError."""
        row = SharedRow(number, state, room, self._receive)
        self._engine.submit([row])
        self._open[number] = row

    def _receive(self, number: int, item: Item) -> None:
        self._arrived.append((number, item))

    def __iter__(self) -> Iterator[tuple[int, Item]]:
        return self

    def __next__(self) -> tuple[int, Item]:
        if not self._open:
            raise StopIteration
        while not self._arrived:
            self._engine.step(unless=self._arrived)
        number, item = self._arrived.popleft()
        if isinstance(item, OutriderError) or item.finish_reason is not None:
            del self._open[number]
        return number, item

    def close(self) -> None:
        """Cancel the rows that have not ended."""
        self._engine.drop(self._open.values())
        self._open = {}
