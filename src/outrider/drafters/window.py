"""Sequences longer than the draft's context: the draft reads the last tokens only.

The draft's cache holds a window of the sequence, whose first token has position 0. When a sequence outgrows the
context, its window begins anew with the second half of it: so a prefill of half a context is paid every half context.
Where the window begins is a function of the length alone, so that drafts stay a function of the sequence.

For the session inside, a new window is a new sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from outrider.drafters.base import Rows, Session
from outrider.records import Draft
from outrider.sampling.rules import Rule


def window_start(length: int, context_len: int) -> int:
    """The number of tokens before the window of a sequence. The window has ``context_len`` tokens at most, and more
    than half as many where there are tokens before it."""
    step = context_len - context_len // 2
    return max(0, -(-(length - context_len) // step)) * step


class WindowSession(Session):
    """Shows a session the windows of long sequences.

    A window ends drafts, too: none goes beyond it. A row that is not drafted for keeps its old window until it is.

    Args:
        inner: needs no hidden states of the target.
    """

    def __init__(self, inner: Session, context_len: int, num_slots: int) -> None:
        self._inner, self._context_len = inner, context_len
        self._starts = [0] * num_slots  # of the window that a slot's cache holds

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        start = self._starts[slot if source is None else source]
        if num_tokens <= start:
            start = 0  # nothing of that window remains, and the new sequence may end before it
        self._starts[slot] = start
        self._inner.assign(slot, source, max(0, num_tokens - start))

    def catch_up(self, rows: Rows) -> bool:
        """Begin the windows of rows that have outgrown theirs, or are new."""
        if rows.longest > self._context_len or any(self._starts[: len(rows)]):
            # Here alone the host waits for the device: while all sequences are short, nothing is read.
            for slot, (length, num) in enumerate(zip(rows.lengths.tolist(), rows.most_wanted, strict=True)):
                start = window_start(length, self._context_len)
                if num and self._starts[slot] != start:
                    self._starts[slot] = start
                    self._inner.assign(slot, slot, 0)
        return self._inner.catch_up(self._within(rows))

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return self._inner.propose(self._within(rows), k, rule, noise)

    def _within(self, rows: Rows) -> Rows:
        """The rows with the tokens of their windows. [B, N] -> [B, context]"""
        if not any(self._starts[: len(rows)]) and rows.longest + max(rows.most_wanted) <= self._context_len + 1:
            return rows
        device = rows.ids.device
        starts = torch.tensor(self._starts[: len(rows)], device=device)
        lengths = rows.lengths - starts
        room = (self._context_len + 1 - lengths).clamp_min(0)  # the last drafted token is never fed
        columns = starts[:, None] + torch.arange(self._context_len, device=device)
        return replace(
            rows,
            ids=rows.ids.gather(1, columns.clamp_max(rows.ids.shape[1] - 1)),
            lengths=lengths,
            num_wanted=torch.minimum(rows.num_wanted, room),
            longest=min(rows.longest, self._context_len),
        )
