"""alpha: how far two models agree, from their logits alone.

At one position, sum_v min(p(v), q(v)) = 1 - TV(p, q) is the probability that a token drawn from q is accepted under
``rejection`` (Leviathan et al. 2211.17192, corollary 3.6). Its mean over the positions of a text is alpha. Nothing is
generated: both models score existing texts. If q depends on where the round began, alpha is that of a round's first
token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.errors import PromptError
from outrider.measure.along import along
from outrider.measure.intervals import bounded_mean
from outrider.measure.teacher_forcing import Text
from outrider.options import Sampling
from outrider.records import Interval
from outrider.runtime.lm import LM
from outrider.sampling.probs import normalise

_PLAIN = Sampling()


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """sum_v min(p(v), q(v)), in float64 where the device has it. [..., V], [..., V] -> [...]"""
    return torch.minimum(normalise(target_probs), normalise(draft_probs)).sum(dim=-1)


@torch.inference_mode()
def measure_alpha(
    target: LM, drafter: Drafter, texts: Sequence[Text], sampling: Sampling = _PLAIN, batch_size: int = 8
) -> Interval:
    """Measure alpha, with an interval over the texts.

    Args:
        drafter: with a q that is not one-hot.
        texts: cut to the target's context; texts without a token to score are left out.

    Raises:
        PromptError: there is nothing to score.
    """
    most = target.context_len
    texts = [Text(text.ids[:most], text.num_given) for text in texts if min(len(text.ids), most) > text.num_given]
    sums = torch.zeros(2, len(texts), dtype=torch.float64)  # of overlaps, and of tokens
    for begin in range(0, len(texts), batch_size):
        for places in along(drafter, texts[begin : begin + batch_size], sampling, 1, target=target):
            if places.q is not None and places.p is not None:  # else nothing could be drafted
                is_scored = places.is_scored[:, 0]
                values = overlap(places.p[is_scored, 0], places.q[is_scored, 0]).to("cpu", torch.float64)
                rows = begin + places.rows[is_scored].cpu()
                sums.index_add_(1, rows, torch.stack((values, torch.ones_like(values))))
    overlaps, counts = sums[:, sums[1] > 0].tolist()
    if not counts:
        raise PromptError("no text has two tokens or more, so there is no token to score")
    return bounded_mean(overlaps, counts, (0.0, 1.0))
