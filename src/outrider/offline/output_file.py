"""The file that ``generate --output`` writes: a line of JSON for each prompt, in the order in which they are done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from outrider.errors import FileError
from outrider.offline.jsonl import parse_row
from outrider.offline.prompt_file import PromptFile
from outrider.offline.prompt_row import PromptLine
from outrider.system.file_lock import is_regular, open_locked
from outrider.system.ranks import current_ranks

_ROW_BEGINS = b'{"index": '  # so does every line
_ZERO = b"\0"  # never in a line, and left by a loss of power in place of what was written
_MISSING, _DONE, _LEFT_OUT = range(3)


@dataclass(frozen=True, slots=True)
class FinishedPrompts:
    """The prompts that earlier runs have dealt with.

    Attributes:
        indices: of the prompts that this run deals with, earlier ones included.
        flags: for each prompt of the file, whether it is missing, done or left out. (A byte each: there may be very
            many.)
        num_failed: those of them that ended in an error.
    """

    indices: range
    flags: bytearray
    num_failed: int = 0

    @property
    def num_rows(self) -> int:
        return self.flags.count(_DONE)

    @property
    def num_missing(self) -> int:
        return len(self.indices) - self.num_rows - self.flags.count(_LEFT_OUT)

    def missing(self) -> Iterator[int]:
        """Indices of the prompts that are still to be done."""
        return (index for index in self.indices if self.flags[index] == _MISSING)

    def leave_out(self, indices: Iterable[int]) -> None:
        """Leave out prompts of this run that are missing and cannot be done."""
        for index in indices:
            if self.flags[index] == _MISSING:
                self.flags[index] = _LEFT_OUT


@contextmanager
def open_output(path: Path) -> Iterator[OutputFile]:
    """The file, for this process alone. If nothing is written, none is left behind.

    Raises:
        FileError: it cannot be written, or another process is writing to it.
    """
    path = current_ranks().own_path(path)
    existed = path.exists()
    stream = open_locked(path)
    try:
        yield OutputFile(path, stream)
    finally:
        if not existed and is_regular(stream) and not os.fstat(stream.fileno()).st_size:
            path.unlink(missing_ok=True)  # while it is locked
        try:
            stream.close()
        except OSError as error:  # where a network file system tells that it was full
            raise FileError(f"cannot write {path}: {error.strerror}") from None


class OutputFile:
    """Lines are whole or not there at all, as far as this process can see to it."""

    def __init__(self, path: Path, stream: FileIO) -> None:
        self._path, self._stream = path, stream

    def write(self, line: str) -> None:
        """Append a line.

        Raises:
            FileError: it cannot be written, and was taken back.
        """
        start = os.fstat(self._stream.fileno()).st_size
        rest = memoryview(line.encode())
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except BaseException as error:  # a full disk; but Ctrl-C may not leave half a line either
            if is_regular(self._stream):
                with suppress(OSError):  # then the next run cuts it off
                    self._stream.truncate(start)
            if isinstance(error, OSError):
                raise FileError(
                    f"cannot write {self._path}: {error.strerror}; the lines in it are whole, and the same command "
                    "goes on after them"
                ) from None
            raise

    def read_finished(
        self, prompts: PromptFile, indices: range, settings_of: Callable[[PromptLine], dict[str, Any]]
    ) -> FinishedPrompts:
        """Read how far earlier runs came. A last line that is half written, or has zeros in it, is cut off.

        Args:
            indices: of the prompts that this run deals with.
            settings_of: what this run would write as the ``settings`` of a prompt.

        Raises:
            FileError: a line is of another run, with another prompt or other settings, or of another shard, or it is
                no output at all. Then the file is left as it is.
        """
        finished = bytearray(len(prompts))
        if not is_regular(self._stream):
            return FinishedPrompts(indices, finished)
        num_failed = num_bytes = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") or _ZERO in line:
                    self._cut(num_bytes, number, line, is_last=not lines.read(1))
                    break
                row = parse_row(f"{self._path}, line {number}", line)
                index = self._check(number, row, prompts, settings_of)
                if index not in indices:
                    raise FileError(
                        f"{self._path}, line {number} is of another shard (prompt {index}): choose another output file"
                    )
                if finished[index]:
                    raise FileError(f"{self._path}, line {number}: prompt {index} is there already: remove one of both")
                finished[index] = _DONE
                num_failed += row.get("finish_reason") == "error"
                num_bytes += len(line)
        return FinishedPrompts(indices, finished, num_failed)

    def _check(
        self,
        number: int,
        row: dict[str, Any],
        prompts: PromptFile,
        settings_of: Callable[[PromptLine], dict[str, Any]],
    ) -> int:
        """The index of a row, if it is of this run."""
        index = row.get("index")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            differing = ["index"]
        elif index >= len(prompts):
            differing = ["prompt"]
        else:
            line = prompts[index]
            expected = line.source | line.labels | {"settings": settings_of(line)}
            differing = [key for key, value in expected.items() if row.get(key) != value]
            if not differing:
                return index
        raise FileError(
            f"{self._path}, line {number} comes from another run (its {', '.join(differing)} differ): "
            "choose another output file, or remove this one"
        )

    def _cut(self, num_bytes: int, number: int, half: bytes, *, is_last: bool) -> None:
        if not half.startswith(_ROW_BEGINS) and not _ROW_BEGINS.startswith(half.rstrip(_ZERO + b"\n")):
            raise FileError(f"{self._path}, line {number} was not written by this command: choose another output file")
        if not is_last:
            raise FileError(
                f"{self._path}, line {number} has zeros in it, as a loss of power leaves them, and more lines follow: "
                "remove the line, and its prompt is continued again"
            )
        self._stream.truncate(num_bytes)
