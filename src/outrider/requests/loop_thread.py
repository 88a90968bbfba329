"""A thread that works beside an event loop.

The loop posts functions to it, which it runs between two steps of its work; it calls functions in the loop. Neither
waits for the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue


class LoopThread:
    """One thread and the event loop that started it. Call ``start`` and ``post`` from the loop, ``call`` from the
    thread, ``stop`` and ``join`` from anywhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def start(self, step: Callable[[], bool], *, begin: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        """Start the thread. All three functions run in it.

        Args:
            step: called again and again, as long as it returns True; then when something has been posted.
            begin: called first.
            fail: takes the error with which ``begin``, ``step`` or a posted function has ended the thread.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(step, begin, fail), name=self._name, daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        """Run a function in the thread, before its next step."""
        self._inbox.put(function)

    def stop(self) -> None:
        """Stop the thread after its current step."""
        self._inbox.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, unless the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self.stop()

    def _run(self, step: Callable[[], bool], begin: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        try:
            begin()
            has_work = False
            while self._take_in(has_work):
                has_work = step()
        except Exception as error:  # somebody must learn of any error
            fail(error)

    def _take_in(self, has_work: bool) -> bool:
        """Run what has been posted; wait for it when there is no work. Returns False at the end."""
        while not (has_work and self._inbox.empty()):
            if (function := self._inbox.get()) is None:
                return False
            function()
            has_work = True
        return True
