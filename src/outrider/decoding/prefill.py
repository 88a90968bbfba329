"""Prefill: which rows the next forward feeds, and how far."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.decoding.batch import Row
from outrider.runtime.lm import PREFILL_TOKENS
from outrider.runtime.padding import num_together

PREFILL_CHUNK = 512
"""Default number of prompt tokens between two rounds."""


def next_forward(
    filling: Iterable[Row], device: torch.device, *, chunk: int | None, num_left: int | None
) -> tuple[list[Row], int]:
    """The row that has waited longest, with those after it in adjacent slots and of similar length. A prompt with
    images is fed alone, and at once.

    Args:
        filling: rows whose prefill is incomplete, at least one, the longest waiting first.
        device: of the target.
        chunk: the most tokens of a row; None for as many as a forward takes.
        num_left: the most tokens of several rows together; None likewise.

    Returns:
        The rows, and the most tokens that each is fed.
    """
    most_columns, most_tokens = (PREFILL_TOKENS if n is None else min(n, PREFILL_TOKENS) for n in (chunk, num_left))
    rows: list[Row] = []
    for row in filling:
        if row.num_media:
            if not rows:
                return [row], min(row.num_media, row.num_missing)
            break
        if rows and row.slot != rows[-1].slot + 1:
            break
        rows.append(row)
    wanted = [min(row.num_missing, most_columns) for row in rows]
    num_rows = num_together(wanted, device, most_tokens)
    return rows[:num_rows], max(wanted[:num_rows])
