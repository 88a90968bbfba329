"""Threads that serve clients in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from outrider.decoding.fair_queue import FairQueue

_Found = TypeVar("_Found")


class FairThreads:
    """A few threads that serve clients in turn, and never all for the same client. For one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads, self._most_of_one = num_threads, max(num_threads - 1, 1)
        self._running: list[str] = []  # their clients
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def run(self, function: Callable[[], _Found], client: str) -> _Found:
        """Run a function and return its result. If the caller is cancelled before its turn, the function never runs."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.push(turn, client)
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(lambda one: one is turn)
            if not turn.cancelled():  # its turn has just come
                self._end(client)
            raise

        def end(work: Future[_Found]) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._end, client)

        work = self._executor.submit(function)
        work.add_done_callback(end)  # later than the caller, if the caller is cancelled
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while len(self._running) < self._num_threads:
            busy = {client for client in self._running if self._running.count(client) >= self._most_of_one}
            if (found := self._waiting.pop(busy)) is None:
                return
            client, turn = found
            if not turn.cancelled():
                self._running.append(client)
                turn.set_result(None)

    def _end(self, client: str) -> None:
        self._running.remove(client)
        self._begin()
