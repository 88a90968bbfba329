"""Log-probabilities of a prompt's tokens, one forward at a time."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from outrider.records import TokenLogprob
from outrider.runtime.lm import LM
from outrider.sampling.probs import wide
from outrider.scoring.teacher_forcing import Text, force


@torch.inference_mode()
def prompt_logprobs(target: LM, token_ids: Sequence[int], num_top: int) -> Generator[list[TokenLogprob]]:
    """Score all tokens but the first, with the ``num_top`` most probable ones at each position, from the raw logits.

    Args:
        token_ids: at least two.

    Yields:
        Log-probabilities of a few hundred tokens at most, so that other work can run in between.

    Raises:
        NumericsError
    """
    for forced in force(target, [Text(token_ids)]):
        logprobs = wide(forced.logits).log_softmax(dim=-1)  # [M, V]
        chosen = logprobs.gather(-1, forced.ids[:, None]).squeeze(-1).tolist()
        top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        yield [
            TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
            for logprob, (ids, values) in zip(chosen, pairs, strict=True)
        ]
