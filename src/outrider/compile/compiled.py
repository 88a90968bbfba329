"""Compiled: steps as ahead-of-time programs for the CPU.

A program is compiled from the model's own code. It has no guards and no Python inside, and it shares the weights of the
model in memory. Another process compiles it (service.py, worker.py), and it is cached on disk (program_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from outrider.compile.service import CompileService, shared_service
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_layers import LayerShape
from outrider.runtime.execution import Call, PreparedExecution, Program


class CompiledExecution(PreparedExecution):
    """Runs steps as programs compiled ahead of time. Compiling one takes half a minute, loading one from disk some
    milliseconds."""

    name = "compiled"
    favoured_k: tuple[int, ...] = (0, 2, 4)  # each K takes two or three programs
    lookahead = 0
    fuses = True

    def __init__(self, *, waits: bool = True, service: CompileService | None = None, rounds_per_look: int = 1) -> None:
        super().__init__(waits=waits)
        self.rounds_per_look = rounds_per_look
        self._service = service or shared_service()

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        return SlotCache.allocate(shapes, num_rows, capacity)

    def turn(self) -> AbstractContextManager[Any]:
        return nullcontext()  # each run allocates its results

    def _key_of(self, stores: Sequence[Tensor]) -> None:
        return None  # caches are inputs of the program

    def _prepare(self, call: Call) -> Future[Program]:
        return self._service.order(call).program

    def _beside(self, error: BaseException | None) -> AbstractContextManager[Any]:
        if error is not None:
            self._service.report(error)
        return self._service.room()
