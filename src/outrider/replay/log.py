"""Logs of what a target said, on disk: a folder with a header, an index and shards of tensors.

    log.json                 schema, target, sampling options, vocabulary; with a checksum of its own
    index.jsonl              one line for each prompt, in order: what is not a tensor, and a checksum of the record
    shard-00000.safetensors  the tensors of some records, "INDEX.NAME" each

A shard is written whole, and forced to disk, before its lines are added to the index, so that the index never promises
what is not there, and a log whose recording was cut short at any moment can be read, and gone on with. Records are read
one by one, when they are asked for, and held against their checksums. The format is described in
docs/record-and-replay.md.

This module does not know models, nor where records come from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from outrider.errors import FileError
from outrider.options import Sampling
from outrider.records import FinishReason
from outrider.system.files import read_bytes, read_text, to_disk, write_whole

SCHEMA = "outrider/log/1"
_HEADER, _INDEX = "log.json", "index.jsonl"
_LINE_BEGINS = b'{"index": '
_PART = re.compile(r"(log\.json|shard-\d{5,}\.safetensors)\.\w+\.part")  # what a write that was cut short leaves
_REMEDY = "take the log from a copy, or remove the folder and record again"
_MIN_SHARD = 32  # records
_MOST_SHARD_BYTES = 2**28  # after which a shard with fewer records is full; bounds the memory
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "max_new_tokens",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class TopProbs:
    """p, after the processors of the sampling options, at the n tokens of a text.

    Attributes:
        token_probs: of the token that stands there. [n]
        top_ids, top_probs: the N most probable tokens, largest first. [n, N], [n, N]
        tail: the mass of all others. [n]
    """

    token_probs: Tensor
    top_ids: Tensor
    top_probs: Tensor
    tail: Tensor

    def __post_init__(self) -> None:
        assert self.token_probs.shape == self.tail.shape == self.top_ids.shape[:1]
        assert self.top_ids.shape == self.top_probs.shape


@dataclass(frozen=True, slots=True)
class Record:
    """What the target said to one prompt.

    Attributes:
        prompt: its text; for a chat, the user's message.
        category: of the prompt, where it has one.
        probs: None where they were not recorded.
    """

    index: int
    prompt: str
    category: str | None
    seed: int
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    probs: TopProbs | None = None

    def __post_init__(self) -> None:
        assert self.prompt_ids and self.token_ids
        assert self.probs is None or len(self.probs.token_probs) == len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Header:
    """What all records of a log have in common.

    Attributes:
        target: name of the model.
        sampling: without a seed.
        num_probs: N, None where no probabilities were recorded.
        vocab_size: V.
        context_len: the target's; a text ends where it is full.
        tokenizer: a fingerprint of what the ids mean (see outrider.text.tokenizer), None where there is no tokenizer.
        settings: other options that the text depends on.
        provenance: where it comes from. It says nothing about what is in the log, and may differ when a log is gone on
            with.
    """

    target: str
    sampling: Sampling
    num_probs: int | None
    vocab_size: int
    context_len: int
    eos_ids: tuple[int, ...]
    tokenizer: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        assert self.sampling.seed is None and self.sampling.logprobs is None

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Most tokens that may follow a prompt."""
        return min(self.sampling.max_new_tokens, self.context_len - num_prompt_tokens)

    def to_json(self) -> dict[str, Any]:
        sampling = {name: getattr(self.sampling, name) for name in _SAMPLING}
        sampling["stop"] = list(self.sampling.stop)
        if self.sampling.logit_bias is not None:  # as text: JSON has no -inf
            sampling["logit_bias"] = {str(i): repr(float(bias)) for i, bias in self.sampling.logit_bias.items()}
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {"schema": SCHEMA, **values, "sampling": sampling, "eos_ids": list(self.eos_ids)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Header:
        sampling = dict(document["sampling"])
        bias = sampling["logit_bias"]
        sampling["logit_bias"] = None if bias is None else {int(i): float(value) for i, value in bias.items()}
        sampling["stop"] = tuple(sampling["stop"])
        values = {one.name: document[one.name] for one in fields(cls)}
        return cls(**values | {"sampling": Sampling(**sampling), "eos_ids": tuple(document["eos_ids"])})


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the index. ``sha256`` is of the line's other fields and the record's tensors."""

    index: int
    prompt: str
    category: str | None
    seed: int
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_tokens: int
    shard: int
    sha256: str

    @classmethod
    def of(cls, record: Record, shard: int) -> Line:
        line = cls(
            record.index,
            record.prompt,
            record.category,
            record.seed,
            record.finish_reason,
            len(record.prompt_ids),
            len(record.token_ids),
            shard,
            "",
        )
        values = asdict(line) | {"sha256": _checksum(line, _tensors(record))}
        return cls(**values)


def _tensors(record: Record) -> dict[str, Tensor]:
    """By name, in the order of the checksum."""
    tensors = {
        "prompt_ids": torch.tensor(record.prompt_ids, dtype=torch.int32),
        "token_ids": torch.tensor(record.token_ids, dtype=torch.int32),
    }
    if record.probs is not None:
        probs = record.probs
        tensors["token_probs"] = probs.token_probs
        tensors["top_ids"] = probs.top_ids.to(torch.int32)
        tensors["top_probs"] = probs.top_probs
        tensors["tail"] = probs.tail
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _checksum(line: Line, tensors: Mapping[str, Tensor]) -> str:
    about = {name: value for name, value in asdict(line).items() if name != "sha256"}
    digest = hashlib.sha256(_canonical(about))
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()


class Log:
    """A log that is read. Its records are read when they are asked for, and not kept.

    Attributes:
        header: what all records have in common.
        lines: the index.
    """

    def __init__(self, path: Path, header: Header, lines: Sequence[Line]) -> None:
        self._path = path
        self.header = header
        self.lines = lines

    @classmethod
    def open(cls, path: Path) -> Log:
        """
        Raises:
            FileError: there is no log, or its header or its index is damaged. A last line that is only half written is
                no damage: it is not there yet.
        """
        header = _read_header(path)
        *lines, _ = _read_index(path)
        return cls(path, header, [_parse_line(path, index, line) for index, line in enumerate(lines)])

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[Record]:
        return (self.read(index) for index in range(len(self)))

    def check_shards(self, num_records: int) -> None:
        """Whether there are the shards of the first so many records, without reading them.

        Raises:
            FileError
        """
        there: set[int] = set()
        for line in self.lines[:num_records]:
            path = _shard_path(self._path, line.shard)
            if line.shard not in there and not path.is_file():
                raise FileError(_damage(self._path, line.index, f"there is no {path.name}"))
            there.add(line.shard)

    def read(self, index: int) -> Record:
        """
        Raises:
            FileError: the record is not as it was written.
            IndexError: there is no such record.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        line = self.lines[index]
        path = _shard_path(self._path, line.shard)
        names = ["prompt_ids", "token_ids"]
        if self.header.num_probs is not None:
            names += ["token_probs", "top_ids", "top_probs", "tail"]
        try:
            with safe_open(path, framework="pt") as shard:
                tensors = {name: shard.get_tensor(f"{index}.{name}") for name in names}
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise FileError(_damage(self._path, index, f"{path.name} cannot be read ({reason})")) from None
        if _checksum(line, tensors) != line.sha256:
            raise FileError(_damage(self._path, index, f"its checksum does not fit {path.name} and {_INDEX}"))
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


def _damage(path: Path, index: int, what: str) -> str:
    return f"{path}, record {index} is damaged: {what}; {_REMEDY}"


def _shard_path(path: Path, shard: int) -> Path:
    return path / f"shard-{shard:05d}.safetensors"


def _read_header(path: Path) -> Header:
    file = path / _HEADER
    if not file.is_file():
        raise FileError(f"{path} is no log: there is no {_HEADER} in it; make one with outrider record")
    try:
        document = json.loads(read_text(file))
        checksum = document.pop("sha256")
        if document["schema"] != SCHEMA:
            raise FileError(f"{file} has the schema {document['schema']!r}, but only {SCHEMA!r} is known here")
        if checksum == hashlib.sha256(_canonical(document)).hexdigest():
            return Header.from_json(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise FileError(f"{file} is damaged: it is not as it was written; {_REMEDY}")


def _read_index(path: Path) -> list[bytes]:
    """Its lines; the last is empty, or only half written."""
    file = path / _INDEX
    return read_bytes(file).split(b"\n") if file.exists() else [b""]


def _parse_line(path: Path, index: int, text: bytes) -> Line:
    """A line of the index, in which the kinds of values are right; the checksum is looked at with the tensors."""
    try:
        row = json.loads(text)
        line = Line(**row)
        kinds: tuple[Any, ...] = (int, str, (str, type(None)), int, str, int, int, int, str)
        are_right = all(
            isinstance(getattr(line, one.name), kind) for one, kind in zip(fields(Line), kinds, strict=True)
        )
        if are_right and line.index == index and line.finish_reason in get_args(FinishReason):
            return line
    except (ValueError, TypeError, RecursionError):
        pass
    raise FileError(_damage(path, index, f"line {index + 1} of {_INDEX} is not as it was written"))


def _num_good(log: Log) -> int:
    """How many records a log has that can be gone on with: without those at its end that cannot be read.

    Raises:
        FileError: a shard before the last is not there. What comes after it may be whole, and is not thrown away.
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


class LogWriter:
    """Writes a log, or goes on with one that was cut short.

    Args:
        path: a folder, made if it is not there.
        expected: (prompt, category, seed) of each record that will be written.

    Raises:
        FileError: there is something else at ``path``: a log of another run, or none at all, or one that is damaged
            other than at its end. It is left as it is.
    """

    def __init__(
        self, path: Path, header: Header, expected: Sequence[tuple[str, str | None, int]], batch_size: int = 1
    ) -> None:
        self._path = path
        self._waiting: list[Record] = []
        self._shard_size = max(batch_size, _MIN_SHARD)
        self.num_finished = 0
        self._next_shard = 0
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {file.name for file in path.iterdir() if _PART.fullmatch(file.name) is None}
            if names and (names - {_HEADER, _INDEX} or _read_index(path) != [b""]):
                self._go_on(header, expected)
            else:
                if names:  # a log of nothing yet, of a run whose options were refused later, say; not any other file
                    _read_header(path)
                self._begin(header)
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}") from None

    def _begin(self, header: Header) -> None:
        document = header.to_json()
        document |= {"provenance": dict(header.provenance), "settings": dict(header.settings)}
        document["sha256"] = hashlib.sha256(_canonical(document)).hexdigest()
        write_whole(self._path / _HEADER, (json.dumps(document, indent=2, default=str) + "\n").encode())
        to_disk(self._path / _HEADER)
        to_disk(self._path)

    def _go_on(self, header: Header, expected: Sequence[tuple[str, str | None, int]]) -> None:
        path = self._path
        old = _read_header(path)
        differing = [
            one.name for one in fields(Header) if one.compare and getattr(old, one.name) != getattr(header, one.name)
        ]
        remedy = "choose another folder, or remove this one"
        if differing:
            raise FileError(f"{path} comes from another run (its {', '.join(differing)} differ): {remedy}")
        *texts, half = _read_index(path)
        lines = [_parse_line(path, index, text) for index, text in enumerate(texts)]
        for line in lines:
            wanted = expected[line.index] if line.index < len(expected) else None
            if (line.prompt, line.category, line.seed) != wanted:
                raise FileError(f"{path}, record {line.index} comes from another run (its prompt differs): {remedy}")
        if half and not half.startswith(_LINE_BEGINS) and not _LINE_BEGINS.startswith(half):
            raise FileError(_damage(path, len(lines), f"line {len(lines) + 1} of {_INDEX} is not as it was written"))
        num_good = _num_good(Log(path, old, lines))
        if half or num_good < len(lines):
            self._cut_index(sum(len(text) + 1 for text in texts[:num_good]))
        self.num_finished = num_good
        self._next_shard = max((line.shard for line in lines[:num_good]), default=-1) + 1

    def _cut_index(self, size: int) -> None:
        file = self._path / _INDEX
        with file.open("ab") as stream:
            stream.truncate(size)
        to_disk(file)

    def append(self, records: Sequence[Record]) -> None:
        """Take the next records, in order. They are on disk after ``flush``, or when a shard is full.

        Raises:
            FileError
        """
        self._waiting += records
        num_bytes = sum(tensor.nbytes for record in self._waiting for tensor in _tensors(record).values())
        if len(self._waiting) >= self._shard_size or num_bytes >= _MOST_SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting as a shard. If it is interrupted nothing has happened, and it can be done again.

        Raises:
            FileError
        """
        if not self._waiting:
            return
        tensors = {f"{r.index}.{name}": tensor for r in self._waiting for name, tensor in _tensors(r).items()}
        lines = [Line.of(record, self._next_shard) for record in self._waiting]
        text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines).encode()
        shard, index = _shard_path(self._path, self._next_shard), self._path / _INDEX
        before = self._waiting, self.num_finished, self._next_shard
        size: int | None = None
        try:
            write_whole(shard, save(tensors))
            to_disk(shard)
            to_disk(self._path)
            size = index.stat().st_size if index.exists() else 0
            with index.open("ab") as stream:
                stream.write(text)
            to_disk(index)
            to_disk(self._path)
            self._waiting, self.num_finished, self._next_shard = (
                [],
                self.num_finished + len(lines),
                self._next_shard + 1,
            )
        except BaseException as error:  # Ctrl-C, too
            self._waiting, self.num_finished, self._next_shard = before
            try:
                if size is not None:
                    self._cut_index(size)
            except OSError:
                pass  # what made the writing fail is what is told
            if isinstance(error, OSError):
                raise FileError(f"cannot write {self._path}: {error.strerror}") from None
            raise
