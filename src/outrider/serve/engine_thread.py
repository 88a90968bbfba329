"""The thread that owns the models: loads them, then steps their engines while there are requests.

One thread steps all engines, since they share a device: a round has all cores, or the whole GPU.

Models share time, not rounds: of those with work, the one that has had the least time runs the next round, so that a
small model does not wait for a large one after each of its rounds. One that was idle begins with the others' time.

This module does not know HTTP.

Source of the turns: start-time fair queuing (Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from outrider.errors import OutriderError
from outrider.requests.loop_thread import LoopThread
from outrider.serve.http_errors import Refusal
from outrider.serve.readiness import Readiness
from outrider.serve.served_model import ServedModel

_LOG = logging.getLogger("outrider.serve")


class EngineThread:
    """Steps the engines of all models. Call all methods from the event loop, except ``_*_on_thread`` and ``join``.

    Attributes:
        readiness: of the server.
        models: at least one.
        error: the reason of a failure.
    """

    def __init__(self, thread: LoopThread, readiness: Readiness, models: Sequence[ServedModel]) -> None:
        self.models = tuple(models)
        self.error: Exception | None = None
        self._thread, self.readiness = thread, readiness
        self._now_s = 0.0  # the time at which the current round began, on the clock that all models share
        self._next_s = dict.fromkeys(self.models, 0.0)  # when each may begin its next round, on that clock

    def start(self, on_ready: Callable[[], None], on_failure: Callable[[], None]) -> None:
        """Start loading. The event loop must be running; both callbacks are called in it."""
        self._on_ready, self._on_failure = on_ready, on_failure
        self._thread.start(self._run_on_thread, begin=self._open_on_thread, fail=self._fail_on_thread)

    def stop(self) -> None:
        """Stop the thread after its current round."""
        self._thread.stop()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    @property
    def num_open(self) -> int:
        """Unfinished rows and tasks."""
        return sum(model.room.num_open for model in self.models)

    def drain(self) -> None:
        """Accept no more requests."""
        if self.readiness.state in ("loading", "ready"):
            self.readiness.state = "draining"

    def abort(self, error: Exception) -> None:
        """End all running requests with an error."""
        for model in self.models:
            model.abort(error)

    # In the event loop, called by the thread

    def _set_ready(self) -> None:
        if self.readiness.state == "loading":  # else a shutdown signal came first
            self.readiness.state = "ready"
            self._on_ready()

    def _set_failed(self, error: Exception) -> None:
        self.readiness.state, self.error = "failed", error
        self.abort(Refusal("the engine has failed", status=500, type_="server_error"))
        self._on_failure()

    # In the thread

    def _open_on_thread(self) -> None:
        for index, model in enumerate(self.models):
            model.open_on_thread([other.decoder for other in self.models[:index]])
        self._thread.call(self._set_ready)

    def _run_on_thread(self) -> bool:
        """Run one round of one model. Returns whether there is more to do."""
        busy = [model for model in self.models if model.has_work]
        model = min(busy, key=self._next_s.__getitem__)  # the first of several
        self._now_s = max(self._now_s, self._next_s[model])
        begin_s = time.perf_counter()
        model.run_on_thread()
        self._next_s[model] = self._now_s + time.perf_counter() - begin_s
        return any(model.has_work for model in self.models)

    def _fail_on_thread(self, error: Exception) -> None:
        if not isinstance(error, OutriderError):
            _LOG.error("the engine has failed", exc_info=error)
        self._thread.call(self._set_failed, error)
