"""To which sizes lengths are rounded up, so that few shapes occur. (Nothing is imported: the listing of models, which
states what memory follows from them, is to be quick.)"""

from __future__ import annotations

_EAGER_STEP = 64  # places; eager shapes are free, but views that change less often make masks of fewer sizes
_SMALLEST_PREPARED = 128  # places in the view of a prepared step


def power_of_two(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()


def eager_length(length: int) -> int:
    """Places in the cache, or in its view, for so many tokens."""
    return -(-length // _EAGER_STEP) * _EAGER_STEP


def prepared_length(length: int) -> int:
    """The same where each shape has to be prepared (compiled or captured)."""
    return max(_SMALLEST_PREPARED, power_of_two(length))
