"""The interface of drafters, and the drafter that proposes nothing.

A drafter is configuration and may be shared; ``open`` starts a session over one batch, which holds what it needs to
remember between rounds. A session learns what was committed by looking at the batch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.decoding.batch import Batch
from outrider.records import Draft
from outrider.sampling.rules import Rule


class Session(Protocol):
    """A drafter at work on one batch."""

    def propose(self, batch: Batch, k: int, rule: Rule, noise: Any) -> Draft:
        """Draft at most ``batch.num_drafted(k)`` tokens for each row, drawn with ``rule.draw`` from the q that is
        reported.

        Args:
            k: the width of ``noise``; the draft has at most so many columns.
        """
        ...

    def keep(self, rows: Tensor) -> None:
        """The batch has kept only these rows, in this order."""
        ...


class Drafter(Protocol):
    """Something that can propose tokens.

    Attributes:
        name: for tables and messages.
    """

    name: str

    def open(self, batch: Batch) -> Session:
        """Start on a batch whose prompts are in its buffer."""
        ...

    def compiled(self) -> Drafter:
        """The same drafter, with its models compiled."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    name = "none"

    def open(self, batch: Batch) -> NoDrafter:
        return self

    def compiled(self) -> NoDrafter:
        return self

    def propose(self, batch: Batch, k: int, rule: Rule, noise: Any) -> Draft:
        return empty_draft(batch)

    def keep(self, rows: Tensor) -> None:
        pass


def empty_draft(batch: Batch) -> Draft:
    """No tokens for any row."""
    device = batch.ids.device
    return Draft(
        ids=torch.zeros(len(batch), 0, dtype=torch.long, device=device),
        probs=None,
        num_drafted=torch.zeros(len(batch), dtype=torch.long, device=device),
    )


def padded(draft: Draft, k: int) -> Draft:
    """The same with k columns, of which the new ones are not meant. There must be one already."""
    num_new = k - draft.ids.shape[1]
    if num_new == 0:
        return draft

    def pad(values: Tensor) -> Tensor:
        return torch.cat((values, *[values[:, -1:]] * num_new), dim=1)

    probs = None if draft.probs is None else pad(draft.probs)
    finite = None if draft.is_finite is None else pad(draft.is_finite)
    return Draft(pad(draft.ids), probs, draft.num_drafted, finite)
