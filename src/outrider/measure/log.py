"""Logs: a target's outputs for many prompts, as ``generate --output`` writes them, one JSON line each.

docs/guides/long-jobs.md describes the lines. The outputs come from plain decoding; p at their tokens comes from one
teacher-forced pass with the same sampling options, and equals that of the loop up to rounding
(docs/how-it-works/same-bytes.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from outrider.decoder import Decoder
from outrider.errors import FileError, OptionError, OutriderError
from outrider.measure.rounds_file import whole_ids
from outrider.measure.teacher_forcing import Text, force
from outrider.options import DEFAULT_NUM_SLOTS, MASKS, Sampling
from outrider.records import FinishReason
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalise
from outrider.system.files import file_errors, parse_row
from outrider.text.tokenizer import fingerprint

_REMEDY = "restore the file from a copy, or remove the line and run the same command again"


@dataclass(frozen=True, slots=True)
class Record:
    """The target's output for one prompt.

    Attributes:
        index: place of the prompt in its file, from 0.
        category: of the prompt, if any.
        probs: p of each token, after the sampling options; None if not recorded.
    """

    index: int
    category: str | None
    seed: int
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    probs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        assert self.prompt_ids and self.token_ids
        assert self.probs is None or len(self.probs) == len(self.token_ids)

    @property
    def text(self) -> Text:
        """Prompt and output, whose tokens are scored."""
        return Text((*self.prompt_ids, *self.token_ids), len(self.prompt_ids))


@dataclass(frozen=True, slots=True)
class Header:
    """Properties shared by all records of a log.

    Attributes:
        target: name of the model.
        sampling: without a seed.
        has_probs: whether p of the tokens was recorded.
        vocab_size, context_len: of the target.
        eos_ids: tokens that end the outputs.
        tokenizer: fingerprint of its vocabulary (see outrider.text.tokenizer); None without a tokenizer.
    """

    target: str
    sampling: Sampling
    has_probs: bool
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
    def of(cls, decoder: Decoder, options: Mapping[str, Any], *, has_probs: bool) -> Header:
        """Header for the outputs of a decoder. ``options``: fields of ``Sampling``; the seed is left out."""
        return cls._of(model_json(decoder), Sampling(**{**options, "seed": None}), has_probs)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Header:
        """Header of a line. Raises KeyError, TypeError, ValueError, OptionError."""
        settings = row["settings"]
        names = {one.name for one in fields(Sampling)} - {"seed", "logprobs"}
        options = {name: settings[name] for name in names & settings.keys()}
        if isinstance(bias := settings.get("logit_bias"), list):  # as strings: JSON has no -inf
            options["logit_bias"] = {int(token_id): float(value) for token_id, value in (x.split("=") for x in bias)}
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        return cls._of(row["model"], Sampling(**options), bool(settings.get("probs")))

    @classmethod
    def _of(cls, model: Mapping[str, Any], sampling: Sampling, has_probs: bool) -> Header:
        sizes = model["vocab_size"], model["context_len"]
        return cls(model["name"], sampling, has_probs, *sizes, whole_ids(model["eos_ids"]), model["tokenizer"])


class Log(NamedTuple):
    """A log that was read. ``records``: in the order of the prompts. ``num_failed``: prompts that ended in an error,
    and have no record."""

    header: Header
    records: Sequence[Record]
    num_failed: int

    @classmethod
    def open(cls, path: Path) -> Log:
        """Read a log. An incomplete last line is ignored. Raises FileError: there is no log, its lines are damaged,
        differ in their settings, or were constrained."""
        header: Header | None = None
        records: dict[int, Record] = {}
        num_failed = 0
        with file_errors("read", path), path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                where = f"{path}, line {number}"
                if not line.endswith(b"\n"):
                    break
                row = parse_row(where, line)
                if (own := _header(where, row)) != (header := header or own):
                    differing = "has other settings than the lines before, or ends at other tokens, as chats do beside"
                    raise FileError(f"{where} {differing} texts: a log has one kind")
                if row.get("finish_reason") in ("error", None):
                    num_failed += 1
                    continue
                record = _record(where, row, header)
                if record.index in records:
                    raise FileError(f"{where}: duplicates prompt {record.index}: remove one of the two")
                records[record.index] = record
        if header is None or not records:
            raise FileError(f"{path} has no records yet: create them with outrider generate --output")
        return cls(header, [records[index] for index in sorted(records)], num_failed)


def open_log(path: Path, target: str, tokenizer: Any, option: str = "--log") -> Log:
    """Open a log of a target's outputs. ``tokenizer``: the target's; None if it has none. ``option``: that names the
    log. Raises OptionError: it is of another target; FileError: it is damaged, or empty."""
    log = Log.open(path)
    is_same = tokenizer is None or log.header.tokenizer in (None, fingerprint(tokenizer))
    if log.header.target != target or not is_same:
        raise OptionError(option, str(path), f"it was recorded from {log.header.target}, not from this {target}")
    return log


def _header(where: str, row: Mapping[str, Any]) -> Header:
    try:
        for name in MASKS:
            if row["settings"].get(name) not in (None, []):
                raise FileError(f"{where} has the output of a constraint ({name}), which a replay does not know")
        return Header.from_json(row)
    except (KeyError, TypeError, ValueError, AttributeError, OptionError):
        raise FileError(f"{where} is not of a log: create one with outrider generate --output") from None


def _record(where: str, row: Mapping[str, Any], header: Header) -> Record:
    try:
        prompt_ids, token_ids = whole_ids(row["prompt_ids"]), whole_ids(row["token_ids"])
        if max(prompt_ids + token_ids) >= header.vocab_size:
            raise ValueError("an id is out of range")
        (index,) = whole_ids([row["index"]])
        probs = tuple(row["probs"]) if header.has_probs else None
        if probs is not None and not all(map(math.isfinite, probs)):
            raise ValueError("a probability is no number")
        return Record(index, row.get("category"), row["seed"], row["finish_reason"], prompt_ids, token_ids, probs)
    except (KeyError, TypeError, ValueError, AssertionError):
        raise FileError(f"{where} is damaged: {_REMEDY}") from None


def model_json(decoder: Decoder) -> dict[str, Any]:
    tokenizer = None if decoder.tokenizer is None else fingerprint(decoder.tokenizer)
    of_target = {name: getattr(decoder.target, name) for name in ("name", "vocab_size", "context_len")}
    return of_target | {"eos_ids": sorted(decoder.eos_ids), "tokenizer": tokenizer}


def record_outputs(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    options: dict[str, Any],
    *,
    categories: Sequence[str | None] | None = None,
    num_slots: int = DEFAULT_NUM_SLOTS,
    on_done: Callable[[int], None] = lambda _: None,
) -> tuple[Header, list[Record]]:
    """Generate and record the outputs for some prompts, with p of their tokens.

    Args:
        decoder: without a draft.
        options: fields of ``Sampling``; prompt i has the given seed + i.
        categories: of the prompts.
        num_slots: prompts that run concurrently.
        on_done: called with the number of rows just finished.

    Raises:
        NumericsError: the target returned NaN or infinite logits.
    """
    records: list[Record] = []
    for index, done in decoder.complete(prompts, Sampling(**options), num_slots=num_slots):
        if isinstance(done, OutriderError):
            raise done
        assert done.finish_reason is not None
        category = None if categories is None else categories[index]
        given = tuple(prompts[index]), tuple(done.token_ids)
        records.append(Record(index, category, done.seed, done.finish_reason, *given))
        on_done(1)
    records.sort(key=lambda one: one.index)
    sampling = Sampling(**options).with_ends(decoder.eos_ids)
    for begin in range(0, len(records), num_slots):
        group = records[begin : begin + num_slots]
        found = token_probs(decoder.target, [one.text for one in group], sampling)
        scored = zip(group, found, strict=True)
        records[begin : begin + num_slots] = [replace(one, probs=tuple(probs)) for one, probs in scored]
    return Header.of(decoder, options, has_probs=True), records


def token_probs(target: LM, texts: Sequence[Text], sampling: Sampling) -> list[list[float]]:
    """Compute p of the scored tokens of texts."""
    settings = Settings.of([sampling], target.vocab_size, target.device)
    probs: list[list[float]] = [[] for _ in texts]
    for chunk in force(target, texts, [settings]):
        p = normalise(chunk.probs(settings)).gather(1, chunk.ids[:, None])[:, 0]
        for row, value in zip(chunk.rows.tolist(), p.tolist(), strict=True):
            probs[row].append(value)
    return probs
