"""Executions: ways to run the same functions of tensors.

A *step* is a frozen record of what is fixed, K or the rule, and is called with a model and with what changes from round
to round, tensors and caches: a forward with sampling, or with verification. Its result is a tensor, or a record of
tensors. ``EagerExecution`` calls it. ``CapturedExecution`` captures it first, once for each step and each form of the
arguments (cuda_graphs.py).

An execution also rounds up lengths and batch sizes, so that few shapes occur.

This module does not know what the steps do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_shapes import LayerShape

R = TypeVar("R")
_STEP = 64  # places; eager shapes are free, but fewer view lengths mean fewer mask sizes


class Execution:
    """Runs each step directly. Abstract: others say what they are called, and what they do otherwise."""

    name: str  # in tables and messages
    favoured_k: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)  # values of K for adaptive schedules, with every drafter
    lookahead = 0  # rounds that the loop starts ahead of the one that it reads next
    is_prepared = False  # whether each shape is captured when it first occurs, which takes time

    def round_length(self, length: int) -> int:
        """Length of a view or cache for ``length`` tokens."""
        return -(-length // _STEP) * _STEP

    def round_rows(self, num_rows: int) -> int:
        """Batch size for ``num_rows`` unfinished rows."""
        return num_rows

    def round_drafts(self, num_wanted: int, k: int) -> int:
        """Columns to verify where 0 <= num_wanted <= k tokens are drafted."""
        return num_wanted

    def new_cache(self, shapes: Sequence[LayerShape], num_rows: int, capacity: int) -> SlotCache:
        return SlotCache.allocate(shapes, num_rows, capacity)

    def turn(self) -> AbstractContextManager[Any]:
        """Lock held from running a step until its results are used, so that threads do not overwrite them."""
        return nullcontext()

    def run(self, step: Callable[..., R], lm: Any, **arguments: Any) -> R:
        """Run ``step(lm, **arguments)``. The result is valid until the next run. Raises ExecutionError: this model or
        machine does not allow it."""
        return step(lm, **arguments)


class EagerExecution(Execution):
    """Steps of any model, in its own code."""

    name = "eager"


class NativeExecution(Execution):
    """Steps of a model that the native engine runs."""

    name = "native"


class Clock:
    """Marks in the work of a device, and the seconds between them, without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_events, self._must_wait = device.type == "cuda", device.type == "mps"

    def mark(self) -> Any:
        """Mark the end of all work that was submitted so far."""
        if self._has_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._must_wait:
            torch.mps.synchronize()
        return time.perf_counter()

    def wait(self, mark: Any) -> None:
        """Wait until the work before a mark is done."""
        if self._has_events:
            mark.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that were waited for."""
        if self._has_events:
            return float(begin.elapsed_time(end)) / 1e3
        return float(end - begin)
