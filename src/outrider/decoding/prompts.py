"""Prompts: which rows the next forward feeds, and how far.

Several rows in one forward are padded to the longest of them, and padding takes as long as tokens do. In return, a
forward takes some time however few tokens it feeds: to read the weights, and to call the operations. So a row joins
others only where this adds less padding than a forward of its own would cost.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.decoding.batch import Row
from outrider.runtime.lm import PREFILL_TOKENS

PREFILL_CHUNK = 512
"""Tokens of prompts between two rounds, unless told otherwise."""


def next_forward(
    filling: Iterable[Row], device: torch.device, *, chunk: int | None, num_left: int | None
) -> tuple[list[Row], int]:
    """The row that has waited longest, with those after it that are in the next slots and fit.

    Args:
        filling: rows whose prompts are incomplete, at least one, by how long they have waited.
        device: of the target.
        chunk: the most tokens of a row; None for as many as a forward takes.
        num_left: the most tokens of several rows together; None likewise.

    Returns:
        The rows, and how many tokens each is fed at most.
    """
    most_columns, most_tokens = (PREFILL_TOKENS if n is None else min(n, PREFILL_TOKENS) for n in (chunk, num_left))
    most_padding = _padding_worth_a_forward(device)
    rows: list[Row] = []
    width = 0
    for row in filling:
        num_wanted = min(row.num_missing, most_columns)
        wider = max(width, num_wanted)
        num_added = (wider - width) * len(rows) + wider - num_wanted
        fits = wider * (len(rows) + 1) <= most_tokens and num_added <= most_padding
        if rows and not (fits and row.slot == rows[-1].slot + 1):
            break
        rows.append(row)
        width = wider
    return rows, width


def _padding_worth_a_forward(device: torch.device) -> int:
    """Tokens that take as long as a forward takes beside its tokens. On a two-core Xeon 40 to 60 for a target of 110M
    parameters, 65 for one of 6M (docs/log.md). On a GPU, by its arithmetic for each byte from memory; not measured."""
    return 64 if device.type == "cpu" else 256
