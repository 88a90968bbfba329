"""Log reader: loads records on demand and verifies their checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError, safe_open

from outrider.errors import FileError
from outrider.records import FinishReason
from outrider.replay.log_format import (
    HEADER,
    INDEX,
    REMEDY,
    SCHEMA,
    Header,
    Line,
    Record,
    TopProbs,
    canonical,
    checksum_of,
    damage,
    shard_path,
)
from outrider.system.files import read_bytes, read_text


class Log:
    """Log opened for reading. Records are loaded on demand, and not kept.

    Attributes:
        header: shared by all records.
        lines: the index.
    """

    def __init__(self, path: Path, header: Header, lines: Sequence[Line]) -> None:
        self._path = path
        self.header = header
        self.lines = lines

    @classmethod
    def open(cls, path: Path) -> Log:
        """Read header and index.

        Raises:
            FileError: there is no log, or its header or index is damaged. An incomplete last line is ignored.
        """
        header = read_header(path)
        *lines, _ = read_index(path)
        return cls(path, header, [parse_line(path, index, line) for index, line in enumerate(lines)])

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[Record]:
        return (self.read(index) for index in range(len(self)))

    def check_shards(self, num_records: int) -> None:
        """Check that the shards of the first records exist, without reading them.

        Raises:
            FileError: a shard is missing.
        """
        there: set[int] = set()
        for line in self.lines[:num_records]:
            path = shard_path(self._path, line.shard)
            if line.shard not in there and not path.is_file():
                raise FileError(damage(self._path, line.index, f"{path.name} is missing"))
            there.add(line.shard)

    def read(self, index: int) -> Record:
        """Load a record.

        Raises:
            FileError: the record is damaged.
            IndexError: there is no such record.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        line = self.lines[index]
        path = shard_path(self._path, line.shard)
        names = ["prompt_ids", "token_ids"]
        if self.header.num_probs is not None:
            names += ["token_probs", "top_ids", "top_probs", "tail"]
        try:
            with safe_open(path, framework="pt") as shard:
                tensors = {name: shard.get_tensor(f"{index}.{name}") for name in names}
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise FileError(damage(self._path, index, f"{path.name} cannot be read ({reason})")) from None
        if checksum_of(line, tensors) != line.sha256:
            raise FileError(damage(self._path, index, f"its checksum does not match {path.name} and {INDEX}"))
        probs = None
        if self.header.num_probs is not None:
            probs = TopProbs(tensors["token_probs"], tensors["top_ids"].long(), tensors["top_probs"], tensors["tail"])
        return Record(
            index=index,
            prompt=line.prompt,
            category=line.category,
            seed=line.seed,
            finish_reason=line.finish_reason,
            prompt_ids=tuple(tensors["prompt_ids"].tolist()),
            token_ids=tuple(tensors["token_ids"].tolist()),
            probs=probs,
        )


def read_header(path: Path) -> Header:
    file = path / HEADER
    if not file.is_file():
        raise FileError(f"{path} is not a log: it has no {HEADER}; create one with outrider record")
    try:
        document = json.loads(read_text(file))
        checksum = document.pop("sha256")
        if document["schema"] != SCHEMA:
            raise FileError(f"{file} has the schema {document['schema']!r}, but only {SCHEMA!r} is known here")
        if checksum == hashlib.sha256(canonical(document)).hexdigest():
            return Header.from_json(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise FileError(f"{file} is damaged: its checksum does not match; {REMEDY}")


def read_index(path: Path) -> list[bytes]:
    """Lines of the index; the last is empty or incomplete."""
    file = path / INDEX
    return read_bytes(file).split(b"\n") if file.exists() else [b""]


def parse_line(path: Path, index: int, text: bytes) -> Line:
    """Parse a line of the index and check its types; its checksum is verified with the tensors."""
    try:
        row = json.loads(text)
        line = Line(**row)
        kinds: tuple[Any, ...] = (int, str, (str, type(None)), int, str, int, int, int, str)
        is_valid = all(isinstance(getattr(line, one.name), kind) for one, kind in zip(fields(Line), kinds, strict=True))
        if is_valid and line.index == index and line.finish_reason in get_args(FinishReason):
            return line
    except (ValueError, TypeError, RecursionError):
        pass
    raise FileError(damage(path, index, f"line {index + 1} of {INDEX} is not valid"))
