"""Captured: steps as CUDA graphs.

A step of a large model is a thousand kernels, each of which Python and the driver launch. A CUDA graph captures them
once and launches them all with one call. It reads and writes the addresses of the capture: so inputs are copied to
static buffers first, results lie in static buffers, and caches reuse storage that stays allocated (as much as was ever
in use at once by caches of one size).

Nothing here was measured on a device yet. So each program proves itself: its first runs are compared with the step
itself, whose results are used meanwhile, and a program that differs or fails makes its execution eager.

A model that is spread over several devices cannot be captured. On other devices than CUDA's nothing is captured: the
step is called on the same static buffers. This is for tests.

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
from outrider.runtime.execution import Execution, R
from outrider.runtime.modules import constant_frequencies
from outrider.runtime.shape_buckets import power_of_two

_LOG = logging.getLogger(__name__)
MOST_PROGRAMS = 128  # per model; a server of 8 slots with one set of options uses about 30 per view length
_TURN = threading.RLock()  # one for all models: draft and verify steps of a round share it
_LEAST_VIEW = 128  # places of a view
_NUM_WARM_UPS = 2  # libraries pick algorithms and allocate workspace on first use: not while capturing
_NUM_COMPARED = 2  # runs of each program: stale inputs and results show in the second


class CapturedExecution(Execution):
    """Runs steps as CUDA graphs, captured when they are first needed. For one model. Capturing one takes as long as a
    few eager runs; nothing is cached on disk, and each graph has its own memory pool.

    Lengths and batch sizes are rounded up to powers of two. Keeps the MOST_PROGRAMS graphs that were looked up most
    recently. If it ``is_required``, a step that cannot be captured, or gives other results then, is an error; else all
    steps run eagerly from there on, and a warning says so."""

    name = "captured"
    lookahead = 1  # the device works on while the host reads
    is_prepared = True

    def __init__(self, *, is_required: bool = True) -> None:
        self._is_required, self._fault = is_required, ""  # why steps run eagerly
        self._programs: OrderedDict[Any, _Program] = OrderedDict()
        self._free: dict[Any, list[tuple[Tensor, ...]]] = {}
        self._side: Any = None  # capture stream; libraries keep a workspace for each stream

    def round_length(self, length: int) -> int:
        return max(_LEAST_VIEW, power_of_two(length))

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

    def run(self, step: Callable[..., R], lm: Any, **arguments: Any) -> R:
        if not self._fault:
            call = Call(step, lm, arguments)
            # A constraint may have functions, which read logits on the host.
            is_possible = not any(map(callable, call.form))
            with _TURN:
                if is_possible and (results := self._results(call)) is not None:
                    return results  # type: ignore[no-any-return]
        if self._fault and self._is_required:
            raise ExecutionError(f"{self._fault} (leave out execution='captured')")
        return step(lm, **arguments)

    def _results(self, call: Call) -> Any:
        """The results of a program, or of the step that the program is compared with; None after a fault."""
        key = call.step, id(call.lm.backend), tuple(call.form)
        program = self._programs.get(key)
        if program is not None and program.num_compared == _NUM_COMPARED:
            self._programs.move_to_end(key)
            return program.run(call.tensors)
        # The program and the step begin with the same cache, of which a wrong program may overwrite any part.
        try:
            before = [store.clone() for store in call.stores]
            try:
                if program is None:
                    program = self._programs[key] = self._record(call)
                    _copy(before, call.stores)  # undo the warm-up runs
                found = {"results": program.run(call.tensors), "states": tuple(one.clone() for one in call.states)}
            finally:
                _copy(before, call.stores)
        except Exception as error:  # what arbitrary models and drivers may raise has no common type
            if self._is_required and isinstance(error, OutOfMemoryError):
                raise
            reason = " ".join(str(error).split())[:300]
            return self._give_up(f"{call.lm.name} cannot be captured here: {type(error).__name__}: {reason}")
        results = call.on(call.tensors, call.stores)
        program.num_compared += 1
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        wanted = {"results": results, "states": tuple(call.states)}
        for (name, mine), (_, its) in zip(_parts(found), _parts(wanted), strict=True):
            if isinstance(its, Tensor) and not _is_close(mine, its, call.lm.dtype):
                self._give_up(f"{call.lm.name} differs when captured: {type(call.step).__name__} gives other {name}")
                return None if self._is_required else results
        return results

    def _give_up(self, fault: str) -> None:
        self._fault = fault
        self._programs.clear()
        if not self._is_required:
            self.name = "eager"
            _LOG.warning("%s: the model runs eagerly from here on", fault)

    def _record(self, call: Call) -> _Program:
        inputs, stores, lm = [tensor.clone() for tensor in call.tensors], call.stores, call.lm
        # On the same storage, but not the cache itself, whose end frees its storage.
        fixed = Call(call.step, lm, _put_together(call.arguments, iter(inputs), iter(stores)))
        run = partial(fixed.on, inputs, stores)
        with constant_frequencies(lm.model):
            if lm.device.type != "cuda":
                return _called(inputs, run)
            with torch.cuda.device(lm.device):
                self._side = self._side or torch.cuda.Stream()
                # Constants that the model was given or has derived, besides its weights.
                constants = [value for value in vars(lm).values() if isinstance(value, Tensor)]
                return _captured(inputs, run, (stores, lm.backend, constants), self._side)


@dataclass(frozen=True, slots=True)
class Call:
    """A step with its arguments, taken apart: a graph knows tensors by their addresses, so that it must find them in
    arguments of any form."""

    step: Callable[..., Any]
    lm: Any
    arguments: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)  # the tensors in the arguments, in order, contiguous
    stores: list[Tensor] = field(default_factory=list)  # the storage of the caches in them
    # Those of ``stores`` that the step reads and then overwrites: running it twice on them changes the result:
    states: list[Tensor] = field(default_factory=list)
    form: list[Any] = field(default_factory=list)  # all else that a program depends on

    def __post_init__(self) -> None:
        for _, value in _parts(self.arguments):
            if isinstance(value, Tensor):
                self.tensors.append(value.contiguous())
                self.form.append((value.shape, value.dtype))
            elif isinstance(value, SlotCache):
                self.stores.extend(value.storage)
                self.states.extend(value.storage[value.num_token_stores :])
                # The first store identifies them all.
                first = [(store.shape, store.data_ptr()) for store in value.storage[:1]]
                self.form.append((value.capacity, value.bound, *first))
            else:
                self.form.append(value)

    def on(self, tensors: Iterable[Tensor], stores: Iterable[Tensor]) -> Any:
        """Run the step on other tensors of the same shapes, in arguments that are made for this run, since they may
        keep what they derive from their tensors (see noise.py)."""
        return self.step(self.lm, **_put_together(self.arguments, iter(tensors), iter(stores)))


@cache
def _fields_of(kind: type) -> tuple[str, ...] | None:
    return tuple(one.name for one in fields(kind) if one.init) if is_dataclass(kind) else None


def _parts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors, caches and other values in records of any form, with the names of the innermost fields."""
    if isinstance(value, dict):
        parts: Iterable[tuple[str, Any]] = value.items()
    elif isinstance(value, tuple):
        parts = ((name, one) for one in value)
    elif (names := _fields_of(value.__class__)) is not None:
        parts = ((own, getattr(value, own)) for own in names)
    else:
        yield name, value
        return
    for own, one in parts:
        yield from _parts(one, own)


def _put_together(value: Any, tensors: Iterator[Tensor], stores: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, SlotCache):
        return value.on([next(stores) for _ in value.storage])
    if isinstance(value, dict):
        return {name: _put_together(one, tensors, stores) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_put_together(one, tensors, stores) for one in value)
    if (names := _fields_of(value.__class__)) is not None:
        return type(value)(**{name: _put_together(getattr(value, name), tensors, stores) for name in names})
    return value


@dataclass(slots=True)
class _Program:
    """A step that is ready to run, on static buffers: ``replay`` runs it on ``inputs``, to ``results``."""

    inputs: list[Tensor]
    results: Any
    replay: Callable[[], None]
    num_compared: int = 0

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run the step on other tensors of the same shapes (see ``Call``)."""
        _copy(tensors, self.inputs)
        self.replay()
        return self.results


def _called(inputs: list[Tensor], call: Callable[[], Any]) -> _Program:
    """A step on a device without graphs."""
    results = call()
    return _Program(inputs, results, lambda: _copy(_tensors(call()), _tensors(results)))


def _captured(inputs: list[Tensor], call: Callable[[], Any], alive: tuple[Any, ...], side: Any) -> _Program:
    """Capture a step on the current device. The graph knows tensors of ``alive`` by address."""
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        # Of this device: torch makes only one stream by itself, on whichever device comes first; and after a capture
        # that fails it leaves the current stream to be restored here.
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                call()
            # No shared pool: one graph's intermediate values would overwrite another's results.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                results = call()
    finally:
        torch.cuda.current_stream().wait_stream(side)

    def replay(graph: Any = graph, alive: Any = alive) -> None:
        graph.replay()

    return _Program(inputs, results, replay)


def _is_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results are the same: whole numbers exactly, others up to what rounding explains in the type of the
    activations. A graph replays the same kernels, so bits are equal as a rule; but some kernels add in another order
    each time."""
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    error = max(torch.finfo(dtype).eps, torch.finfo(wanted.dtype).eps) ** 0.5
    return torch.allclose(found, wanted, rtol=error, atol=error, equal_nan=True)


def _tensors(value: Any) -> list[Tensor]:
    return [one for _, one in _parts(value) if isinstance(one, Tensor)]


def _copy(sources: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for source, place in zip(sources, places, strict=True):
        place.copy_(source)
