"""Rows of different lengths: which of them share a forward, and which are fed alone.

Several rows in one forward are padded to the longest of them, and padding takes as long as tokens do. In return, a
forward takes some time however few tokens it feeds: to read the weights, and to call the operations. So a row joins
others only where this adds less padding than a forward of its own would cost.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.runtime.lm import PREFILL_TOKENS


def num_together(lengths: Iterable[int], device: torch.device, most_tokens: int = PREFILL_TOKENS) -> int:
    """How many rows, from the first on, are to share a forward; at least one.

    Args:
        lengths: tokens to feed of each row.
        device: of the model.
        most_tokens: of several rows together, padding included.
    """
    most_padding = _padding_worth_a_forward(device)
    num_rows = width = 0
    for length in lengths:
        wider = max(width, length)
        num_added = (wider - width) * num_rows + wider - length
        if num_rows and (wider * (num_rows + 1) > most_tokens or num_added > most_padding):
            break
        num_rows, width = num_rows + 1, wider
    return num_rows


def _padding_worth_a_forward(device: torch.device) -> int:
    """Tokens that take as long as a forward takes beside its tokens. On a two-core Xeon 50 to 70, for targets of 6M and
    110M parameters (docs/log/2026.md). On a GPU by its arithmetic for each byte from memory, not measured."""
    return 64 if device.type == "cpu" else 256
