"""Garbage collection while much is imported or loaded, which makes many objects and little garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect no garbage meanwhile: each collection would look through all that is there, a sixth of the time that
    PyTorch and Transformers take to be imported."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
