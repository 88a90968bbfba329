"""Prompts: which rows the next forward feeds, and how far."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.decoding.batch import Row
from outrider.runtime.lm import PREFILL_TOKENS
from outrider.runtime.padding import num_together

PREFILL_CHUNK = 512
"""Tokens of prompts between two rounds, unless told otherwise."""


def next_forward(
    filling: Iterable[Row], device: torch.device, *, chunk: int | None, num_left: int | None
) -> tuple[list[Row], int]:
    """The row that has waited longest, with those after it that are in the next slots and of like length.

    Args:
        filling: rows whose prompts are incomplete, at least one, by how long they have waited.
        device: of the target.
        chunk: the most tokens of a row; None for as many as a forward takes.
        num_left: the most tokens of several rows together; None likewise.

    Returns:
        The rows, and how many tokens each is fed at most.
    """
    most_columns, most_tokens = (PREFILL_TOKENS if n is None else min(n, PREFILL_TOKENS) for n in (chunk, num_left))
    rows: list[Row] = []
    for row in filling:
        if rows and row.slot != rows[-1].slot + 1:
            break
        rows.append(row)
    wanted = [min(row.num_missing, most_columns) for row in rows]
    num_rows = num_together(wanted, device, most_tokens)
    return rows[:num_rows], max(wanted[:num_rows])
