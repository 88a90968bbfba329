"""Perplexity of a text under a target and its draft, and their agreement on it.

A text longer than the context is scored in windows. Each token but the very first is scored once, given the tokens
before it in its window. Disjoint windows cost least, but give the first tokens of each little context; with a stride
below the context they overlap, so that every token (after the first window) has at least context - stride + 1 tokens
before it.

Nothing is generated. This module does not know files, nor how the text was tokenized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings
from outrider.scoring.alpha import overlap
from outrider.scoring.teacher_forcing import ForcedTokens, Text, sums_by_text
from outrider.stats.intervals import Interval, bounded_mean, ratio_of_sums


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Likelihood of a text under one model.

    Attributes:
        nats_per_token: mean of -ln p over the scored tokens; the interval is over the windows.
        bytes_per_token: of the scored text, in UTF-8.
    """

    model: str
    nats_per_token: Interval
    bytes_per_token: float

    @property
    def per_token(self) -> Interval:
        """exp(nats per token): as uncertain as a choice among this many equally likely tokens."""
        return _mapped(self.nats_per_token, math.exp)

    @property
    def per_byte(self) -> Interval:
        """exp(nats per byte); comparable between tokenizers."""
        return _mapped(self.nats_per_token, lambda nats: math.exp(nats / self.bytes_per_token))

    @property
    def bits_per_byte(self) -> Interval:
        return _mapped(self.nats_per_token, lambda nats: nats / self.bytes_per_token / math.log(2))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "nats_per_token": self.nats_per_token.to_json(),
            "perplexity": self.per_token.to_json(),
            "byte_perplexity": self.per_byte.to_json(),
            "bits_per_byte": self.bits_per_byte.to_json(),
        }


def _mapped(interval: Interval, function: Callable[[float], float]) -> Interval:
    """Apply an increasing function to an interval."""
    ends = [None if end is None else function(end) for end in (interval.low, interval.high)]
    return Interval(function(interval.value), ends[0], ends[1], interval.level)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Perplexity and agreement of target and draft. Intervals are over the windows, treated as independent.

    Attributes:
        perplexities: of the target, then of the draft, if any.
        agreement: share of tokens for which both models have the same argmax; None without a draft.
        alpha: mean of sum_v min(p(v), q(v)) = 1 - TV at temperature 1; None without a draft.
    """

    perplexities: tuple[Perplexity, ...]
    agreement: Interval | None
    alpha: Interval | None
    num_windows: int
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "perplexities": [one.to_json() for one in self.perplexities],
            "agreement": self.agreement.to_json() if self.agreement else None,
            "alpha": self.alpha.to_json() if self.alpha else None,
            "num_windows": self.num_windows,
            "num_tokens": self.num_tokens,
        }


def windows(ids: Sequence[int], context: int, stride: int) -> list[Text]:
    """Split a text into windows that score every token but the very first once.

    A window feeds ``context`` tokens and also scores the next one, so it has one token more.

    Args:
        ids: two or more.
        context: tokens that a model reads at once, at least 1.
        stride: from the beginning of a window to that of the next, 1 <= stride <= context.
    """
    assert len(ids) >= 2 and 1 <= stride <= context
    out: list[Text] = []
    num_done = 1
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + context + 1, len(ids))
        out.append(Text(ids[begin:end], num_done - begin))
        num_done = end
        if end == len(ids):
            break
    return out


def judge(
    target: LM,
    draft: LM | None,
    texts: Sequence[Text],
    num_bytes: int,
    *,
    batch_size: int = 8,
    on_done: Callable[[int], None] | None = None,
) -> Judgement:
    """Score the windows of a text, each once by each model.

    Args:
        draft: with the target's vocabulary; None: the target alone.
        texts: windows, at most one token longer than either model's context.
        num_bytes: of the scored tokens, in UTF-8.
        on_done: called with the number of windows just done, for a progress bar.
    """
    setting = Settings.of([Sampling()], target.vocab_size, target.device)

    def alone(p: ForcedTokens) -> Tensor:
        return -p.logprobs()[None]

    def pair(p: ForcedTokens, q: ForcedTokens) -> Tensor:
        device = p.ids.device
        is_same = p.best_ids() == q.best_ids().to(device)
        return torch.stack(
            [-p.logprobs(), -q.logprobs().to(device), is_same, overlap(p.probs(setting), q.probs(setting))]
        )

    lms = [target] if draft is None else [target, draft]
    measure = alone if draft is None else pair
    sums = sums_by_text(lms, texts, measure, batch_size=batch_size, on_done=on_done)
    counts = [len(text.ids) - text.num_given for text in texts]
    nats, shares = sums[: len(lms)].tolist(), sums[len(lms) :].tolist()
    agreement, alpha = [bounded_mean(row, counts, (0.0, 1.0)) for row in shares] if draft else (None, None)
    bytes_per_token = num_bytes / sum(counts)
    return Judgement(
        perplexities=tuple(
            Perplexity(lm.name, ratio_of_sums(row, counts), bytes_per_token) for lm, row in zip(lms, nats, strict=True)
        ),
        agreement=agreement,
        alpha=alpha,
        num_windows=len(texts),
        num_tokens=sum(counts),
    )
