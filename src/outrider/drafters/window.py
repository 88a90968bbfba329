"""Sequences longer than the draft's context: the draft reads the last tokens only.

The draft's cache holds a window of the sequence, whose first token has position 0. When a sequence outgrows the
context, its window begins anew with the second half of it: so a prefill of half a context is paid every half context.
Where the window begins is a function of the length alone, so that drafts stay a function of the sequence.

For the session inside, a new window is a new sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Prefill, Rows, Session
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
        start = self._starts[slot] = self._starts[slot if source is None else source]
        self._inner.assign(slot, source, max(0, num_tokens - start))

    def prefill(self, chunk: Prefill) -> None:
        starts = [window_start(length, self._context_len) for length in chunk.lengths]
        for slot, start in enumerate(starts, chunk.first_slot):
            self._begin(slot, start)

        def within(lengths: Sequence[int]) -> list[int]:
            return [max(0, length - start) for length, start in zip(lengths, starts, strict=True)]

        numbers = within(chunk.starts), within(chunk.ends), within(chunk.lengths)
        self._inner.prefill(Prefill(self._ids(chunk.ids, starts), chunk.first_slot, *numbers, None))

    def catch_up(self, rows: Rows) -> bool:
        """Read the windows of rows that have outgrown theirs."""
        if rows.longest <= self._context_len:
            return self._inner.catch_up(rows)
        is_new = False
        # Here alone the host waits for the device: while all sequences are short, nothing is read.
        for slot, (length, most_wanted) in enumerate(zip(rows.lengths.tolist(), rows.most_wanted, strict=True)):
            start = window_start(length, self._context_len)
            if most_wanted and self._begin(slot, start):
                is_new = True
                ids = self._ids(rows.ids[slot : slot + 1], [start])
                self._inner.prefill(Prefill(ids, slot, [0], [length - start - 1], [length - start], None))
        return self._inner.catch_up(self._within(rows)) or is_new

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return self._inner.propose(self._within(rows), k, rule, noise)

    def _begin(self, slot: int, start: int) -> bool:
        """Begin a window, unless the slot holds it."""
        is_new = self._starts[slot] != start
        if is_new:
            self._starts[slot] = start
            self._inner.assign(slot, slot, 0)
        return is_new

    def _within(self, rows: Rows) -> Rows:
        starts = self._starts[: len(rows)]
        lengths = rows.lengths - torch.tensor(starts, device=rows.lengths.device)
        room = (self._context_len + 1 - lengths).clamp_min(0)  # the last drafted token is never fed
        return replace(
            rows,
            ids=self._ids(rows.ids, starts),
            lengths=lengths,
            num_wanted=torch.minimum(rows.num_wanted, room),
            longest=min(rows.longest, self._context_len),
        )

    def _ids(self, ids: Tensor, starts: Sequence[int]) -> Tensor:
        """Tokens of the windows. [B, N] -> [B, context]"""
        columns = torch.tensor(starts, device=ids.device)[:, None] + torch.arange(self._context_len, device=ids.device)
        return ids.gather(1, columns.clamp_max(ids.shape[1] - 1))
