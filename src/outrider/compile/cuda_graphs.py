"""Captured: steps as CUDA graphs.

Eager, a step of a large model is a thousand kernels, each of which Python and the driver must start. A CUDA graph
records them once and starts them all with one call. It reads and writes where it was recorded: so inputs are copied to
fixed places first, results are found at fixed places, and caches take turns on storage that stays (as much as was ever
in use at once by caches of one size).

A model that is spread over several devices cannot be recorded.

On other devices the recording is left out and the step is called instead, on the same fixed places: for tests.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import OutOfMemoryError, Tensor

from outrider.compile.rotary import constant_frequencies
from outrider.errors import CompileError
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_layers import LayerShape
from outrider.runtime.execution import Call, PreparedExecution, Program, put_together

_TURN = threading.RLock()  # one for all models: drafts and verdicts of a round take the same turn
_NUM_WARM_UPS = 2  # libraries choose algorithms and take workspace on first use, which must not happen in a recording


class CapturedExecution(PreparedExecution):
    """Runs steps as CUDA graphs. Recording one takes as long as a few eager runs; nothing is kept on disk, and each has
    memory of its own for what the step makes on the way."""

    name = "captured"
    favoured_k: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)
    lookahead = 1  # the device works on while the host reads

    def __init__(self) -> None:
        super().__init__()
        self._free: dict[Any, list[tuple[Tensor, ...]]] = {}
        self._side: Any = None  # the stream of recordings; libraries keep workspace for each stream that they see

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """On storage that no other cache is using: graphs know it by its address."""
        free = self._free.setdefault((tuple(shapes), num_rows, capacity), [])
        try:
            storage = free.pop()
        except IndexError:
            storage = SlotCache.allocate(shapes, num_rows, capacity).storage
        for store in storage:
            store.zero_()  # a masked place still takes part in 0 * value, which must not be NaN
        cache = SlotCache(shapes, storage, capacity)
        weakref.finalize(cache, free.append, storage).atexit = False
        return cache

    def turn(self) -> AbstractContextManager[Any]:
        return _TURN

    def _key_of(self, stores: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(store.data_ptr() for store in stores[:1])  # the others are always found beside the first

    def _prepare(self, call: Call, is_urgent: bool) -> Future[Program]:
        made: Future[Program] = Future()
        try:
            made.set_result(self._record(call))
        except OutOfMemoryError:
            raise
        except Exception as error:  # what arbitrary models and drivers may raise has no common type
            reason = " ".join(str(error).split())[:300]
            message = f"{call.lm.name} cannot be captured here: {type(error).__name__}: {reason}"
            made.set_exception(CompileError(message))
        return made

    def _record(self, call: Call) -> Program:
        inputs, stores = [tensor.clone() for tensor in call.tensors], call.stores
        # On the same storage, but not the cache itself, whose end frees its storage. (Arguments are put together anew
        # in each run, since they may remember what they made of their tensors: see noise.py.)
        fixed = Call(call.step, call.lm, call.static, put_together(call.arguments, iter(inputs), iter(stores)))
        run = partial(fixed.on, inputs, stores)
        lm = call.lm
        states = [state.clone() for state in call.states]
        try:
            with constant_frequencies(lm.model):
                if lm.device.type != "cuda":
                    return _UnrecordedGraph(inputs, run)
                with torch.cuda.device(lm.device):
                    self._side = self._side or torch.cuda.Stream()
                    return _Graph(inputs, stores, lm.model, run, self._side)
        finally:
            _copy(states, call.states)  # as they were before it was tried


class _Graph:
    """One recorded step, on the current device."""

    def __init__(
        self,
        inputs: list[Tensor],
        stores: Sequence[Tensor],
        model: Any,
        call: Callable[[], tuple[Tensor, ...]],
        side: Any,
    ) -> None:
        self._inputs = inputs
        self._alive = tuple(stores), model  # the graph knows their tensors by address
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(_NUM_WARM_UPS):
                    call()
        finally:
            torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # In memory of its own: with a pool in common, one graph's intermediate values would lie over another's results.
        # On the stream of this device, since torch makes only one of its own, on whichever device comes first.
        with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
            self._results = call()

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        _copy(tensors, self._inputs)
        self._graph.replay()
        return self._results


class _UnrecordedGraph:
    """The same without a recording."""

    def __init__(self, inputs: list[Tensor], call: Callable[[], tuple[Tensor, ...]]) -> None:
        self._inputs, self._call = inputs, call
        self._results = tuple(result.clone() for result in call())

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        _copy(tensors, self._inputs)
        _copy(self._call(), self._results)
        return self._results


def _copy(sources: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for source, place in zip(sources, places, strict=True):
        place.copy_(source)
