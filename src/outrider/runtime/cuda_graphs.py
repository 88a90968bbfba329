"""Captured: steps as CUDA graphs.

A step of a large model is a thousand kernels, each of which Python and the driver launch. A CUDA graph captures them
once and launches them all with one call. It reads and writes the addresses of the capture: so inputs are copied to
static buffers first, results lie in static buffers, and caches reuse storage that stays allocated (as much as was ever
in use at once by caches of one size).

A model that is spread over several devices cannot be captured. Nothing here is measured yet.

On other devices nothing is captured: the step is called on the same static buffers. This is for tests.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import OutOfMemoryError, Tensor

from outrider.errors import ExecutionError
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_shapes import LayerShape
from outrider.runtime.execution import Execution, Step
from outrider.runtime.modules import constant_frequencies
from outrider.runtime.shape_buckets import power_of_two, prepared_length

_LOG = logging.getLogger(__name__)
MOST_PROGRAMS = 128  # per model; a server of 8 slots with one set of options uses about 30 per view length
_TURN = threading.RLock()  # one for all models: draft and verify steps of a round share it
_NUM_WARM_UPS = 2  # libraries pick algorithms and allocate workspace on first use: not while capturing


class CapturedExecution(Execution):
    """Runs steps as CUDA graphs, captured when they are first needed. For one model. Capturing one takes as long as a
    few eager runs; nothing is cached on disk, and each graph has its own memory pool.

    Lengths and batch sizes are rounded up to powers of two. Keeps the MOST_PROGRAMS graphs that were looked up most
    recently. A step that cannot be captured is not tried again.

    Args:
        is_required: such a step is an error; else it runs eagerly, and a warning says so.
    """

    name = "captured"
    lookahead = 1  # the device works on while the host reads
    is_prepared = True

    def __init__(self, *, is_required: bool = True) -> None:
        self._is_required, self._has_warned = is_required, False
        self._programs: OrderedDict[Any, _Program | str] = OrderedDict()  # or why there is none
        self._preparing = threading.RLock()
        self._free: dict[Any, list[tuple[Tensor, ...]]] = {}
        self._side: Any = None  # capture stream; libraries keep a workspace for each stream

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    def round_length(self, length: int) -> int:
        return prepared_length(length)

    def round_rows(self, num_rows: int) -> int:
        return power_of_two(num_rows)

    def round_drafts(self, num_wanted: int, k: int) -> int:
        return k if num_wanted else 0

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """Cache on storage that no other cache is using: graphs know storage by its address."""
        free = self._free.setdefault((tuple(shapes), num_rows, capacity), [])
        try:
            storage = free.pop()
        except IndexError:
            storage = SlotCache.allocate(shapes, num_rows, capacity).storage
        for store in storage:
            store.zero_()  # since 0 * value of a masked place must not be NaN
        cache = SlotCache(shapes, storage, capacity)
        weakref.finalize(cache, free.append, storage).atexit = False
        return cache

    def turn(self) -> AbstractContextManager[Any]:
        return _TURN

    def run(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        call = Call(step, lm, static, arguments)
        program = self._program((step, id(lm.backend), static, tuple(call.form)), call)
        if isinstance(program, _Program):
            return program.run(call.tensors)
        if self._is_required:
            raise ExecutionError(f"{program} (leave out execution='captured')")
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("%s: such steps run eagerly", program)
        return step(lm, *static, *arguments)

    def _program(self, key: Any, call: Call) -> _Program | str:
        with self._preparing:
            if key not in self._programs:
                self._programs[key] = self._prepare(call)
                if len(self._programs) > MOST_PROGRAMS:
                    self._programs.popitem(last=False)
            self._programs.move_to_end(key)
            return self._programs[key]

    def _prepare(self, call: Call) -> _Program | str:
        try:
            return self._record(call)
        except OutOfMemoryError:
            raise
        except Exception as error:  # what arbitrary models and drivers may raise has no common type
            reason = " ".join(str(error).split())[:300]
            return f"{call.lm.name} cannot be captured here: {type(error).__name__}: {reason}"

    def _record(self, call: Call) -> _Program:
        inputs, stores = [tensor.clone() for tensor in call.tensors], call.stores
        # On the same storage, but not the cache itself, whose end frees its storage. (Arguments are rebuilt in each
        # run, since they may keep what they derived from their tensors: see noise.py.)
        fixed = Call(call.step, call.lm, call.static, _put_together(call.arguments, iter(inputs), iter(stores)))
        run = partial(fixed.on, inputs, stores)
        lm = call.lm
        states = [state.clone() for state in call.states]
        try:
            with constant_frequencies(lm.model):
                if lm.device.type != "cuda":
                    results = tuple(result.clone() for result in run())
                    return _Program(inputs, results, lambda: _copy(run(), results))
                with torch.cuda.device(lm.device):
                    self._side = self._side or torch.cuda.Stream()
                    return _captured(inputs, run, (stores, lm.backend), self._side)
        finally:
            _copy(states, call.states)  # undo the warm-up runs


@dataclass(frozen=True, slots=True)
class Call:
    """A step with its arguments, taken apart: a graph knows tensors by their addresses, so that it must find them in
    arguments of any form."""

    step: Step
    lm: Any
    static: tuple[Any, ...]
    arguments: tuple[Any, ...]
    tensors: list[Tensor] = field(default_factory=list)  # the tensors in the arguments, in order, contiguous
    stores: list[Tensor] = field(default_factory=list)  # the storage of the caches in them
    # Those of ``stores`` that the step reads and then overwrites: running it twice on them changes the result:
    states: list[Tensor] = field(default_factory=list)
    form: list[Any] = field(default_factory=list)  # all else that a program depends on

    def __post_init__(self) -> None:
        self._take_apart(self.arguments)

    def _take_apart(self, values: Iterable[Any]) -> None:
        tensors, form = self.tensors, self.form  # local names, since this runs in every round
        for value in values:
            if value is None:
                form.append(None)
            elif isinstance(value, Tensor):
                tensors.append(value.contiguous())
                form.append((value.shape, value.dtype))
            elif isinstance(value, SlotCache):
                self.stores.extend(value.storage)
                self.states.extend(value.storage[value.num_token_stores :])
                # The first store identifies them all.
                first = [(store.shape, store.data_ptr()) for store in value.storage[:1]]
                form.append((value.capacity, value.bound, *first))
            elif isinstance(value, tuple):
                form.append(len(value))
                self._take_apart(value)
            elif (names := _fields_of(value.__class__)) is not None:
                self._take_apart([getattr(value, name) for name in names])
            else:
                form.append(value)

    def on(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the step on other tensors of the same shapes."""
        return self.step(self.lm, *self.static, *_put_together(self.arguments, iter(tensors), iter(stores)))


@cache
def _fields_of(kind: type) -> tuple[str, ...] | None:
    return tuple(one.name for one in fields(kind) if one.init) if is_dataclass(kind) else None


def _put_together(value: Any, tensors: Iterator[Tensor], stores: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, SlotCache):
        return value.on([next(stores) for _ in value.storage])
    if isinstance(value, tuple):
        return tuple(_put_together(item, tensors, stores) for item in value)
    if (names := _fields_of(value.__class__)) is not None:
        return type(value)(**{name: _put_together(getattr(value, name), tensors, stores) for name in names})
    return value


class _Program:
    """A step that is ready to run, on static buffers: ``replay`` runs it on ``inputs``, to ``results``."""

    def __init__(self, inputs: list[Tensor], results: tuple[Tensor, ...], replay: Callable[[], None]) -> None:
        self.inputs, self.results, self.replay = inputs, results, replay

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the step on other tensors of the same shapes (see ``Call``)."""
        _copy(tensors, self.inputs)
        self.replay()
        return self.results


def _captured(
    inputs: list[Tensor], call: Callable[[], tuple[Tensor, ...]], alive: tuple[Any, ...], side: Any
) -> _Program:
    """Capture a step on the current device. The graph knows tensors of ``alive`` by address."""
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                call()
    finally:
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # No shared pool: one graph's intermediate values would overwrite another's results.
    # This device's stream: torch makes only one by itself, on whichever device comes first.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        results = call()

    def replay(graph: Any = graph, alive: Any = alive) -> None:
        graph.replay()

    return _Program(inputs, results, replay)


def _copy(sources: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for source, place in zip(sources, places, strict=True):
        place.copy_(source)
