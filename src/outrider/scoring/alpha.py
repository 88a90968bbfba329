"""alpha: how far two models agree, from their logits alone.

At one position, sum_v min(p(v), q(v)) = 1 - TV(p, q) is the probability that a token drawn from q is accepted under
``rejection`` (Leviathan et al. 2211.17192, corollary 3.6). Its mean over the positions of a text is alpha. Nothing is
generated: both models score existing texts. If q depends on where the round began, alpha is that of a round's first
token, and the later tokens have one each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.errors import PromptError
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, Sampling
from outrider.runtime.lm import LM
from outrider.sampling.probs import normalise
from outrider.scoring.along import along, needs_forcing
from outrider.scoring.teacher_forcing import Text
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


@torch.inference_mode()
def measure_alpha(
    target: LM,
    drafter: Drafter,
    texts: Sequence[Text],
    samplings: Sequence[Sampling],
    *,
    batch_size: int = 8,
    on_done: Callable[[int], None] | None = None,
) -> list[Alpha]:
    """Measure alpha under each of the sampling options.

    Args:
        drafter: with a q that is not one-hot.
        texts: cut to the target's context; texts without a token to score are left out.
        on_done: called with the number of texts just done, for a progress bar.

    Raises:
        PromptError: there is nothing to score.
    """
    most = target.context_len
    texts = [Text(text.ids[:most], text.num_given) for text in texts if min(len(text.ids), most) > text.num_given]
    if not texts:
        raise PromptError("no text has two tokens or more, so there is no token to score")
    is_by_round = needs_forcing(drafter, texts)
    k = (drafter.most_drafted or DEFAULT_NUM_DRAFT_TOKENS) if is_by_round else 1
    sums = torch.zeros(2, len(samplings), k, len(texts), dtype=torch.float64)  # of overlaps, and of tokens
    for begin in range(0, len(texts), batch_size):
        batch = texts[begin : begin + batch_size]
        for i, places in along(drafter, batch, samplings, k, target=target, is_forced=is_by_round):
            if places.q is None:  # a round in which nothing could be drafted
                continue
            assert places.p is not None
            at, offsets = places.is_scored.cpu().nonzero(as_tuple=True)
            values = overlap(places.p[places.is_scored], places.q[places.is_scored]).to("cpu", torch.float64)
            index = offsets, begin + places.rows.cpu()[at]
            sums[0, i].index_put_(index, values, accumulate=True)
            sums[1, i].index_put_(index, torch.ones_like(values), accumulate=True)
        if on_done is not None:
            on_done(len(batch))
    found = []
    for sampling, by_offset, counts in zip(samplings, *sums, strict=True):
        means = tuple(
            bounded_mean(values[num > 0].tolist(), num[num > 0].tolist(), (0.0, 1.0))
            for values, num in zip(by_offset, counts, strict=True)
            if num.any()
        )
        if not means:
            raise PromptError(f"{drafter.name} drafts nothing on these texts")
        found.append(Alpha(sampling, means[0], int(counts[0].sum()), means if is_by_round else None))
    return found


def sampling_grid(temperatures: Sequence[float], top_ps: Sequence[float]) -> Iterator[Sampling]:
    """All pairs; at temperature 0, where top-p has no effect, only one."""
    for temperature, top_p in product(temperatures, top_ps):
        if temperature > 0 or top_p == top_ps[0]:
            yield Sampling(temperature=temperature, top_p=top_p)
