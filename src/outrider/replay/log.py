"""Logs: a target's outputs for many prompts, as ``record`` and ``generate --output`` write them, one JSON line each.

docs/reference/logs.md describes the lines. This module knows neither models nor where records come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import FileError, OptionError
from outrider.options import CONSTRAINTS, Sampling
from outrider.records import FinishReason
from outrider.system.files import parse_row

_REMEDY = "restore the file from a copy, or remove the line and run the same command again"
_PARTS = ("token", "top_ids", "top", "tail")  # of probabilities
_DIGITS = 9  # which name each float32


@dataclass(frozen=True, slots=True)
class TopProbs:
    """p, after the sampling options, at the n tokens of an output.

    Attributes:
        token_probs: of the generated tokens. [n]
        top_ids, top_probs: the N most probable tokens, largest first. [n, N], [n, N]
        tail: mass of all others. [n]
    """

    token_probs: Tensor
    top_ids: Tensor
    top_probs: Tensor
    tail: Tensor

    def __post_init__(self) -> None:
        assert self.token_probs.shape == self.tail.shape == self.top_ids.shape[:1]
        assert self.top_ids.shape == self.top_probs.shape

    def at(self, part: slice, device: torch.device) -> TopProbs:
        """Part of the tokens, on a device."""
        tensors = (self.token_probs, self.top_ids, self.top_probs, self.tail)
        return TopProbs(*(tensor[part].to(device) for tensor in tensors))

    def to_json(self) -> dict[str, Any]:
        tensors = self.token_probs, self.top_ids, self.top_probs, self.tail
        return {name: _numbers(tensor) for name, tensor in zip(_PARTS, tensors, strict=True)}

    @classmethod
    def from_json(cls, stated: Mapping[str, Any], dtype: torch.dtype) -> TopProbs:
        """Raises KeyError, TypeError, ValueError, AssertionError."""
        if not all(map(math.isfinite, [*stated["token"], *stated["tail"], *chain(*stated["top"])])):
            raise ValueError("a probability is no number")
        kinds = dtype, torch.long, dtype, dtype
        return cls(*(torch.tensor(stated[name], dtype=kind) for name, kind in zip(_PARTS, kinds, strict=True)))


def _numbers(tensor: Tensor) -> list[Any]:
    """Numbers as JSON: few digits where these name them."""
    if tensor.ndim > 1:
        return [_numbers(row) for row in tensor]
    numbers: list[Any] = tensor.tolist()
    return [float(f"{one:.{_DIGITS}g}") for one in numbers] if tensor.dtype == torch.float32 else numbers


@dataclass(frozen=True, slots=True)
class Record:
    """The target's output for one prompt.

    Attributes:
        index: place of the prompt in its file, from 0.
        category: of the prompt, if any.
        probs: None if not recorded.
    """

    index: int
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
    """Properties shared by all records of a log.

    Attributes:
        target: name of the model.
        sampling: without a seed.
        num_probs: N; None if no probabilities were recorded.
        vocab_size: V.
        context_len: the target's.
        eos_ids: tokens that end the outputs.
        tokenizer: fingerprint of its vocabulary (see outrider.text.tokenizer); None without a tokenizer.
    """

    target: str
    sampling: Sampling
    num_probs: int | None
    vocab_size: int
    context_len: int
    eos_ids: tuple[int, ...]
    tokenizer: str | None

    def __post_init__(self) -> None:
        assert self.sampling.seed is None and self.sampling.logprobs is None

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Limit of output tokens for a prompt."""
        return min(self.sampling.max_new_tokens, self.context_len - num_prompt_tokens)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Header:
        """Header of a line. Raises KeyError, TypeError, ValueError, OptionError."""
        settings, model = row["settings"], row["model"]
        names = {one.name for one in fields(Sampling)} - {"seed", "logprobs"}
        options = {name: settings[name] for name in names & settings.keys()}
        if settings.get("logit_bias") is not None:  # as strings: JSON has no -inf
            pairs = (item.split("=") for item in settings["logit_bias"])
            options["logit_bias"] = {int(token_id): float(bias) for token_id, bias in pairs}
        for name, value in options.items():
            if isinstance(value, list):
                options[name] = tuple(value)
        return cls(
            model["name"],
            Sampling(**options),
            settings.get("probs"),
            model["vocab_size"],
            model["context_len"],
            _ids(model["eos_ids"]),
            model["tokenizer"],
        )


@dataclass(frozen=True, slots=True)
class _Line:
    index: int
    offset: int
    num_tokens: int


class Log:
    """Log opened for reading. Records are loaded on demand, in the order of the prompts, and not kept.

    Attributes:
        header: shared by all records.
        num_failed: prompts that ended in an error, and have no record.
        num_tokens: tokens of all outputs.
    """

    def __init__(self, path: Path, header: Header, lines: Sequence[_Line], num_failed: int) -> None:
        self._path, self._lines = path, sorted(lines, key=lambda line: line.index)
        self.header, self.num_failed = header, num_failed
        self.num_tokens = sum(line.num_tokens for line in lines)

    @classmethod
    def open(cls, path: Path) -> Log:
        """Look through a log. An incomplete last line is ignored.

        Raises:
            FileError: there is no log, its lines are damaged, differ in their settings, or were constrained.
        """
        if path.is_dir():
            raise FileError(f"{path} is a folder: logs of outrider 0.2 and earlier must be recorded again")
        header: Header | None = None
        lines: dict[int, _Line] = {}
        num_failed = offset = 0
        try:
            with path.open("rb") as stream:
                if not stream.seekable():  # a pipe
                    raise FileError(f"cannot read {path}: a log is read more than once: give a regular file")
                for number, text in enumerate(stream, start=1):
                    where = f"{path}, line {number}"
                    if not text.endswith(b"\n"):
                        break
                    row = parse_row(where, text)
                    own = _header(where, row)
                    if header is None:
                        header = own
                    if own != header:
                        raise FileError(
                            f"{where} has other settings than the lines before, or ends at other tokens, as chats do "
                            "beside texts: a log has one kind"
                        )
                    if row.get("finish_reason") in ("error", None):
                        num_failed += 1
                    else:
                        record = _record(where, row, header)
                        if record.index in lines:
                            raise FileError(f"{where}: duplicates prompt {record.index}: remove one of the two")
                        lines[record.index] = _Line(record.index, offset, len(record.token_ids))
                    offset += len(text)
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror}") from None
        if header is None or not lines:
            raise FileError(f"{path} has no records yet: create them with outrider record")
        return cls(path, header, list(lines.values()), num_failed)

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Record]:
        try:
            with self._path.open("rb") as stream:
                for line in self._lines:
                    stream.seek(line.offset)
                    where = f"{self._path}, prompt {line.index}"
                    yield _record(where, parse_row(where, stream.readline()), self.header)
        except OSError as error:
            raise FileError(f"cannot read {self._path}: {error.strerror}") from None


def _header(where: str, row: Mapping[str, Any]) -> Header:
    try:
        for name in (*CONSTRAINTS, "bad_words"):
            if row["settings"].get(name):
                raise FileError(f"{where} has the output of a constraint ({name}), which a replay does not know")
        return Header.from_json(row)
    except (KeyError, TypeError, ValueError, AttributeError, OptionError):
        raise FileError(f"{where} is not of a log: create one with outrider record") from None


def _record(where: str, row: Mapping[str, Any], header: Header) -> Record:
    try:
        probs = None
        if header.num_probs is not None:
            is_double = row["settings"]["dtype"] == "float64"
            probs = TopProbs.from_json(row["probs"], torch.float64 if is_double else torch.float32)
            if probs.top_ids.shape[1] != min(header.num_probs, header.vocab_size):
                raise ValueError("it has other probabilities than its settings")
        prompt_ids, token_ids = _ids(row["prompt_ids"]), _ids(row["token_ids"])
        if max(prompt_ids + token_ids) >= header.vocab_size or not _is_id(row["index"]):
            raise ValueError("a number is out of range")
        return Record(
            row["index"], row.get("category"), row["seed"], row["finish_reason"], prompt_ids, token_ids, probs
        )
    except (KeyError, TypeError, ValueError, RuntimeError, AssertionError):
        raise FileError(f"{where} is damaged: {_REMEDY}") from None


def _ids(stated: Any) -> tuple[int, ...]:
    """Raises TypeError, ValueError."""
    if not all(map(_is_id, stated)):
        raise ValueError("an id is no whole number")
    return tuple(stated)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
