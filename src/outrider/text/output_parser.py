"""Splits a model's output into thoughts, content and calls of tools, as it arrives."""

from __future__ import annotations

from outrider.text.pieces import Piece
from outrider.text.thinking import ThoughtSplitter
from outrider.text.tools.parser import ToolParser


class OutputParser:
    """Parser of one output.

    Args:
        thoughts: splits them off; None if there are none.
        tools: finds calls; None if there are none.
        has_content: otherwise what looks like content is the beginning of a call that was cut.
    """

    def __init__(
        self, thoughts: ThoughtSplitter | None = None, tools: ToolParser | None = None, *, has_content: bool = True
    ) -> None:
        self._thoughts, self._tools, self._has_content = thoughts, tools, has_content

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far ends in a call that is incomplete."""
        return self._tools is not None and self._tools.is_in_call

    def feed(self, text: str, *, is_end: bool = False) -> list[Piece]:
        """Add text; return the parts that are certain, at the end all.

        Args:
            is_end: there is no more.
        """
        thoughts = ""
        if self._thoughts is not None:
            thoughts, text = self._thoughts.feed(text, is_end=is_end)
        pieces = [Piece("reasoning", thoughts)] if thoughts else []
        if self._tools is not None:
            found = [*self._tools.feed(text), *(self._tools.finish() if is_end else ())]
            return pieces + [piece for piece in found if self._has_content or piece.kind != "content"]
        return [*pieces, Piece("content", text)] if text else pieces
