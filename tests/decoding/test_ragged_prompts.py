"""Prompts of different lengths are fed without padding to the longest, and as if each were alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.batch import Row
from outrider.decoding.runner import next_forward
from outrider.runtime.lm import PREFILL_TOKENS
from toys import request

MOST_PADDING = 64  # on the CPU
QUARTER = PREFILL_TOKENS // 4


def _next(
    missing: list[int], slots: list[int] | None = None, chunk: int | None = None, num_left: int | None = None
) -> tuple[int, int]:
    """How many rows are fed together, and how far, of rows that lack so many tokens of their prompts."""
    filling = [Row(i, request([0] * (n + 1)), limit=n + 2, room=n + 2) for i, n in enumerate(missing)]
    for row, slot in zip(filling, slots or range(len(filling)), strict=True):
        row.slot = slot
    rows, width = next_forward(filling, torch.device("cpu"), chunk=chunk, num_left=num_left)
    assert rows == filling[: len(rows)]
    return len(rows), width


@pytest.mark.parametrize(
    ("missing", "options", "expected"),
    [
        ([100, 100, 100], {}, (3, 100)),
        ([100, 40, 30], {}, (2, 100)),  # padding: 60 for the second row, 70 would be for the third
        ([40, 60, 80, 102], {}, (3, 80)),  # 20 in one row, then 20 in two; 22 would be in three
        ([200, 20], {}, (1, 200)),
        ([20, 200], {}, (1, 20)),
        ([0, 0, 5], {}, (3, 5)),
        ([10, 10, 10], {"slots": [2, 3, 5]}, (2, 10)),  # only in slots next to one another
        ([10, 10], {"slots": [3, 2]}, (1, 10)),
        ([QUARTER] * 6, {}, (4, QUARTER)),  # no more than a forward takes
        ([3 * PREFILL_TOKENS, 5], {}, (1, PREFILL_TOKENS)),
        ([30, 30], {"chunk": 64, "num_left": 64}, (2, 30)),  # no more than is left for this round
        ([30, 30], {"chunk": 64, "num_left": 59}, (1, 30)),
        ([100, 100], {"chunk": 64, "num_left": 5}, (1, 64)),  # a row alone: else the last chunks would be small
    ],
)
def test_rows_of_like_length_share_a_forward(missing: list[int], options: dict, expected: tuple[int, int]) -> None:
    assert _next(missing, **options) == expected


@given(st.lists(st.integers(0, 600), min_size=1, max_size=20))
def test_a_row_adds_less_padding_than_a_forward_costs(missing: list[int]) -> None:
    num_rows, width = _next(missing)
    fed = missing[:num_rows]
    assert width == min(max(fed), PREFILL_TOKENS)
    assert num_rows * width - sum(min(n, width) for n in fed) <= MOST_PADDING * (num_rows - 1)
