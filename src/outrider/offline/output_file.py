"""Output of ``generate`` for many prompts: rows, totals, and the file of the rows (docs/guides/long-jobs.md).

The file has one JSON line per prompt, in the order in which prompts finish.
"""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from outrider.errors import FileError, OutriderError
from outrider.offline.prompt_file import PromptFile
from outrider.offline.prompt_row import PromptLine
from outrider.records import Completion, Stats
from outrider.system.files import file_errors, parse_row

_LOG = logging.getLogger(__name__)
_ROW_BEGINS = b'{"index": '  # the prefix of every line
# Settings that a resumed run may change: no native text depends on them, and eager ones depend on the processor, too.
_OF_MACHINE = ("threads", "allow_pickle")
_Prompts = PromptFile | Sequence[PromptLine]
_ZERO = b"\0"  # never in a line; a power loss leaves it in place of written data


def row_of(
    index: int, line: PromptLine, prompt_ids: list[int], seed: int | None, done: Completion | OutriderError | None
) -> dict[str, Any]:
    """Output row. The index comes first: it identifies a half-written line. Where there is no completion (``done`` is
    None if it was interrupted before the first token), the row has this seed."""
    fields: dict[str, Any] = {"text": "", "token_ids": [], "origins": [], "finish_reason": None}
    last: dict[str, Any] = {}
    if isinstance(done, Completion):
        fields |= {"text": done.text, "token_ids": list(done.token_ids), "origins": list(done.origins)}
        fields["finish_reason"], seed = done.finish_reason, done.seed
        last = {} if done.logprobs is None else {"logprobs": [asdict(item) for item in done.logprobs]}
    elif done is not None:
        fields["finish_reason"], last = "error", {"error": str(done)}
    fields |= {"stats": stats_of(done).to_json(), **last}
    return {"index": index, **line.source, "prompt_ids": prompt_ids, **fields, "seed": seed, **line.labels}


def stats_of(done: Any) -> Stats:
    return done.stats if isinstance(done, Completion) else Stats()


@dataclass
class Totals:
    """Totals of a run, which may be interrupted at any time.

    Attributes:
        rows: None to keep none.
        num_failed: prompts that ended in an error, earlier runs included.
        seed: note on the drawn seed; empty if none was drawn, or each prompt has its own.
    """

    rows: list[dict[str, Any]] | None
    stats: Stats = field(default_factory=Stats)
    time_s: dict[str, float | None] = field(default_factory=dict)
    num_failed: int = 0
    is_interrupted: bool = False
    seed: str = ""

    def add(self, row: dict[str, Any], stats: Stats) -> None:
        self.stats += stats
        self.num_failed += row["finish_reason"] == "error"
        if self.rows is not None:
            self.rows.append(row)

    @property
    def tokens_per_s(self) -> float:
        return self.stats.num_generated_tokens / (self.time_s.get("total") or math.inf)

    def summary(self, pair: str) -> str:
        """Summary line, with the description of the models and their use."""
        tau = self.stats.mean_acceptance_length
        speed = f", {self.tokens_per_s:.1f} tokens/s, tau {1.0 if tau is None else tau:.2f} tokens/round"
        parts = [f"{self.stats.num_generated_tokens} tokens{speed if self.stats.num_generated_tokens else ''} ({pair})"]
        parts += [self.seed, f"{self.num_failed} failed" if self.num_failed else ""]
        return ", ".join(filter(None, [*parts, "interrupted" if self.is_interrupted else ""]))

    def to_json(self) -> dict[str, Any]:
        names = "num_failed", "tokens_per_s", "stats", "time_s", "is_interrupted"
        found = {"completions": self.rows, **{name: getattr(self, name) for name in names}}
        return found | {"stats": self.stats.to_json()}


@contextmanager
def open_output(path: Path) -> Iterator[OutputFile]:
    """Open the output file for this process alone. A file that was made here and is empty at the end is removed. Raises
    FileError: it cannot be written, or another process writes to it."""
    existed = path.exists()
    while _is_regular(stream := _open(path)) and not _is_at(stream, path):
        stream.close()  # another run has removed the file before it was locked
    try:
        yield OutputFile(path, stream)
    finally:
        if not existed and _is_regular(stream) and not os.fstat(stream.fileno()).st_size:
            path.unlink(missing_ok=True)  # while it is locked
        with file_errors("write", path):  # a network file system may report only now that it is full
            stream.close()


def _is_at(stream: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_regular(stream: FileIO) -> bool:
    """Whether a file can be read again and truncated; not a device or a pipe."""
    return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def _open(path: Path) -> FileIO:
    """Open a file to append to, and exclude other runs until it is closed. Raises FileError."""
    with file_errors("write", path):
        stream = FileIO(path, "a")
    if not _is_regular(stream):
        return stream
    try:
        import fcntl

        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        remedy = "wait until it has ended, or choose another file"
        raise FileError(f"cannot write {path}: another run is writing to it: {remedy}") from None
    except (ImportError, OSError):  # on Windows, and on some network file systems
        _LOG.warning("%s cannot be locked on this system: make sure that no other run writes to it", path)
    return stream


class OutputFile:
    """A file of whole lines: a line that fails to write is removed."""

    def __init__(self, path: Path, stream: FileIO) -> None:
        self._path, self._stream = path, stream

    def write(self, line: str) -> None:
        """Append a line. Raises FileError: it could not be written, and was removed."""
        start = os.fstat(self._stream.fileno()).st_size
        rest = memoryview(line.encode())
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except BaseException as error:  # a full disk; but Ctrl-C must not leave half a line either
            if _is_regular(self._stream):
                with suppress(OSError):  # else the next run cuts it off
                    self._stream.truncate(start)
            if isinstance(error, OSError):
                kept = "the lines in it are whole, and the same command continues after them"
                raise FileError(f"cannot write {self._path}: {error.strerror}; {kept}") from None
            raise

    def read_finished(
        self, prompts: _Prompts, indices: range, settings_of: Callable[[PromptLine], dict[str, Any]]
    ) -> tuple[bytearray, int]:
        """Read the progress of earlier runs: whether each prompt of the file is done (one byte each: files may be
        large), and how many of those at these indices ended in an error. Cuts off an incomplete last line, or one with
        zeros in it. ``settings_of`` tells the settings that this run would write for a prompt. Raises FileError: a line
        belongs to another run (another prompt or other settings) or shard, or is not output at all. The file is left
        unchanged."""
        finished = bytearray(len(prompts))
        if not _is_regular(self._stream):
            return finished, 0
        num_failed = num_bytes = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") or _ZERO in line:
                    self._cut(num_bytes, number, line, is_last=not lines.read(1))
                    break
                row = parse_row(f"{self._path}, line {number}", line)
                index = self._check(number, row, prompts, settings_of)
                if index not in indices:
                    other = f"of another shard (prompt {index}): choose another output file"
                    raise FileError(f"{self._path}, line {number} is {other}")
                if finished[index]:
                    raise FileError(f"{self._path}, line {number}: duplicates prompt {index}: remove one of the two")
                finished[index] = True
                num_failed += row.get("finish_reason") == "error"
                num_bytes += len(line)
        return finished, num_failed

    def _check(
        self, number: int, row: dict[str, Any], prompts: _Prompts, settings_of: Callable[[PromptLine], dict[str, Any]]
    ) -> int:
        index = row.get("index")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            differing = ["index"]
        elif index >= len(prompts):
            differing = ["prompt"]
        else:
            line = prompts[index]
            expected = line.source | line.labels | {"settings": _of_text(settings_of(line))}
            found = row | {"settings": _of_text(row.get("settings"))}
            differing = [key for key, value in expected.items() if found.get(key) != value]
            if not differing:
                return index
        message = f"{self._path}, line {number} belongs to another run (different {', '.join(differing)})"
        raise FileError(f"{message}: choose another output file, or remove this one")

    def _cut(self, num_bytes: int, number: int, half: bytes, *, is_last: bool) -> None:
        if not half.startswith(_ROW_BEGINS) and not _ROW_BEGINS.startswith(half.rstrip(_ZERO + b"\n")):
            raise FileError(f"{self._path}, line {number} was not written by this command: choose another output file")
        if not is_last:
            message = f"{self._path}, line {number} has zeros in it, as a power loss leaves them, and more lines follow"
            raise FileError(f"{message}: remove the line, and its prompt is generated again")
        self._stream.truncate(num_bytes)


def _of_text(settings: Any) -> Any:
    """Settings on which a text may depend. Absent and None mean the same, so that older logs can be resumed."""
    if not isinstance(settings, dict):
        return settings
    return {name: value for name, value in settings.items() if name not in _OF_MACHINE and value is not None}
