"""A model's output in parts: content, thoughts, and calls of tools; and markers in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the output.

    Attributes:
        kind: "call" begins a call, whose arguments follow.
        text: content; thoughts; the name of the tool; or a part of the arguments, which are JSON.
        call: the number of the call, from 0.
        num_after: characters of the output so far that follow content, and are not decided or no content.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0
    num_after: int = 0


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of a text that is the beginning of a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Place of the first marker in a text, and the marker."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)
