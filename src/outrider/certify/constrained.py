"""Constraint masks for scoring finished sequences, without the loop's drafts and rollbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.records import Constraint, Effect
from outrider.scoring.teacher_forcing import ForcedTokens, Text

NewConstraint = Callable[[Sequence[int]], Constraint | None]
"""Creates the constraint of a new sequence with this prompt; None if unconstrained."""


class UnenforcedConstraint:
    """Constraint that ends no sequence: after a forbidden token everything is allowed. A faulty loop can so commit
    forbidden tokens, for the tests to detect."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self._num_beyond = 0  # tokens from the first forbidden one on

    @property
    def error(self) -> str | None:
        return self._inner.error

    def effect(self) -> Effect | None:
        return None if self._num_beyond else self._inner.effect()

    def push(self, token_id: int) -> bool:
        if self._num_beyond or not self._inner.push(token_id):
            self._num_beyond += 1
        return True

    def pop(self, num_tokens: int) -> None:
        num_beyond = min(num_tokens, self._num_beyond)
        self._num_beyond -= num_beyond
        if num_tokens > num_beyond:
            self._inner.pop(num_tokens - num_beyond)


def mask_of(constraint: Constraint, vocab_size: int) -> NDArray[np.bool_]:
    """Mask of the next tokens that a constraint allows, where its effect is a mask. [V]"""
    effect = constraint.effect()
    if effect is None:
        return np.ones(vocab_size, np.bool_)
    assert isinstance(effect, np.ndarray) and effect.dtype == np.bool_, "a processor, which is refused"
    return effect.astype(np.bool_, copy=False)


def walks_of(texts: Sequence[Text], new_constraint: NewConstraint) -> list[UnenforcedConstraint]:
    """A constraint for each text, advanced to its first scored token; none at all if unconstrained."""
    walks: list[UnenforcedConstraint] = []
    for text in texts:
        num_prompt = text.num_prompt or text.num_given
        constraint = new_constraint(text.ids[:num_prompt])
        if constraint is None:  # then none has one
            return []
        walk = UnenforcedConstraint(constraint)
        for token_id in text.ids[num_prompt : text.num_given]:
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
            place[:] = mask_of(self._walks[row], len(place))
            self._walks[row].push(token_id)
        is_forbidden = torch.from_numpy(~allowed)
        return [
            replace(chunk, logits=chunk.logits.masked_fill(is_forbidden.to(chunk.logits.device), -torch.inf))
            for chunk in chunks
        ]
