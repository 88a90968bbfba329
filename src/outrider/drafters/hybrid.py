"""Drafts by suffix decoding where its score is high, else by another drafter.

The suffix takes a row if it expects more accepted tokens than a rival, each of whose tokens would be accepted with a
constant probability. That is a function of the tokens before the draft, so every rule stays lossless. (The recent
acceptance of the other drafter is not: a sequence that is cut and resumed would go on with other drafts.) The other
drafter gets the remaining rows; in those of the suffix none of its tokens are wanted.

Source: SuffixDecoding, Oliaro et al. 2411.04975, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.drafters.base import Drafter, DraftSession, Prefill, Rows, VerifyResult, empty_draft, pad
from outrider.drafters.lookups import SuffixSession, looked_up
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.probs import certain_rows, certain_where
from outrider.sampling.rules import Rule

RIVAL_ACCEPTANCE = 0.7


def hybrid_drafter(
    suffix: Drafter, other: Drafter, vocab_size: int, rival_acceptance: float = RIVAL_ACCEPTANCE
) -> Drafter:
    """Draft with ``suffix`` or with ``other``, row by row.

    Args:
        suffix: from ``suffix_drafter``.
        vocab_size: size of the target's vocabulary.
        rival_acceptance: probability with which each token of the suffix's rival is accepted.
    """

    def opens(models: Sequence[LM], *sizes: Any) -> DraftSession:
        first: Any = suffix.opens((), *sizes)
        return HybridSession(first, other.opens(models, *sizes), other, vocab_size, rival_acceptance)

    return replace(
        other, name=f"{suffix.name}+{other.name}", opens=opens, is_lm=False, most_drafted=None, reads_on_host=True
    )


class HybridSession(DraftSession):
    """The sessions of both drafters. Each reads the tokens of all rows."""

    def __init__(
        self, suffix: SuffixSession, other: DraftSession, drafter: Drafter, vocab_size: int, rival_acceptance: float
    ) -> None:
        self._suffix, self._other, self._drafter = suffix, other, drafter
        self._vocab_size, self._rival_acceptance = vocab_size, rival_acceptance
        self._found: list[list[int]] = []  # this round's drafts of the suffix, empty in rows that it does not take

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        self._suffix.assign(slot, source, num_tokens)
        self._other.assign(slot, source, num_tokens)

    def prefill(self, chunk: Prefill) -> None:
        self._other.prefill(chunk)  # look-ups read committed tokens before they draft

    def observe(self, result: VerifyResult) -> None:
        self._other.observe(result)

    def catch_up(self, rows: Rows) -> bool:
        """Decide who drafts for which row: the other drafter need not catch up in the rows of the suffix."""
        has_prompts = self._suffix.catch_up(rows)
        # The score of the rival is its expected number of accepted tokens: a token is only if those before it are.
        self._found = [
            ids if score > sum(self._rival_acceptance**i for i in range(1, num_wanted + 1)) else []
            for (score, ids), num_wanted in zip(self._suffix.scored(rows), rows.most_wanted, strict=True)
        ]
        return self._other.catch_up(self._rest(rows)) or has_prompts

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        """Both drafts as one, of the same form whoever drafted: each form is a program of its own, and those for the
        suffix could not be prepared before it finds something."""
        rest, found = self._rest(rows), looked_up(rows, self._found)
        other = self._other.propose(rest, k, rule, noise) if any(rest.most_wanted) else empty_draft(rows)
        if found.ids.shape[1] == 0:
            return other
        if other.ids.shape[1] == 0:
            one_hot = self._drafter.is_one_hot
            probs = None if one_hot else certain_rows(found.ids, self._vocab_size, rows.settings)
            is_finite = torch.ones_like(found.ids, dtype=torch.bool) if self._drafter.models else None
            return replace(found, probs=probs, is_finite=is_finite)
        k = max(found.ids.shape[1], other.ids.shape[1])
        found, other = pad(found, k), pad(other, k)
        is_found = found.num_drafted > 0
        ids = torch.where(is_found[:, None], found.ids, other.ids)
        probs, is_finite = other.probs, other.is_finite
        if probs is not None:
            probs = certain_where(is_found, ids, probs)
        if is_finite is not None:
            is_finite = is_finite | is_found[:, None]
        return Draft(ids, probs, torch.where(is_found, found.num_drafted, other.num_drafted), is_finite)

    def _rest(self, rows: Rows) -> Rows:
        """The rows as the other drafter sees them: it drafts where the suffix does not, within its own limits."""
        most_wanted = [0 if ids else num for ids, num in zip(self._found, rows.most_wanted, strict=True)]
        if (most := self._drafter.most_drafted) is not None:
            most_wanted = [min(num, most) for num in most_wanted]
        num_wanted = torch.minimum(rows.num_wanted, torch.tensor(most_wanted, device=rows.ids.device))
        return replace(rows, num_wanted=num_wanted, most_wanted=most_wanted)
