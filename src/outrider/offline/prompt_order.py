"""Selects and orders the prompts of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from outrider.errors import OptionError

# Prompts per slot in a sorted window: rows generated together span a 64th of its lengths. Larger windows gain little,
# and move rows further from their neighbours in the file, with which they may share a cached prefix.
_WINDOW_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of a file: prompt ``number`` and every ``count``-th after it. The parts are alike even if the file is
    sorted.

    Attributes:
        number: 1 <= number <= count.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse "2/4": the second of four.

        Raises:
            OptionError
        """
        match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= count:
            raise OptionError("--shard", text, "give NUMBER/COUNT: four processes take 1/4, 2/4, 3/4 and 4/4")
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def indices(self, num_prompts: int) -> range:
        """Indices of its prompts, from 0, in a file of ``num_prompts``."""
        return range(self.number - 1, num_prompts, self.count)


def by_length(indices: Iterator[int], lengths: Sequence[int], num_slots: int) -> Iterator[int]:
    """Reorder indices: each window is sorted by length, longest first.

    Rows generated together then have similar lengths: prefill needs little padding, attention reads no more of the
    cache than most rows need, and the last rows of a window are short, so few slots idle. Longest first also keeps the
    cache from growing repeatedly, for which all rows must end. With one slot nothing is gained, and prompts keep their
    order.

    Args:
        lengths: maximum tokens of each prompt, output included: its space in the cache.
        num_slots: rows generated concurrently.
    """
    size = 1 if num_slots == 1 else _WINDOW_ROUNDS * num_slots
    while window := list(islice(indices, size)):
        yield from sorted(window, key=lengths.__getitem__, reverse=True)
