"""Log writer, which can resume an interrupted log.

A shard is written and synced to disk before its lines are appended to the index, so that the index never refers to
missing data, and a log that was interrupted at any moment can be read and resumed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from safetensors.torch import save

from outrider.errors import FileError
from outrider.replay.log import Log, parse_line, read_header, read_index
from outrider.replay.log_format import (
    HEADER,
    INDEX,
    Header,
    Line,
    Record,
    canonical,
    damage,
    shard_path,
    tensors_of,
)
from outrider.system.files import to_disk, write_whole
from outrider.system.ranks import current_ranks

_LINE_BEGINS = b'{"index": '
_PART = re.compile(r"(log\.json|shard-\d{5,}\.safetensors)\.\w+\.part")  # left by an interrupted write
_MIN_SHARD = 32  # records
_MOST_SHARD_BYTES = 2**28  # limit for shards of fewer records; bounds the memory


class LogWriter:
    """Writes a log, or resumes an interrupted one. In a distributed job only the first process writes.

    Args:
        path: a folder, created if it does not exist.
        expected: (prompt, category, seed) of each record that will be written.

    Raises:
        FileError: ``path`` holds another run, no log, or a log that is damaged before its end. It is left unchanged.
    """

    def __init__(
        self, path: Path, header: Header, expected: Sequence[tuple[str, str | None, int]], batch_size: int = 1
    ) -> None:
        self._path = path
        self._pending: list[Record] = []
        self._shard_size = max(batch_size, _MIN_SHARD)
        self.num_finished, self._next_shard = current_ranks().of_first(lambda: self._open(path, header, expected))

    def _open(self, path: Path, header: Header, expected: Sequence[tuple[str, str | None, int]]) -> tuple[int, int]:
        """Begin or resume. Returns the number of existing records, and the index of the next shard."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {file.name for file in path.iterdir() if _PART.fullmatch(file.name) is None}
            if names and (names - {HEADER, INDEX} or read_index(path) != [b""]):
                return self._resume(header, expected)
            if names:  # an empty log, for example of a run whose options were refused later
                read_header(path)
            self._begin(header)
            return 0, 0
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}") from None

    def _begin(self, header: Header) -> None:
        document = header.to_json()
        document |= {"provenance": dict(header.provenance), "settings": dict(header.settings)}
        document["sha256"] = hashlib.sha256(canonical(document)).hexdigest()
        write_whole(self._path / HEADER, (json.dumps(document, indent=2, default=str) + "\n").encode())
        to_disk(self._path / HEADER)
        to_disk(self._path)

    def _resume(self, header: Header, expected: Sequence[tuple[str, str | None, int]]) -> tuple[int, int]:
        path = self._path
        old = read_header(path)
        differing = [
            one.name for one in fields(Header) if one.compare and getattr(old, one.name) != getattr(header, one.name)
        ]
        remedy = "choose another folder, or remove this one"
        if differing:
            raise FileError(f"{path} comes from another run (its {', '.join(differing)} differ): {remedy}")
        *texts, half = read_index(path)
        lines = [parse_line(path, index, text) for index, text in enumerate(texts)]
        for line in lines:
            wanted = expected[line.index] if line.index < len(expected) else None
            if (line.prompt, line.category, line.seed) != wanted:
                raise FileError(f"{path}, record {line.index} comes from another run (its prompt differs): {remedy}")
        if half and not half.startswith(_LINE_BEGINS) and not _LINE_BEGINS.startswith(half):
            raise FileError(damage(path, len(lines), f"line {len(lines) + 1} of {INDEX} is not valid"))
        num_good = _num_good(Log(path, old, lines))
        if half or num_good < len(lines):
            self._cut_index(sum(len(text) + 1 for text in texts[:num_good]))
        return num_good, max((line.shard for line in lines[:num_good]), default=-1) + 1

    def _cut_index(self, size: int) -> None:
        file = self._path / INDEX
        with file.open("ab") as stream:
            stream.truncate(size)
        to_disk(file)

    def append(self, records: Sequence[Record]) -> None:
        """Append the next records, in order. They reach the disk on ``flush``, or when a shard is full.

        Raises:
            FileError: the write failed.
        """
        self._pending += records
        num_bytes = sum(tensor.nbytes for record in self._pending for tensor in tensors_of(record).values())
        if len(self._pending) >= self._shard_size or num_bytes >= _MOST_SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the pending records as a shard. If interrupted, it has no effect and can be repeated.

        Raises:
            FileError: the write failed.
        """
        if not self._pending:
            return
        tensors = {f"{r.index}.{name}": tensor for r in self._pending for name, tensor in tensors_of(r).items()}
        lines = [Line.of(record, self._next_shard) for record in self._pending]
        text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines).encode()
        shard, index = shard_path(self._path, self._next_shard), self._path / INDEX
        before = self._pending, self.num_finished, self._next_shard
        size: int | None = None
        try:
            if current_ranks().is_first:
                write_whole(shard, save(tensors))
                to_disk(shard)
                to_disk(self._path)
                size = index.stat().st_size if index.exists() else 0
                with index.open("ab") as stream:
                    stream.write(text)
                to_disk(index)
                to_disk(self._path)
            self._pending, self.num_finished, self._next_shard = (
                [],
                self.num_finished + len(lines),
                self._next_shard + 1,
            )
        except BaseException as error:  # including Ctrl-C
            self._pending, self.num_finished, self._next_shard = before
            try:
                if size is not None:
                    self._cut_index(size)
            except OSError:
                pass  # report the failed write instead
            if isinstance(error, OSError):
                raise FileError(f"cannot write {self._path}: {error.strerror}") from None
            raise


def _num_good(log: Log) -> int:
    """Count the records without unreadable ones at the end, where a log can be resumed.

    Raises:
        FileError: a shard before the last is missing. Those after it may be intact, and are kept.
    """
    num_good = len(log)
    while num_good:
        shard = log.lines[num_good - 1].shard
        begin = next(i for i, line in enumerate(log.lines) if line.shard == shard)
        for index in range(begin, num_good):
            try:
                log.read(index)
            except FileError:
                num_good = index
                break
        if num_good > begin:
            break
    log.check_shards(num_good)
    return num_good
