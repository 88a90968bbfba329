"""Threads that serve clients in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from outrider.decoding.fair_queue import FairQueue

_Found = TypeVar("_Found")


class FairThreads:
    """A few threads that serve clients in turn, and never all for the same client. For one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._most_of_one = max(num_threads - 1, 1)
        self._num_free = num_threads
        self._running: list[str] = []  # their clients
        self._waiting: FairQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = FairQueue()

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
