"""Which prompts of a file a run deals with, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from outrider.errors import OptionError

# The rows that are together lie within a 64th of the window's lengths. More would gain little, and take rows further
# from the place that they have in the file, where a shared prefix is found in the cache.
_WINDOW_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several parts of a file: prompt ``number``, and every ``count``-th after it. So the parts are alike even
    where the file is sorted.

    Attributes:
        number: 1 <= number <= count.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """ "2/4" is the second of four.

        Raises:
            OptionError
        """
        match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= count:
            raise OptionError("--shard", text, "write NUMBER/COUNT, for four processes 1/4, 2/4, 3/4 and 4/4")
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def indices(self, num_prompts: int) -> range:
        """Of its prompts, from 0, in a file of so many."""
        return range(self.number - 1, num_prompts, self.count)


def by_length(indices: Iterator[int], lengths: Sequence[int], num_slots: int) -> Iterator[int]:
    """The same indices, each window of them sorted by length, the longest first.

    Rows that are generated together are then of like length: prompts that are fed together need little padding, the
    view of the cache is no wider than most rows need, and the last rows of a window are short, so that few slots wait
    for them. The longest first also keeps the cache from growing again and again, for which all rows have to end.
    A row alone gains nothing by this, and prompts keep their order.

    Args:
        lengths: of each prompt, the most tokens that it can come to, output included: the room that it takes.
        num_slots: rows that are generated at a time.
    """
    size = 1 if num_slots == 1 else _WINDOW_ROUNDS * num_slots
    while window := list(islice(indices, size)):
        yield from sorted(window, key=lengths.__getitem__, reverse=True)
