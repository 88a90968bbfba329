"""Token history that sampling options need: the tokens that occur in a sequence, for penalties, and the number of
generated tokens.

Position i of a round sees the tokens drafted before it, so that p and q are those of the would-be prefix. This module
does not apply the options (probs.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class History:
    """History of B rows; or, for T positions of each row, the history before them. A field is None until used."""

    seen: Tensor | None = None  # whether a token occurs, in the prompt or in the output. [B, V] or [B, T, V]
    counts: Tensor | None = None  # how often a token occurs in the output. [B, V] or [B, T, V]
    num_generated: Tensor | None = None  # tokens of the output. [B] or [B, T]

    @property
    def tensors(self) -> Iterator[Tensor]:
        return (value for name in _NAMES if (value := getattr(self, name)) is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> History:
        """Apply ``change`` to each field in use."""
        values = [getattr(self, name) for name in _NAMES]
        return History(*(None if value is None else change(value) for value in values))

    def begin(self, row: int, ids: Tensor, num_given: int) -> None:
        """Start a new sequence in a row, in place: its tokens so far [N], the first ``num_given`` of the prompt."""
        if self.seen is not None:
            self.seen[row] = False
            self.seen[row, ids] = True
        if self.counts is not None:
            self.counts[row] = ids[num_given:].bincount(minlength=self.counts.shape[1])
        if self.num_generated is not None:
            self.num_generated[row] = len(ids) - num_given

    def append(self, ids: Tensor, old_lengths: Tensor, lengths: Tensor) -> None:
        """Append output to all rows, in place: ids [B, T], between the lengths of the sequences before and after [B].
        Columns beyond a row's tokens repeat the last one."""
        if self.seen is not None:
            self.seen.scatter_(1, ids, True)
        if self.counts is not None:
            is_meant = torch.arange(ids.shape[1], device=ids.device) < (lengths - old_lengths)[:, None]
            self.counts.scatter_add_(1, ids, is_meant.to(self.counts.dtype))
        if self.num_generated is not None:
            self.num_generated.add_(lengths - old_lengths)

    def along(self, ids: Tensor, is_output: Tensor | None = None) -> History:
        """History before each of T+1 positions along ``ids`` [B, T]; the first one is the present history.
        ``is_output`` says which of the ids are output [B, T]; None for all."""
        num = self.num_generated
        if num is not None:
            steps = torch.ones_like(ids) if is_output is None else is_output
            num = torch.cat((num[:, None], steps), dim=1).cumsum(dim=1, dtype=num.dtype)
        return History(
            None if self.seen is None else _summed(self.seen, ids, None) > 0,
            None if self.counts is None else _summed(self.counts, ids, is_output),
            num,
        )

    def then(self, ids: Tensor) -> History:
        """History after one more token of each row. [B]"""
        return self.along(ids[:, None]).map(lambda values: values[:, 1])


_NAMES = tuple(one.name for one in fields(History))
NO_HISTORY = History()


def _summed(start: Tensor, ids: Tensor, is_counted: Tensor | None) -> Tensor:
    """Occurrences before each position: ``start`` [B, V] plus those in ids [B, T]. [B, T+1, V]"""
    is_next = ids[..., None] == torch.arange(start.shape[1], device=start.device)
    if is_counted is not None:
        is_next &= is_counted[..., None]
    return torch.cat((start[:, None], is_next.to(start.dtype)), dim=1).cumsum(dim=1, dtype=torch.int32)
