"""The loop in which drafts are drawn: token by token from logits, for every drafter that has a q.

Each drafter's step computes the logits: in one forward for each token (models, chain heads) or in one for all of them
(PARD, block heads). Whether a draft ends before a token is a function of the tokens before it alone. A cut that looked
at the drawn token would bias the output, since the tokens that remain would not be drawn from q.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Rows
from outrider.drafters.draft_options import DraftOptions
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.runtime.vocabulary import spread
from outrider.sampling.history import History
from outrider.sampling.masks import Masked, Masks, mask
from outrider.sampling.probs import Settings, only_ids, probs_of, stack_places
from outrider.sampling.rules import Rule

Logits = Generator[Tensor, tuple[Tensor, Tensor], None]
"""Yields the logits at each offset, of the model's ``token_ids`` or of all tokens [B, D], and is sent the ids that were
drawn there [B] and the numbers of drafted tokens so far [B]."""


@dataclass(frozen=True, slots=True)
class DraftStep(ABC):
    """Draft K tokens of each row, one after the other.

    Attributes:
        view_len: above every position that is fed.
        stops_early: draft fewer than K tokens if no row has more, which needs reading on the host.
    """

    view_len: int
    k: int
    rule: Rule
    options: DraftOptions
    stops_early: bool = False

    @abstractmethod
    def logits(self, lm: LM, num_wanted: Tensor, *args: Any, **own: Any) -> Logits:
        """Compute the logits, for at most ``num_wanted`` tokens [B], from what the session of such drafts knows."""

    def __call__(
        self,
        lm: LM,
        *,
        num_wanted: Tensor,
        settings: Settings,
        history: History,
        noise: Any,
        masks: Masks | None = None,
        **own: Any,
    ) -> Draft:
        """
        Args:
            num_wanted: the most tokens to draft. [B]
            masks: effects of constraints. The host reads each token to mask the next one.
            own: for ``logits``.
        """
        forwards, num_drafted, allowed = self.logits(lm, num_wanted, **own), num_wanted, None
        if self.options.is_greedy:
            settings = settings.greedy()
        drawn: list[tuple[Tensor, ...]] = []
        logits = next(forwards)
        for i in range(self.k):
            token_ids = lm.token_ids
            if masks is not None:
                allowed = masks.here()
                logits, token_ids = spread(logits, token_ids, lm.vocab_size), None
            if self.options.min_prob > 0:
                is_cut = is_unsure(logits, self.options.min_prob, allowed)
                num_drafted = torch.where(is_cut, num_drafted.clamp_max(i), num_drafted)
            here = history.map(lambda values: values[:, None])
            rows, is_finite = probs_of(logits[:, None], settings, here, allowed, token_ids, lm.vocab_size)
            q: Any = rows[:, 0]
            ids = only_ids(q) if self.options.is_greedy else self.rule.draw(q, noise.at(i))
            if masks is not None:
                masks.push(ids, num_drafted > i)
            drawn.append((ids, is_finite[:, 0], q))
            if self.stops_early and not bool((num_drafted > i + 1).any()):
                drawn = drawn[: max(1, int(num_drafted.amax()))]
                break
            if i + 1 < self.k:
                history, logits = history.then(ids), forwards.send((ids, num_drafted))
        drafted, is_good, probs = (stack_places(parts) for parts in zip(*drawn, strict=True))
        return Draft(drafted, None if self.options.is_greedy else probs, num_drafted, is_good)

    def draft(self, lm: LM, rows: Rows, num_wanted: Tensor, noise: Any, **own: Any) -> Draft:
        """Draft for these rows; with constraints, eagerly."""
        own |= {"lengths": rows.lengths, "num_wanted": num_wanted, "noise": noise}
        own |= {"settings": rows.settings, "history": rows.history}
        return lm.execution.run(self, lm, **own) if rows.masks is None else self(lm, masks=rows.masks, **own)


def owed(num_wanted: Tensor, num_fed: int, cached: Tensor, lengths: Tensor) -> Tensor:
    """Positions of the tokens to feed before the first draft; -1 for those in the cache, but for the last one, and in
    rows without drafts.

    Args:
        num_wanted: the most tokens to draft. [B]
        num_fed: T, the last tokens of each sequence.
        cached: tokens in the cache. [B]
        lengths: [B]

    Returns:
        [B, T]
    """
    positions = lengths[:, None] - num_fed + torch.arange(num_fed, device=lengths.device)
    is_owed = (positions >= torch.minimum(cached, lengths - 1)[:, None]) & (num_wanted > 0)[:, None]
    return torch.where(is_owed, positions, -1)


def is_unsure(logits: Tensor, min_prob: float, allowed: Masked = None) -> Tensor:
    """Whether the draft's most probable token has a probability below ``min_prob``, by its logits before any option: a
    reason to end a draft before that token.

    Args:
        logits: [B, D]; of all tokens if there are constraints.
        allowed: the effects of constraints. [B, 1, V]

    Returns:
        [B]; False where the logits are not finite.
    """
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if allowed is not None:
        x = mask(x[:, None], allowed)[:, 0]
    return x.amax(dim=-1) - x.logsumexp(dim=-1) < math.log(min_prob)
