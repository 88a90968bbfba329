"""Prompt files: JSON lines, a JSON array, or plain lines; the part of a file that a run takes, and its order."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from outrider.errors import FileError, OptionError
from outrider.offline.prompt_row import PromptLine, prompt_of
from outrider.system.files import file_errors, parse_json, parse_row

# Prompts per slot in a sorted window: rows generated together span a 64th of its lengths. Larger windows gain little,
# and move rows further from their neighbours in the file, with which they may share a cached prefix.
_WINDOW_ROUNDS = 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARRAY_BEGINS = re.compile(rb'\[\s*(["{\[\]]|$)')


class PromptFile:
    """Prompts of a file, read on demand. Only the line offsets are kept.

    If the first non-blank line begins with ``{``, the file is JSON lines (see ``prompt_of``). A JSON array has the same
    objects as items, or strings. In any other file each non-blank line is a prompt. ``files`` closes opened files.
    Raises FileError: with file and place. Lines are parsed on demand, an array at once."""

    def __init__(self, path: Path, stream: IO[bytes], files: ExitStack) -> None:
        self.path, self._stream, self._kind = path, stream, _kind_of(stream)
        if self._kind == "array":
            text = stream.read().removeprefix(_BYTE_ORDER_MARK)
            self._stream = files.enter_context(tempfile.TemporaryFile())
            for item in parse_json(f"{path}, which begins like a JSON array", text):
                self._stream.write(json.dumps(item).encode() + b"\n")
        self._starts, self._numbers = array("Q"), array("Q")
        start = 0
        self._stream.seek(0)
        # Not splitlines(), which also splits at characters that are valid inside a JSON string.
        for number, line in enumerate(self._stream, start=1):
            if number == 1 and line.startswith(_BYTE_ORDER_MARK):
                line, start = line.removeprefix(_BYTE_ORDER_MARK), len(_BYTE_ORDER_MARK)
            if line.decode(errors="replace").strip():
                self._starts.append(start)
                self._numbers.append(number)
            start += len(line)
        if not self._starts:
            raise FileError(f"{path} contains no prompts")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> PromptLine:
        start, place = self._starts[index], f"{'item' if self._kind == 'array' else 'line'} {self._numbers[index]}"
        self._stream.seek(start)
        try:
            text = self._stream.readline().decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            remedy = "convert it, e.g. with iconv"
            raise FileError(f"{self.path}, {place}: not UTF-8 (byte {start + error.start}): {remedy}") from None
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


@contextmanager
def open_prompts(path: Path) -> Iterator[PromptFile]:
    """Open the prompts of a file or a pipe. Raises FileError, with file and line number."""
    with ExitStack() as files:
        with file_errors("read", path):
            stream: IO[bytes] = files.enter_context(path.open("rb"))
            if not stream.seekable():  # a pipe can be read once only
                copy = files.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(stream, copy)
                copy.seek(0)
                stream = copy
            prompts = PromptFile(path, stream, files)
        yield prompts


def read_prompts(path: Path) -> list[PromptLine]:
    """Read all prompts, for commands without per-prompt sampling options. Raises FileError, with file and line."""
    with open_prompts(path) as prompts:
        lines = list(prompts)
    for line in lines:
        for name in line.options:
            message = f"this command does not support per-prompt options ({name!r}), only 'outrider generate' does"
            raise FileError(f"{path}, {line.place}: {message}: give them on the command line, for all prompts")
    return lines


def parse_shard(text: str | None) -> slice:
    """Parse "2/4": of each four prompts the second, so that parts are alike even if the file is sorted; None for all.
    Raises OptionError."""
    match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", "1/1" if text is None else text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise OptionError("--shard", text, "give NUMBER/COUNT: four processes take 1/4, 2/4, 3/4 and 4/4")
    return slice(number - 1, None, count)


def by_length(indices: Iterable[int], lengths: Sequence[int], num_slots: int) -> Iterator[int]:
    """Reorder indices: each window is sorted by length, longest first.

    Rows generated together then have similar lengths: prefill needs little padding, attention reads no more of the
    cache than most rows need, and the last rows of a window are short, so few slots idle. Longest first also keeps the
    cache from growing repeatedly, for which all rows must end. With one slot nothing is gained, and prompts keep their
    order. The length of a prompt counts its maximum tokens, output included: its space in the cache.
    """
    size = 1 if num_slots == 1 else _WINDOW_ROUNDS * num_slots
    rest = iter(indices)
    while window := list(islice(rest, size)):
        yield from sorted(window, key=lengths.__getitem__, reverse=True)
