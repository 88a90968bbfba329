"""Calls of a step: its arguments taken apart into tensors, storage of caches and the rest, and put together again.

A graph of a step knows tensors by their addresses, so that it must find them in arguments of any form (cuda_graphs.py).
This module does not know what the steps do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from outrider.runtime.cache import SlotCache

Step = Callable[..., tuple[Tensor, ...]]


@dataclass(slots=True)
class _Parts:
    """Parts of an argument; see ``Call``.

    Attributes:
        is_stable: whether the same object has the same parts in the next call.
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
        program: the program of the last call, if there was one.
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
        tensors: the tensors in the arguments, in order, contiguous.
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
