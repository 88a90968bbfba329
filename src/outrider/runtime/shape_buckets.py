"""Rounding of lengths, so that few shapes occur."""

from __future__ import annotations

_EAGER_STEP = 64  # places; eager shapes are free, but fewer view lengths mean fewer mask sizes
_SMALLEST_PREPARED = 128  # minimum view of a prepared step, in places


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def eager_length(length: int) -> int:
    """Length of an eager cache or view for ``length`` tokens."""
    return -(-length // _EAGER_STEP) * _EAGER_STEP


def prepared_length(length: int) -> int:
    """Length of a cache or view where each shape has to be captured."""
    return max(_SMALLEST_PREPARED, power_of_two(length))
