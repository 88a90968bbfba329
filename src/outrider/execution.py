"""Executions: ways to run the same functions of tensors.

A *step* is a pure function (lm, *static, *arguments) -> tensors, where static values are hashable and arguments hold
tensors: a forward with what is drawn from it, or with the verdict on it. ``Eager`` just calls it; ``Prepared`` is what
those have in common that make something of it first, once for each static value and shape (compiled.py, captured.py).

So that few shapes occur, an execution also says to which sizes lengths and rows are rounded up.

This module does not know what the steps do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

from outrider.cache import LayerShape, SlotCache
from outrider.rounding import eager_length, power_of_two, prepared_length

Step = Callable[..., tuple[Tensor, ...]]


class Execution(Protocol):
    """A way to run steps.

    Attributes:
        name: for tables and messages.
        favoured_k: the K that an adaptive schedule chooses among.
    """

    name: str
    favoured_k: tuple[int, ...]

    def round_length(self, length: int) -> int:
        """The length of view or cache to use for so many tokens."""
        ...

    def round_rows(self, num_rows: int) -> int:
        """The batch size to use for so many unfinished rows."""
        ...

    def round_drafts(self, num_wanted: int, k: int) -> int:
        """How many columns to verify where 0 <= num_wanted <= k tokens are drafted."""
        ...

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        """An empty cache."""
        ...

    def run(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """``step(lm, *static, *arguments)``. The results stand until the next run."""
        ...


class Eager:
    """Runs steps as they are written."""

    name = "eager"
    favoured_k: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)

    def round_length(self, length: int) -> int:
        return eager_length(length)

    def round_rows(self, num_rows: int) -> int:
        return num_rows

    def round_drafts(self, num_wanted: int, k: int) -> int:
        return num_wanted

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        return SlotCache.empty(shapes, num_rows, capacity)

    def run(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return step(lm, *static, *arguments)


class Program(Protocol):
    """A step that is ready to run on other tensors of the same shapes."""

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """
        Args:
            tensors: those in the step's arguments, in order.
            stores: the storage of the caches among them.
        """
        ...


class Prepared:
    """Runs steps as programs, which are made when they are first needed. For one model.

    Lengths and rows are rounded up to powers of two.
    """

    name: str
    favoured_k: tuple[int, ...]

    def __init__(self) -> None:
        self._programs: dict[Any, Program] = {}

    @property
    def num_programs(self) -> int:
        """Programs in use so far."""
        return len(self._programs)

    def round_length(self, length: int) -> int:
        return prepared_length(length)

    def round_rows(self, num_rows: int) -> int:
        return power_of_two(num_rows)

    def round_drafts(self, num_wanted: int, k: int) -> int:
        return k if num_wanted else 0

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        return SlotCache.empty(shapes, num_rows, capacity)

    def run(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        tensors: list[Tensor] = []
        stores: list[Tensor] = []
        form: list[Any] = []
        _take_apart(arguments, tensors, stores, form)
        key = (step, id(lm.model), static, tuple(form), self._key_of(stores))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._prepare(step, lm, static, arguments, tensors, stores)
        return program.run(tensors, stores)

    @abstractmethod
    def _key_of(self, stores: Sequence[Tensor]) -> Any:
        """What a program depends on of the storage of caches, besides its shape."""

    @abstractmethod
    def _prepare(
        self,
        step: Step,
        lm: Any,
        static: tuple[Any, ...],
        arguments: tuple[Any, ...],
        tensors: Sequence[Tensor],
        stores: Sequence[Tensor],
    ) -> Program:
        """
        Args:
            tensors, stores: those in ``arguments``.
        """


@lru_cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init)


def _take_apart(value: Any, tensors: list[Tensor], stores: list[Tensor], form: list[Any]) -> None:
    """Append the tensors in ``value``, contiguous, and to ``form`` all else that a program depends on."""
    if isinstance(value, Tensor):
        tensors.append(value.contiguous())
        form.append((value.shape, value.dtype))
    elif isinstance(value, SlotCache):
        stores.extend(value.storage)
        form.append((value.capacity, *(store.shape for store in value.storage[:1])))
    elif isinstance(value, tuple):
        form.append(len(value))
        for item in value:
            _take_apart(item, tensors, stores, form)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in _field_names(type(value)):
            _take_apart(getattr(value, name), tensors, stores, form)
    else:
        form.append(value)


def put_together(value: Any, tensors: Iterator[Tensor], stores: Iterator[Tensor]) -> Any:
    """``value`` with other tensors in the place of its own."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, SlotCache):
        return SlotCache([next(stores) for _ in value.storage], value.capacity)
    if isinstance(value, tuple):
        return tuple(put_together(item, tensors, stores) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {name: put_together(getattr(value, name), tensors, stores) for name in _field_names(type(value))}
        return type(value)(**parts)
    return value
