"""Log format for a target's output: a folder with a header, an index and shards of tensors.

    log.json                 schema, target, sampling options, vocabulary; with its own checksum
    index.jsonl              one line per prompt, in order: all but the tensors, and a checksum of the record
    shard-00000.safetensors  the tensors of some records, "INDEX.NAME" each

The format is described in docs/reference/logs.md. This module does no input or output (log.py and
log_writer.py do), and does not know models, nor where records come from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.records import FinishReason
from outrider.system.titles import title_of

SCHEMA = title_of("log")
HEADER, INDEX = "log.json", "index.jsonl"
REMEDY = "take the log from a copy, or remove the folder and record again"
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
# Written only if set: logs of earlier versions lack them.
_LATER_SAMPLING = ("presence_penalty", "frequency_penalty", "min_tokens", "stop_token_ids")


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


@dataclass(frozen=True, slots=True)
class Record:
    """The target's output for one prompt.

    Attributes:
        prompt: its text; for a chat, the user's message.
        category: of the prompt, if any.
        probs: None if not recorded.
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
    """Properties shared by all records of a log.

    Attributes:
        target: name of the model.
        sampling: without a seed.
        num_probs: N; None if no probabilities were recorded.
        vocab_size: V.
        context_len: the target's.
        tokenizer: fingerprint of its vocabulary (see outrider.text.tokenizer); None without a tokenizer.
        settings: other options that the output depends on.
        provenance: of the recording; ignored when a log is resumed.
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
        """Limit of output tokens for a prompt."""
        return min(self.sampling.max_new_tokens, self.context_len - num_prompt_tokens)

    def to_json(self) -> dict[str, Any]:
        sampling = {name: getattr(self.sampling, name) for name in _SAMPLING}
        sampling |= {name: value for name in _LATER_SAMPLING if (value := getattr(self.sampling, name))}
        sampling["stop"] = list(self.sampling.stop)
        if self.sampling.logit_bias is not None:  # as strings: JSON has no -inf
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
    """Line of the index. ``sha256`` covers its other fields and the record's tensors."""

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
        values = asdict(line) | {"sha256": checksum_of(line, tensors_of(record))}
        return cls(**values)


def tensors_of(record: Record) -> dict[str, Tensor]:
    """Tensors by name, in the order of the checksum."""
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


def checksum_of(line: Line, tensors: Mapping[str, Tensor]) -> str:
    about = {name: value for name, value in asdict(line).items() if name != "sha256"}
    digest = hashlib.sha256(canonical(about))
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()


def damage(path: Path, index: int, what: str) -> str:
    return f"{path}, record {index} is damaged: {what}; {REMEDY}"


def shard_path(path: Path, shard: int) -> Path:
    return path / f"shard-{shard:05d}.safetensors"
