"""alpha: how far two models agree, from their logits alone.

At one position, sum_v min(p(v), q(v)) = 1 - TV(p, q) is the probability that a token drawn from q is accepted under
``rejection`` (Leviathan et al. 2211.17192, corollary 3.6). Its mean over the positions of a text is alpha. Nothing is
generated: both models score existing texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from outrider.errors import PromptError
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalised
from outrider.scoring.teacher_forcing import ForcedTokens, Text, sums_by_text
from outrider.stats.intervals import Interval, bounded_mean


@dataclass(frozen=True, slots=True)
class Alpha:
    """alpha of a pair under some sampling options, with an interval over the texts, and the number of scored tokens."""

    sampling: Sampling
    alpha: Interval
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "alpha": self.alpha.to_json(),
            "num_tokens": self.num_tokens,
        }


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """sum_v min(p(v), q(v)), in float64 where the device has it. [..., V], [..., V] -> [...]"""
    return torch.minimum(normalised(target_probs), normalised(draft_probs)).sum(dim=-1)


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
        texts: cut to the context of both models; texts without a token to score are left out.
        on_done: called with the number of texts just done, for a progress bar.

    Raises:
        PromptError: there is nothing to score.
    """
    most = min(target.context_len, draft.context_len)
    texts = [Text(text.ids[:most], text.num_given) for text in texts if min(len(text.ids), most) > text.num_given]
    if not texts:
        raise PromptError("no text has two tokens or more, so there is no token to score")
    settings = [Settings.of([sampling], target.vocab_size, target.device) for sampling in samplings]

    def agreement(p: ForcedTokens, q: ForcedTokens) -> Tensor:
        return torch.stack([overlap(p.probs(setting), q.probs(setting)) for setting in settings])

    sums = sums_by_text((target, draft), texts, agreement, batch_size=batch_size, settings=settings, on_done=on_done)
    counts = [len(text.ids) - text.num_given for text in texts]
    return [
        Alpha(sampling, bounded_mean(row.tolist(), counts, (0.0, 1.0)), sum(counts))
        for sampling, row in zip(samplings, sums, strict=True)
    ]


def sampling_grid(temperatures: Sequence[float], top_ps: Sequence[float]) -> Iterator[Sampling]:
    """All pairs; at temperature 0, where top-p has no effect, only one."""
    for temperature, top_p in product(temperatures, top_ps):
        if temperature > 0 or top_p == top_ps[0]:
            yield Sampling(temperature=temperature, top_p=top_p)
