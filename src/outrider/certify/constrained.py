"""Constraint masks for scoring finished sequences, without the loop's drafts and rollbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.records import Constraint
from outrider.scoring.teacher_forcing import ForcedTokens, Text

NewConstraint = Callable[[], Constraint | None]
"""Creates the constraint of a new sequence; None if unconstrained."""


class UnenforcedConstraint:
    """Constraint that ends no sequence: after a forbidden token everything is allowed. A faulty loop can so commit
    forbidden tokens, for the tests to detect."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self._num_beyond = 0  # tokens from the first forbidden one on

    @property
    def error(self) -> str | None:
        return self._inner.error

    def allowed(self) -> NDArray[np.bool_] | None:
        return None if self._num_beyond else self._inner.allowed()

    def push(self, token_id: int) -> bool:
        if self._num_beyond or not self._inner.push(token_id):
            self._num_beyond += 1
        return True

    def pop(self, num_tokens: int) -> None:
        num_beyond = min(num_tokens, self._num_beyond)
        self._num_beyond -= num_beyond
        if num_tokens > num_beyond:
            self._inner.pop(num_tokens - num_beyond)


def walks_of(texts: Sequence[Text], new_constraint: NewConstraint) -> list[UnenforcedConstraint]:
    """A constraint for each text, advanced to its first scored token; none at all if unconstrained."""
    walks: list[UnenforcedConstraint] = []
    for text in texts:
        constraint = new_constraint()
        if constraint is None:  # then none has one
            return []
        walk = UnenforcedConstraint(constraint)
        for token_id in text.ids[text.num_prompt or text.num_given : text.num_given]:
            walk.push(token_id)
        walks.append(walk)
    return walks


class TextMasks:
    """Masks the logits of scored sequences, chunk by chunk."""

    def __init__(self, texts: Sequence[Text], new_constraint: NewConstraint) -> None:
        self._walks = walks_of(texts, new_constraint)

    def masked(self, *chunks: ForcedTokens) -> Sequence[ForcedTokens]:
        """Set the logits of forbidden tokens to minus infinity. (Logits processors leave these as they are.)

        Args:
            chunks: the next M tokens of all sequences, as scored by one or several models.
        """
        if not self._walks:
            return chunks
        first = chunks[0]
        allowed = np.ones(first.logits.shape, dtype=np.bool_)
        for place, row, token_id in zip(allowed, first.rows.tolist(), first.ids.tolist(), strict=True):
            mask = self._walks[row].allowed()
            if mask is not None:
                place[:] = mask
            self._walks[row].push(token_id)
        is_forbidden = torch.from_numpy(~allowed)
        return [
            replace(chunk, logits=chunk.logits.masked_fill(is_forbidden.to(chunk.logits.device), -torch.inf))
            for chunk in chunks
        ]
