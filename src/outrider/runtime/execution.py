"""Executions: ways to run the same functions of tensors.

A *step* is a pure function (lm, *static, *arguments) -> tensors, with hashable static values and tensors in the
arguments: a forward with sampling, or with verification. ``EagerExecution`` calls it. ``PreparedExecution`` is the base
of those that first compile or capture it, once for each static value and shape (outrider.compile).

An execution also rounds up lengths and batch sizes, so that few shapes occur.

This module does not know what the steps do.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from outrider.errors import CompileError
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_layers import LayerShape
from outrider.runtime.shape_buckets import eager_length, power_of_two, prepared_length

Step = Callable[..., tuple[Tensor, ...]]

MOST_PROGRAMS = 128  # per model; a server of 8 slots with one set of options uses about 30 per view length


class Execution(Protocol):
    """Way to run steps.

    Attributes:
        name: for tables and messages.
        favoured_k: values of K for adaptive schedules, with every drafter.
        lookahead: rounds that the loop starts ahead of the one that it reads next.
        is_prepared: whether each shape is compiled or captured when it first occurs, which takes time.
        rounds_per_look: rounds that the loop runs before the host reads the first of them.
        fuses: whether a step's small operations cost little, as they are compiled together.
        waits: whether a step waits until it is prepared. If not, it runs eagerly until then, unless it has to be
            repeatable.
    """

    name: str
    favoured_k: tuple[int, ...]
    lookahead: int
    rounds_per_look: int
    is_prepared: bool
    fuses: bool
    waits: bool

    def round_length(self, length: int) -> int:
        """Length of a view or cache for ``length`` tokens."""
        ...

    def round_rows(self, num_rows: int) -> int:
        """Batch size for ``num_rows`` unfinished rows."""
        ...

    def round_drafts(self, num_wanted: int, k: int) -> int:
        """Columns to verify where 0 <= num_wanted <= k tokens are drafted."""
        ...

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """Allocate an empty cache."""
        ...

    def turn(self) -> AbstractContextManager[Any]:
        """Lock held from running a step until its results are used, so that threads do not overwrite them."""
        ...

    def run(
        self,
        step: Step,
        lm: Any,
        static: tuple[Any, ...],
        arguments: tuple[Any, ...],
        *,
        is_repeatable: bool = True,
        bound: Bound | None = None,
    ) -> tuple[Tensor, ...]:
        """Run ``step(lm, *static, *arguments)``. The results are valid until the next run.

        Args:
            is_repeatable: run in one way, whatever has been prepared so far, so that equal arguments give equal bits.
            bound: of earlier calls of this step of this model.

        Raises:
            CompileError: this model or machine does not allow it to be prepared.
        """
        ...


class EagerExecution:
    """Runs steps eagerly."""

    name = "eager"
    favoured_k: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)
    lookahead = 0
    rounds_per_look = 1
    is_prepared = False
    fuses = False
    waits = True

    def round_length(self, length: int) -> int:
        return eager_length(length)

    def round_rows(self, num_rows: int) -> int:
        return num_rows

    def round_drafts(self, num_wanted: int, k: int) -> int:
        return num_wanted

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        return SlotCache.allocate(shapes, num_rows, capacity)

    def turn(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def run(
        self,
        step: Step,
        lm: Any,
        static: tuple[Any, ...],
        arguments: tuple[Any, ...],
        *,
        is_repeatable: bool = True,
        bound: Bound | None = None,
    ) -> tuple[Tensor, ...]:
        return step(lm, *static, *arguments)


@dataclass(slots=True)
class _Parts:
    """Parts of an argument; see ``Call``.

    Attributes:
        is_stable: the same object has the same parts in the next call.
    """

    tensors: list[Tensor] = field(default_factory=list)
    stores: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    form: list[Any] = field(default_factory=list)
    is_stable: bool = True


class Bound:
    """The arguments of a step and its program, from one call to the next, for one user of one model: arguments that are
    the same objects are not taken apart again, and if all have the same form, neither is the program looked up. (Most
    of a round's arguments stay: the cache, lengths, sampling options.) It keeps the arguments alive.

    Attributes:
        tensors, stores, form: see ``Call``.
        program: of the last call, if there was one.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.stores: list[Tensor] = []
        self.form: tuple[Any, ...] = ()
        self.program: Program | None = None
        self._static: tuple[Any, ...] | None = None
        self._arguments: tuple[Any, ...] = ()
        self._parts: list[_Parts] = []

    def take(self, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
        """Take the arguments of a call. Returns whether the last program fits them."""
        is_same = static == self._static and len(arguments) == len(self._arguments)
        if not is_same:
            self._static, self._arguments = static, (_NOTHING,) * len(arguments)
            self._parts = [_Parts() for _ in arguments]
        olds, lasts = self._arguments, self._parts
        changed = [i for i, value in enumerate(arguments) if value is not olds[i] or not lasts[i].is_stable]
        if not changed:
            return is_same
        has_new_stores = False
        for i in changed:
            last, parts = lasts[i], _Parts()
            _take_apart((arguments[i],), parts)
            is_same = is_same and parts.form == last.form and (not parts.stores or arguments[i] is olds[i])
            has_new_stores = has_new_stores or bool(parts.stores or last.stores)
            lasts[i] = parts
        self._arguments = arguments
        self.tensors = [tensor for parts in self._parts for tensor in parts.tensors]
        if has_new_stores:
            self.stores = [store for parts in self._parts for store in parts.stores]
        if not is_same:
            self.form = tuple(item for parts in self._parts for item in parts.form)
        return is_same


_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Call:
    """A step with its arguments.

    Attributes:
        tensors: those in the arguments, in order, contiguous.
        stores: the storage of the caches in them.
        states: those of ``stores`` that the step reads and then overwrites: running it twice on them changes the
            result.
        form: all else that a program depends on.
    """

    step: Step
    lm: Any
    static: tuple[Any, ...]
    arguments: tuple[Any, ...]
    tensors: list[Tensor] = field(default_factory=list)
    stores: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    form: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        _take_apart(self.arguments, _Parts(self.tensors, self.stores, self.states, self.form))

    def on(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the step on other tensors of the same shapes."""
        return self.step(self.lm, *self.static, *put_together(self.arguments, iter(tensors), iter(stores)))


class Program(Protocol):
    """Step that is ready to run on other tensors of the same shapes (see ``Call``)."""

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]: ...


class PreparedExecution(ABC):
    """Runs steps as programs that are prepared when first needed. For one model.

    Lengths and batch sizes are rounded up to powers of two. Keeps the MOST_PROGRAMS programs that were looked up most
    recently (one that is bound may run on without that). A failed future stays: its program is not tried again.
    """

    name: str
    favoured_k: tuple[int, ...]
    lookahead: int
    rounds_per_look = 1
    is_prepared = True
    fuses = False

    def __init__(self, *, waits: bool = True) -> None:
        self.waits = waits
        self._programs: OrderedDict[Any, Future[Program]] = OrderedDict()
        self._preparing = threading.RLock()

    @property
    def num_programs(self) -> int:
        """Number of programs, those in preparation included."""
        return len(self._programs)

    def round_length(self, length: int) -> int:
        return prepared_length(length)

    def round_rows(self, num_rows: int) -> int:
        return power_of_two(num_rows)

    def round_drafts(self, num_wanted: int, k: int) -> int:
        return k if num_wanted else 0

    @abstractmethod
    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache: ...

    @abstractmethod
    def turn(self) -> AbstractContextManager[Any]: ...

    def run(
        self,
        step: Step,
        lm: Any,
        static: tuple[Any, ...],
        arguments: tuple[Any, ...],
        *,
        is_repeatable: bool = True,
        bound: Bound | None = None,
    ) -> tuple[Tensor, ...]:
        bound = bound or Bound()
        if not bound.take(static, arguments):
            bound.program = None
        if bound.program is not None:
            return bound.program.run(bound.tensors, bound.stores)
        key = (step, id(lm.model), static, bound.form, self._key_of(bound.stores))
        with self._preparing:
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self._prepare(Call(step, lm, static, arguments))
                if len(self._programs) > MOST_PROGRAMS:
                    self._programs.popitem(last=False)
            self._programs.move_to_end(key)
        error = None
        if self.waits or is_repeatable:
            if (error := self._failure(step, program)) is not None:
                raise CompileError(str(error))  # raised again and again, one error would keep all frames alive
        elif not program.done() or (error := program.exception()) is not None:
            with self._beside(error):
                return step(lm, *static, *arguments)
        bound.program = program.result()
        return bound.program.run(bound.tensors, bound.stores)

    def _failure(self, step: Step, program: Future[Program]) -> BaseException | None:
        """Why a program cannot be prepared. Waits for it, unless the last one of this step that is done could not be
        prepared: the caller would most likely wait for the same failure."""
        if not program.done():
            with self._preparing:
                used = [other for (its_step, *_), other in self._programs.items() if its_step is step and other.done()]
            error = used[-1].exception() if used else None
            if error is not None:
                return error
        return program.exception()

    @abstractmethod
    def _key_of(self, stores: Sequence[Tensor]) -> Any:
        """Key of the cache storage that a program depends on, besides its shape."""

    @abstractmethod
    def _prepare(self, call: Call) -> Future[Program]:
        """Prepare a program, or begin to."""

    def _beside(self, error: BaseException | None) -> AbstractContextManager[Any]:
        """Context for an eager run of a step whose program is in preparation, or could not be prepared."""
        return nullcontext()


@cache
def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Field names of a dataclass in the arguments; None for other types."""
    return tuple(one.name for one in fields(kind) if one.init) if is_dataclass(kind) else None


def _take_apart(values: Iterable[Any], parts: _Parts) -> None:
    tensors, form = parts.tensors, parts.form  # local names, since this runs in every round
    for value in values:
        if value is None:
            form.append(None)
        elif isinstance(value, Tensor):
            tensors.append(contiguous := value.contiguous())
            parts.is_stable &= contiguous is value  # a copy holds what the tensor holds now
            form.append((value.shape, value.dtype))
        elif isinstance(value, SlotCache):
            parts.stores.extend(value.storage)
            parts.states.extend(value.storage[value.num_token_stores :])
            parts.is_stable &= not value.has_states  # its bound changes
            form.append((value.capacity, value.bound, *(store.shape for store in value.storage[:1])))
        elif isinstance(value, tuple):
            form.append(len(value))
            _take_apart(value, parts)
        elif (names := _fields_of(value.__class__)) is not None:
            _take_apart([getattr(value, name) for name in names], parts)
        else:
            form.append(value)


def put_together(value: Any, tensors: Iterator[Tensor], stores: Iterator[Tensor]) -> Any:
    """Copy of ``value`` over other tensors."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, SlotCache):
        return value.on([next(stores) for _ in value.storage])
    if isinstance(value, tuple):
        return tuple(put_together(item, tensors, stores) for item in value)
    if (names := _fields_of(value.__class__)) is not None:
        return type(value)(**{name: put_together(getattr(value, name), tensors, stores) for name in names})
    return value
