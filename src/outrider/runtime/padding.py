"""Choice of rows, of different lengths, that share a forward.

Rows of one forward are padded to the longest, and padding costs as much as tokens. But each forward has a fixed cost,
however few tokens it feeds: reading the weights and calling the operations. So a row joins others only where the
padding costs less than a forward of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.runtime.lm import PREFILL_TOKENS


def num_together(lengths: Iterable[int], device: torch.device, most_tokens: int = PREFILL_TOKENS) -> int:
    """Number of rows, from the first on, that should share a forward; at least one. ``lengths`` are the tokens to feed
    of each row; several have at most ``most_tokens`` together, padding included."""
    # Tokens that cost as much as the fixed part of a forward: 50 to 70 on a two-core Xeon, for targets of 6M and 110M
    # parameters (docs/internals/log/2026.md). For GPUs estimated from arithmetic per byte of memory traffic.
    most_padding = 64 if device.type == "cpu" else 256
    num_rows = width = 0
    for length in lengths:
        wider = max(width, length)
        num_added = (wider - width) * num_rows + wider - length
        if num_rows and (wider * (num_rows + 1) > most_tokens or num_added > most_padding):
            break
        num_rows, width = num_rows + 1, wider
    return num_rows
