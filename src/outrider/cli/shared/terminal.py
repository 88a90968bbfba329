"""Text on a terminal, as it is generated: lines end between words, and Ctrl-C leaves no mark in them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.records import Chunk

_TAB = 8


class Writer:
    """Writes pieces of text at once. On a terminal, a word that would cross the edge moves to the next line; elsewhere
    the text is left as it is. ``console``: at the beginning of a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_terminal = console.file.isatty()
        self._column = self._word_len = 0  # in cells; of the word at the end of the line
        self._word: list[tuple[str, str]] = []

    def write_chunk(self, chunk: Chunk, styles: Mapping[str, str]) -> None:
        """Write the text of a chunk at once. ``styles``: of tokens, by origin; see ``rich.style``."""
        for text, origin in chunk.pieces:
            self.write(text, styles.get(origin, ""))
        self._console.file.flush()

    def write(self, text: str, style: str = "") -> None:
        from rich.cells import cell_len
        from rich.control import strip_control_codes

        if not self._is_terminal:
            self._put(text, style)
            return
        width = self._console.width - 1  # so that the cursor never waits behind the last column
        for run in re.findall(r"\n|[^\S\n]+|\S+", strip_control_codes(text)):
            length = cell_len(run)
            if run == "\n":
                self._begin_line()
            elif run.isspace():
                before, self._word, self._word_len = self._column, [], 0
                self._column = (before // _TAB + run.count("\t")) * _TAB if "\t" in run else before + length
                if self._column < width:
                    self._put(run, style)
                else:  # nothing is put behind the last column
                    self._column = width
            else:
                if self._column + length > width and self._column > self._word_len:
                    self._move_word()
                if self._column + length <= width:
                    self._put(run, style)
                    self._word.append((run, style))
                    self._word_len += length
                    self._column += length
                else:  # longer than a line: it is cut
                    for char in run:
                        if self._column + cell_len(char) > width:
                            self._begin_line()
                        self._put(char, style)
                        self._column += cell_len(char)
                    self._word, self._word_len = [], 0

    def _move_word(self) -> None:
        word, length = self._word, self._word_len
        if length:
            self._put(f"\x1b[{length}D\x1b[K")
        self._begin_line()
        for text, style in word:
            self._put(text, style)
        self._word, self._word_len, self._column = word, length, length

    def _begin_line(self) -> None:
        self._put("\n")
        self._word, self._word_len, self._column = [], 0, 0

    def _put(self, text: str, style: str = "") -> None:
        from rich.segment import Segment, Segments
        from rich.style import Style

        if style and self._console.is_terminal:
            # A string would have its tabs expanded, as if each piece began a line.
            self._console.print(Segments([Segment(text, Style.parse(style))]), soft_wrap=True)
        else:
            self._console.file.write(text)


def write_chunks(
    chunks: Iterator[Chunk],
    console: Console,
    styles: Mapping[str, str],
    *,
    before: str = "",
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[list[Chunk], bool]:
    """Write the text of chunks as they come, to the end or Ctrl-C. Returns them, and whether they were interrupted.
    ``before`` is written before the first chunk; ``is_over`` tells whether to stop after a chunk."""
    found: list[Chunk] = []
    writer = Writer(console)
    with _without_caret():
        try:
            for chunk in chunks:
                if not found and before:
                    writer.write(before, "dim")
                found.append(chunk)
                writer.write_chunk(chunk, styles)
                if is_over():
                    break
        except KeyboardInterrupt:
            return found, True
        finally:
            console.file.write("\n")
            console.file.flush()
    return found, False


@contextmanager
def _without_caret() -> Iterator[None]:
    """Keep the terminal from writing ^C into a text for Ctrl-C."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        is_ours = os.tcgetpgrp(terminal) == os.getpgrp()  # a job in the background would be stopped
    except Exception:  # no such system, or no terminal
        is_ours = False
    if not is_ours:
        yield
        return
    after = [*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]]
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, after)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
