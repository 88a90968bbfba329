"""Fair scheduling: clients take turns, so that many requests of one client do not delay the others.

This module knows neither requests nor threads.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Turns(Generic[_Item]):
    """A fair queue. Clients take turns; within a client the lowest priority number goes first, then the oldest item.

    Args:
        has_priority_across_clients: the lowest number of all clients goes first; clients take turns on ties.
    """

    def __init__(self, *, has_priority_across_clients: bool = False) -> None:
        self._has_priority_across_clients = has_priority_across_clients
        self._lines: dict[str, list[tuple[int, int, _Item]]] = {}  # a heap per client; the next client is first
        self._arrivals = count()
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[_Item]:
        """Iterate in any order."""
        return (item for line in self._lines.values() for _, _, item in line)

    def push(self, item: _Item, client: str, priority: int = 0) -> None:
        heapq.heappush(self._lines.setdefault(client, []), (priority, next(self._arrivals), item))
        self._num_items += 1

    def pop(self, but: Container[str] = ()) -> tuple[str, _Item] | None:
        """Remove and return the next item and its client; None if there is none.

        Args:
            but: clients to skip.
        """
        clients = (client for client in self._lines if client not in but)
        if self._has_priority_across_clients:
            client = min(clients, key=lambda one: self._lines[one][0][0], default=None)  # the first of several
        else:
            client = next(clients, None)
        if client is None:
            return None
        line = self._lines.pop(client)
        _, _, item = heapq.heappop(line)
        if line:
            self._lines[client] = line  # behind the others
        self._num_items -= 1
        return client, item

    def remove(self, is_gone: Callable[[_Item], bool]) -> int:
        """Remove items. Returns the number removed."""
        lines = {client: [entry for entry in line if not is_gone(entry[2])] for client, line in self._lines.items()}
        for line in lines.values():
            heapq.heapify(line)
        self._lines = {client: line for client, line in lines.items() if line}
        num_before, self._num_items = self._num_items, sum(map(len, self._lines.values()))
        return num_before - self._num_items


class TurnsPool:
    """A few threads that serve clients in turn, and never all for the same client. For one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._most_of_one = max(num_threads - 1, 1)
        self._num_free = num_threads
        self._running: list[str] = []  # their clients
        self._waiting: Turns[tuple[Callable[[], Any], asyncio.Future[Any]]] = Turns()

    async def run(self, function: Callable[[], _Found], client: str) -> _Found:
        """Run a function and return its result. If the caller is cancelled before its turn, the function never runs."""
        future: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        self._waiting.push((function, future), client)
        self._start()
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.remove(lambda waiting: waiting[1] is future)
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._num_free:
            busy = {client for client in self._running if self._running.count(client) >= self._most_of_one}
            found = self._waiting.pop(busy)
            if found is None:
                return
            client, (function, future) = found
            if future.cancelled():  # just now
                continue
            self._num_free -= 1
            self._running.append(client)
            self._executor.submit(self._work, asyncio.get_running_loop(), client, function, future)

    def _work(
        self,
        loop: asyncio.AbstractEventLoop,
        client: str,
        function: Callable[[], Any],
        future: asyncio.Future[Any],
    ) -> None:
        """Run a function in a thread and hand its result to the event loop."""
        found: Any = None
        error: Exception | None = None
        try:
            found = function()
        except Exception as raised:  # the caller must see any error
            error = raised
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(self._end, client, future, found, error)

    def _end(self, client: str, future: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
        self._num_free += 1
        self._running.remove(client)
        if not future.done():
            if error is None:
                future.set_result(found)
            else:
                future.set_exception(error)
        self._start()
