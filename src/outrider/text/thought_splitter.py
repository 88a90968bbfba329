"""Splits a model's output into thoughts and content, as it arrives, and passes on no half a marker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from outrider.text.thinking import Stage, Thinking


class Piece(NamedTuple):
    """A part of the output.

    Attributes:
        kind: "call" begins a call, whose arguments follow.
        text: content; thoughts; the name of the tool; or a part of the arguments, which are JSON.
        call: the number of the call, from 0.
        end: where content ends, in characters of the output.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0
    end: int = 0


class ThoughtSplitter:
    """Splits one output into thoughts and the rest, as it arrives, without the white space between them; in the middle
    of a text (``is_continued``), white space counts from the beginning."""

    def __init__(self, thinking: Thinking, stage: Stage, *, is_continued: bool = False) -> None:
        self._thinking, self._stage = thinking, stage
        self._text = ""  # not yet split
        self._num_characters = 0  # of all text
        self._label = thinking.label if stage == "before" else ""
        self._is_dropping = stage != "before" and not is_continued  # white space
        self._markers = (thinking.begin, *thinking.headers) if thinking.turn else ()  # in the rest
        self._marker = re.compile("|".join(map(re.escape, self._markers)))

    @property
    def is_in_thoughts(self) -> bool:
        return self._stage == "in"

    @property
    def num_waiting(self) -> int:
        """Characters at the end that are neither thoughts nor the rest for certain."""
        return len(self._text)

    def feed(self, text: str, *, is_end: bool = False) -> list[Piece]:
        """Add text; return the thoughts and the content that are certain. A header is an empty thought."""
        self._text += text
        self._num_characters += len(text)
        begin = self._thinking.begin
        if self._stage == "before":
            stripped = self._text.lstrip()
            if not is_end and begin.startswith(stripped) and stripped != begin:
                return []
            is_thought = stripped.startswith(begin)
            self._stage, self._is_dropping = ("in" if is_thought else "after"), is_thought
            self._text = stripped.removeprefix(begin) if is_thought else self._text
        pieces: list[Piece] = []
        while self._stage != "in" or self._think(pieces, is_end=is_end):
            if not self._pass_on(pieces, is_end=is_end):
                break
        return pieces

    def _think(self, pieces: list[Piece], *, is_end: bool) -> bool:
        self._drop_space()
        if self._label and not is_end and self._text != self._label and self._label.startswith(self._text):
            return False
        if self._label:
            self._text, self._label, self._is_dropping = self._text.removeprefix(self._label), "", True
            self._drop_space()
        before, marker, after = self._text.partition(self._thinking.end)
        # White space at the end waits for more thoughts.
        held = 0 if marker or is_end else num_undecided(self._text, (self._thinking.end,))
        thoughts = before[: len(before) - held].rstrip()
        pieces += [Piece("reasoning", thoughts)] if thoughts else []
        self._text = after if marker else self._text[len(thoughts) :]
        if marker:
            self._stage, self._is_dropping = "after", not self._markers
        return bool(marker)

    def _pass_on(self, pieces: list[Piece], *, is_end: bool) -> bool:
        self._drop_space()
        held = num_undecided(self._text, self._markers)
        if is_end and ">" not in self._text[len(self._text) - held :]:  # no whole marker, so that it is text
            held = 0
        end = len(self._text) - held
        found = self._marker.search(self._text, 0, end) if self._markers else None
        content, self._text = self._text[: found.start() if found else end], self._text[found.end() if found else end :]
        end = self._num_characters - len(self._text) - (len(found[0]) if found else 0)
        pieces += [Piece("content", content, end=end)] if content else []
        if found and found[0] == self._thinking.begin:
            self._stage, self._is_dropping = "in", True
        if found:  # between two messages
            pieces.append(Piece("reasoning", "\n" if self._stage == "in" else ""))
        return found is not None

    def _drop_space(self) -> None:
        if self._is_dropping:
            self._text = self._text.lstrip()
            self._is_dropping = not self._text


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of a text that is the beginning of a marker."""
    beginnings = ((marker[:num], num) for marker in markers for num in range(1, len(marker)))
    return max((num for beginning, num in beginnings if text.endswith(beginning)), default=0)
