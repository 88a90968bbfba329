"""Log-probabilities of a prompt's tokens, one forward at a time."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.records import TokenLogprob
from outrider.runtime.lm import LM
from outrider.sampling.probs import wide
from outrider.scoring.teacher_forcing import Text, force
from outrider.serve.http_errors import Refusal

_MOST_SCORES = 2**20  # log-probabilities of prompts in one response: some 100 bytes each, and more in memory


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a prompt.

    Attributes:
        rank: 1 for the most probable token.
    """

    logprob: TokenLogprob
    rank: int

    def first(self, num_top: int) -> TokenLogprob:
        """Its log-probability with no more than ``num_top`` alternatives."""
        return TokenLogprob(self.logprob.logprob, self.logprob.top[:num_top])


def check_scores(scores: Mapping[str, int], num_tokens: int) -> None:
    """Check that a response with log-probabilities of prompts is not too long.

    Args:
        scores: fields that request them, with the number of alternatives.
        num_tokens: of all prompts, for each of their choices.

    Raises:
        Refusal
    """
    for name, num_top in scores.items():
        if (num := num_tokens * (num_top + 1)) > _MOST_SCORES:
            message = f"{num} log-probabilities of prompt tokens are too many for one response, of at most"
            raise Refusal(f"{name}: {message} {_MOST_SCORES}: ask for fewer, or send several requests", param=name)


@torch.inference_mode()
def prompt_logprobs(target: LM, token_ids: Sequence[int], num_top: int) -> Generator[list[ScoredToken]]:
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
        chosen = logprobs.gather(-1, forced.ids[:, None])  # [M, 1]
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        yield [
            ScoredToken(TokenLogprob(logprob, tuple(zip(ids, values, strict=True))), rank)
            for logprob, rank, (ids, values) in zip(chosen.squeeze(-1).tolist(), ranks.tolist(), pairs, strict=True)
        ]
