"""Log-probabilities of a prompt's own tokens, a forward at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from outrider.errors import NumericsError
from outrider.records import TokenLogprob
from outrider.runtime.lm import LM
from outrider.sampling.probs import wide
from outrider.scoring.teacher_forcing import Text, force


@torch.inference_mode()
def prompt_logprobs(target: LM, token_ids: Sequence[int], num_top: int) -> Iterator[list[TokenLogprob]]:
    """Of all tokens but the first, with the ``num_top`` most probable ones beside each, from the raw logits.

    Args:
        token_ids: at least two.

    Yields:
        Those of some hundred tokens at most, so that other work can be done in between.

    Raises:
        NumericsError
    """
    for forced in force(target, [Text(token_ids)]):
        logprobs = wide(forced.logits).log_softmax(dim=-1)  # [M, V]
        if bool(logprobs.isnan().any()):
            raise NumericsError(f"{target.name} gave NaN or infinite logits for a token of the prompt")
        chosen = logprobs.gather(-1, forced.ids[:, None]).squeeze(-1).tolist()
        top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        yield [
            TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
            for logprob, (ids, values) in zip(chosen, pairs, strict=True)
        ]


@dataclass(slots=True, eq=False)
class Scoring:
    """A prompt on its way to log-probabilities.

    Attributes:
        steps: ``prompt_logprobs``.
        result: of the event loop.
        submitted_s: when it was queued.
        has_begun: a forward has been done.
    """

    steps: Iterator[list[TokenLogprob]]
    result: asyncio.Future[list[TokenLogprob]]
    submitted_s: float
    found: list[TokenLogprob] = field(default_factory=list)
    has_begun: bool = False

    def step(self) -> list[TokenLogprob] | None:
        """One forward. The result at the end, or where nobody waits for it any more. Raises NumericsError."""
        self.has_begun = True
        part = None if self.result.cancelled() else next(self.steps, None)
        if part is None:
            return self.found
        self.found += part
        return None

    def resolve(self, found: list[TokenLogprob] | Exception) -> None:
        """In the event loop."""
        if self.result.done():
            return
        if isinstance(found, Exception):
            self.result.set_exception(found)
        else:
            self.result.set_result(found)
