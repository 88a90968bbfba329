"""Notices that other libraries log while a model is loaded, about what its user cannot change, are dropped: these
messages only, and only then. Warnings about anything else are shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Logger -> how its notices begin.
_WHILE_LOADING = {
    "torchao": ("Failed to load ",),  # kernels for other devices
    "torchao.kernel.intmm": ("Warning: Detected no triton",),
    "torch.utils._pytree": ("<enum ",),  # torchao's call is deprecated
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),  # an optional kernel
}
_IN_EVERY_FORWARD = {"bitsandbytes.autograd._functions": ("MatMul8bitLt: inputs will be cast",)}


class _Dropped(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginnings)


_CASTS = {name: _Dropped(beginnings) for name, beginnings in _IN_EVERY_FORWARD.items()}


@contextmanager
def without_notices() -> Iterator[None]:
    """Drop the notices of libraries that are imported meanwhile."""
    filters = {logging.getLogger(name): _Dropped(beginnings) for name, beginnings in _WHILE_LOADING.items()}
    for logger, dropped in filters.items():
        logger.addFilter(dropped)
    try:
        yield
    finally:
        for logger, dropped in filters.items():
            logger.removeFilter(dropped)


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable Transformers' progress bars."""
    from transformers.utils import logging as of_transformers

    had_bars = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            of_transformers.enable_progress_bar()


def drop_cast_notices() -> None:
    """Drop, from now on, what bitsandbytes says in each forward of 8-bit layers: that float32 inputs are cast."""
    for name, dropped in _CASTS.items():
        logging.getLogger(name).addFilter(dropped)
