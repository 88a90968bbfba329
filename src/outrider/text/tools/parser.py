"""Splits a model's output into content and calls of tools, as it arrives. Half a marker is never passed on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from outrider.text.pieces import Piece, first_of, num_undecided
from outrider.text.tools.call_reader import CallReader


class ToolParser(ABC):
    """Parser of one output.

    White space before a call is no content. Text that begins like a call, and is none, is.

    Args:
        names: of the tools.
    """

    markers: ClassVar[tuple[str, ...]]  # each begins calls
    ends: ClassVar[tuple[str, ...]] = ()  # each ends a call

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._text = ""  # not yet parsed
        self._space = ""  # content, unless a call follows
        self._opening = ""  # text of a marker: content, unless a call follows
        self._reader: CallReader | None = None
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._is_end = False
        self._state = self._in_text

    def feed(self, text: str) -> list[Piece]:
        """Add text; return the parts that are certain."""
        self._text += text
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return the rest at the end."""
        self._is_end = True
        pieces = [*self.feed(""), *([] if self._reader is None else self._reader.finish())]
        unread = "" if self._reader is None or self._reader.has_begun else self._reader.raw
        rest = self._opening + unread + (self._text if self._opening else "")
        if rest or not self._num_calls:
            rest = self._space + rest
        return [*pieces, Piece("content", rest)] if rest else pieces

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far ends in a call that is incomplete."""
        return self._reader is not None and self._reader.has_begun and not self._reader.is_complete

    # States: each parses some of the text, and returns whether there may be more to do.

    def _in_text(self) -> bool:
        found = first_of(self._text, self.markers)
        if found is None:
            self._say(len(self._text) - (0 if self._is_end else num_undecided(self._text, self.markers)))
            return False
        at, self._opening = found
        self._say(at)
        self._text = self._text[len(self._opening) :]
        self._state = self._after_marker
        return True

    @abstractmethod
    def _after_marker(self) -> bool: ...

    @abstractmethod
    def _after_call(self) -> bool: ...

    def _begin(self, names: Collection[str] | None = None, name: str | None = None) -> bool:
        """Begin to read a call: see ``CallReader``."""
        self._reader = CallReader(self._num_calls, names, name)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._text = self._text[reader.read(self._text) :]
        self._pieces += reader.take()
        if reader.has_begun:
            self._num_calls, self._space, self._opening = reader.number + 1, "", ""
        if not (reader.is_done or reader.is_wrong):
            return False
        if reader.has_begun:
            self._state = self._after_call if reader.is_done else self._in_rest
        else:
            num_read = len(self._opening)
            self._text, self._opening = self._opening + reader.raw + self._text, ""
            self._say(num_read)
            self._state, self._reader = self._in_text, None
        return True

    def _in_rest(self) -> bool:
        """The rest of a call that has gone wrong: the client will find its arguments invalid."""
        assert self._reader is not None
        found = first_of(self._text, self.ends)
        at = found[0] if found else len(self._text) - (0 if self._is_end else num_undecided(self._text, self.ends))
        if at:
            self._pieces.append(Piece("arguments", self._text[:at], self._reader.number))
        self._text = self._text[at:]
        if found:
            self._state = self._after_call
        return found is not None

    def _say(self, num_characters: int) -> None:
        """Pass on the beginning of the text as content; white space at its end waits."""
        text, self._text = self._space + self._text[:num_characters], self._text[num_characters:]
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._pieces.append(Piece("content", said, num_after=len(self._space) + len(self._text)))
