"""Prompt files: JSON lines, a JSON array, or plain lines; the part of a file that a run takes, and its order."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from outrider.errors import FileError, OptionError
from outrider.offline.prompt_row import PromptLine, prompt_of
from outrider.system.files import parse_json, parse_row

# Prompts per slot in a sorted window: rows generated together span a 64th of its lengths. Larger windows gain little,
# and move rows further from their neighbours in the file, with which they may share a cached prefix.
_WINDOW_ROUNDS = 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARRAY_BEGINS = re.compile(rb'\[\s*(["{\[\]]|$)')


class PromptFile:
    """Prompts of a file, read on demand. Only the line offsets are kept.

    If the first non-blank line begins with ``{``, the file is JSON lines (see ``prompt_of``). A JSON array has the same
    objects as items, or strings. In any other file each non-blank line is a prompt.

    Raises:
        FileError: with file and place. Lines are parsed on demand, an array at once.
    """

    def __init__(self, path: Path, stream: IO[bytes], files: ExitStack) -> None:
        """
        Args:
            files: closes opened files.
        """
        self.path = path
        self._stream = stream
        self._kind = _kind_of(stream)
        if self._kind == "array":
            self._stream = files.enter_context(tempfile.TemporaryFile())
            _write_items(path, stream, self._stream)
        self._starts, self._numbers = array("Q"), array("Q")
        start = 0
        self._stream.seek(0)
        # Not splitlines(), which also splits at characters that are valid inside a JSON string.
        for number, line in enumerate(self._stream, start=1):
            if _without_mark(start, line).decode(errors="replace").strip():
                self._starts.append(start)
                self._numbers.append(number)
            start += len(line)
        if not self._starts:
            raise FileError(f"{path} contains no prompts")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> PromptLine:
        place, text = self.place(index), self._text(index)
        if self._kind == "plain":
            return PromptLine(place, text)
        where = f"{self.path}, {place}"
        if self._kind == "lines":
            return prompt_of(self.path, place, parse_row(where, text))
        item = parse_json(where, text)
        if not isinstance(item, (str, dict)):
            raise FileError(f"{where}: neither a string nor a JSON object")
        return prompt_of(self.path, place, {"prompt": item} if isinstance(item, str) else item)

    def __iter__(self) -> Iterator[PromptLine]:
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> str:
        return f"{'item' if self._kind == 'array' else 'line'} {self._numbers[index]}"

    def _text(self, index: int) -> str:
        start = self._starts[index]
        self._stream.seek(start)
        try:
            return _without_mark(start, self._stream.readline()).decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise FileError(
                f"{self.path}, {self.place(index)}: not UTF-8 (byte {start + error.start}): convert it, e.g. with iconv"
            ) from None


def _without_mark(start: int, line: bytes) -> bytes:
    return line.removeprefix(_BYTE_ORDER_MARK) if start == 0 else line


def _kind_of(stream: IO[bytes]) -> str:
    """Format of a file by its first non-blank line: "lines" (JSON lines), "array" or "plain"."""
    first = next((line for line in stream if line.removeprefix(_BYTE_ORDER_MARK).strip()), b"")
    stream.seek(0)
    first = first.removeprefix(_BYTE_ORDER_MARK).strip()
    if first.startswith(b"{"):
        return "lines"
    if _ARRAY_BEGINS.match(first):
        return "array"
    try:
        return "array" if isinstance(json.loads(first), list) else "plain"
    except (ValueError, RecursionError):
        return "plain"


def _write_items(path: Path, stream: IO[bytes], lines: IO[bytes]) -> None:
    """Write the items of an array as JSON lines."""
    for item in parse_json(f"{path}, which begins like a JSON array", stream.read().removeprefix(_BYTE_ORDER_MARK)):
        lines.write(json.dumps(item).encode() + b"\n")


@contextmanager
def open_prompts(path: Path) -> Iterator[PromptFile]:
    """Open the prompts of a file or a pipe.

    Raises:
        FileError: with file and line number.
    """
    with ExitStack() as files:
        try:
            stream: IO[bytes] = files.enter_context(path.open("rb"))
            if not stream.seekable():  # a pipe can be read once only
                copy = files.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(stream, copy)
                copy.seek(0)
                stream = copy
            prompts = PromptFile(path, stream, files)
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror}") from None
        yield prompts


def read_prompts(path: Path) -> list[PromptLine]:
    """Read all prompts, for commands without per-prompt sampling options.

    Raises:
        FileError: with file and line number.
    """
    with open_prompts(path) as prompts:
        lines = list(prompts)
    check_without_options(path, lines)
    return lines


def check_without_options(path: Path, lines: Iterable[PromptLine]) -> None:
    """Raises FileError: a prompt has sampling options of its own."""
    for line in lines:
        for name in line.options:
            raise FileError(
                f"{path}, {line.place}: this command does not support per-prompt options ({name!r}), only 'outrider "
                "generate' does: give them on the command line, for all prompts"
            )


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


def by_length(indices: Iterable[int], lengths: Sequence[int], num_slots: int) -> Iterator[int]:
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
    rest = iter(indices)
    while window := list(islice(rest, size)):
        yield from sorted(window, key=lengths.__getitem__, reverse=True)
