"""alpha: how far two models agree, from their logits alone.

At one position, sum_v min(p(v), q(v)) = 1 - TV(p, q) is the probability that a token drawn from q is accepted under
``rejection`` (Leviathan et al. 2211.17192, corollary 3.6). Its mean over the positions of a text is alpha. Nothing is
generated: both models score existing texts. If q depends on where the round began, alpha is that of a round's first
token, and the later tokens have one each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.errors import PromptError
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalise
from outrider.scoring.forcing import measure_drafts
from outrider.scoring.teacher_forcing import ForcedTokens, Text, sums_by_text
from outrider.stats.intervals import Interval, bounded_mean


@dataclass(frozen=True, slots=True)
class Alpha:
    """alpha of a pair under some sampling options, with an interval over the texts, and the number of scored tokens.

    Attributes:
        by_offset: alpha of each token of a round, the first one first; None if all have the same alpha.
    """

    sampling: Sampling
    alpha: Interval
    num_tokens: int
    by_offset: tuple[Interval, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "alpha": self.alpha.to_json(),
            "num_tokens": self.num_tokens,
            "by_offset": self.by_offset and [one.to_json() for one in self.by_offset],
        }


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """sum_v min(p(v), q(v)), in float64 where the device has it. [..., V], [..., V] -> [...]"""
    return torch.minimum(normalise(target_probs), normalise(draft_probs)).sum(dim=-1)


def measure_alpha(
    target: LM,
    draft: LM,
    texts: Sequence[Text],
    samplings: Sequence[Sampling],
    *,
    batch_size: int = 8,
    on_done: Callable[[int], None] | None = None,
) -> list[Alpha]:
    """Measure alpha under each of the sampling options; each model reads every text once.

    Args:
        texts: cut to the context of both models (beyond that of a draft, see ``measure_forced_alpha``); texts without a
            token to score are left out.
        on_done: called with the number of texts just done, for a progress bar.

    Raises:
        PromptError: there is nothing to score.
    """
    texts = _cut(texts, min(target.context_len, draft.context_len + 1))
    settings = [Settings.of([sampling], target.vocab_size, target.device) for sampling in samplings]

    def agreement(p: ForcedTokens, q: ForcedTokens) -> Tensor:
        return torch.stack([overlap(p.probs(setting), q.probs(setting)) for setting in settings])

    sums = sums_by_text((target, draft), texts, agreement, batch_size=batch_size, settings=settings, on_done=on_done)
    counts = [len(text.ids) - text.num_given for text in texts]
    return [
        Alpha(sampling, bounded_mean(row.tolist(), counts, (0.0, 1.0)), sum(counts))
        for sampling, row in zip(samplings, sums, strict=True)
    ]


def measure_forced_alpha(
    target: LM,
    drafter: Drafter,
    texts: Sequence[Text],
    samplings: Sequence[Sampling],
    k: int,
    *,
    batch_size: int = 8,
    on_done: Callable[[int], None] | None = None,
) -> list[Alpha]:
    """Measure alpha of a drafter that needs forcing, at each of K offsets after the texts' own tokens.

    Args, Raises: see ``measure_alpha``; texts are cut to the context of the target.
    """
    texts = _cut(texts, target.context_len)
    sums = np.zeros((len(samplings), k, len(texts)))
    counts = np.zeros_like(sums)
    for begin in range(0, len(texts), batch_size):
        batch = texts[begin : begin + batch_size]
        for of_sums, of_counts, sampling in zip(sums, counts, samplings, strict=True):
            # All rounds draft K tokens, also near the end.
            options = [replace(sampling, max_new_tokens=len(text.ids) + k) for text in batch]
            measured = measure_drafts(target, drafter, batch, options, k, lambda p, q, _: overlap(p, q)[None], 1)
            for i, one in enumerate(measured, start=begin):
                of_sums[:, i] = np.nansum(one.values[0], axis=0)
                of_counts[:, i] = np.isfinite(one.values[0]).sum(axis=0)
        if on_done is not None:
            on_done(len(batch))
    found = []
    for of_sums, of_counts, sampling in zip(sums, counts, samplings, strict=True):
        by_offset = tuple(
            bounded_mean(values[num > 0].tolist(), num[num > 0].tolist(), (0.0, 1.0))
            for values, num in zip(of_sums, of_counts, strict=True)
            if num.any()
        )
        if not by_offset:
            raise PromptError(f"{drafter.name} drafts nothing on these texts")
        found.append(Alpha(sampling, by_offset[0], int(of_counts[0].sum()), by_offset))
    return found


def _cut(texts: Sequence[Text], most: int) -> list[Text]:
    """Texts of at most so many tokens, without those that have none to score.

    Raises:
        PromptError: none is left.
    """
    cut = [Text(text.ids[:most], text.num_given) for text in texts if min(len(text.ids), most) > text.num_given]
    if not cut:
        raise PromptError("no text has two tokens or more, so there is no token to score")
    return cut


def sampling_grid(temperatures: Sequence[float], top_ps: Sequence[float]) -> Iterator[Sampling]:
    """All pairs; at temperature 0, where top-p has no effect, only one."""
    for temperature, top_p in product(temperatures, top_ps):
        if temperature > 0 or top_p == top_ps[0]:
            yield Sampling(temperature=temperature, top_p=top_p)
