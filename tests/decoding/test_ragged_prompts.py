"""Prompts of different lengths are fed without padding to the longest, and as if each were alone."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrids import hybrid, hybrid_lm
from outrider.decoding.batch import Row
from outrider.decoding.runner import next_forward
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.records import Request
from outrider.runtime.cache import STRIDE
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.sampling.rules import BLOCK
from toys import llama_pair, request, tokens

MOST_PADDING = 64  # on the CPU
FAR_APART = (150, 20, 230, 90, 1, 240, 160, 77)  # lengths of prompts in slots next to one another
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


def _count(patch: pytest.MonkeyPatch, lm: LM) -> Callable[[], int]:
    """Tokens fed to a model so far, padding included."""
    shapes: list[int] = []
    feed = LM._feed

    def counting(self: LM, ids: Tensor, *rest: object) -> object:
        shapes.append(ids.numel() if self is lm else 0)
        return feed(self, ids, *rest)

    patch.setattr(LM, "_feed", counting)
    return lambda: sum(shapes)


def _prompts(lengths: tuple[int, ...], num_tokens: int) -> list[Request]:
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(60, (n,), generator=rng).tolist() for n in lengths]
    return [request(ids, seed=i, max_new_tokens=num_tokens) for i, ids in enumerate(prompts)]


def test_every_token_is_fed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the target and to the draft nothing is padded where lengths are far apart; a model with states is fed whole
    strides before the first round, which feeds the rest of every row."""
    target, drafter = llama_pair()
    states = hybrid_lm(hybrid("qwen3_5_text"))
    given = [n - 1 for n in FAR_APART]
    # The round feeds each row's last token; the draft, for which there is nothing to draft, leaves short prompts.
    kept = [n for n in given if n > PREFILL_TOKENS // len(given)]
    rests = [n % STRIDE for n in given]
    of_states = sum(given) - sum(rests) + len(given) * (max(rests) + 1)
    for watched, num_tokens in ((target, sum(given) + len(given)), (drafter.lm, sum(kept)), (states, of_states)):
        with monkeypatch.context() as patch:
            num_fed = _count(patch, watched)
            run = (states, NO_DRAFTER) if watched is states else (target, drafter)
            tokens(*run, _prompts(FAR_APART, 1), BLOCK, 0 if watched is states else 4)
            assert num_fed() == num_tokens


@pytest.mark.parametrize("has_states", [False, True])
def test_texts_are_those_of_rows_alone(has_states: bool) -> None:
    """In float64."""
    pair: tuple[LM, Drafter] = (hybrid_lm(hybrid("qwen3_5_text")), NO_DRAFTER) if has_states else llama_pair()
    requests = _prompts(FAR_APART[:5], 12)
    assert tokens(*pair, requests, BLOCK, 4) == [tokens(*pair, [one], BLOCK, 4)[0] for one in requests]
