"""Prompts of different lengths are fed without padding to the longest, and as if each were alone."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrids import hybrid, hybrid_lm
from outrider.decoding.batch import Row
from outrider.decoding.engine import Engine
from outrider.decoding.runner import next_forward
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.records import Request
from outrider.runtime.cache import STRIDE
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.sampling.rules import BLOCK
from toys import InTurn, llama_pair, request, tokens

MOST_PADDING = 64  # on the CPU
FAR_APART = (150, 20, 230, 90, 1, 240, 160, 77)  # lengths of prompts in slots next to one another


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


def test_rows_of_like_length_share_a_forward() -> None:
    assert _next([100, 100, 100]) == (3, 100)
    assert _next([100, 40, 30]) == (2, 100)  # padding: 60 for the second row, 70 would be for the third
    assert _next([40, 60, 80, 102]) == (3, 80)  # 20 in one row, then 20 in two; 22 would be in three
    assert _next([200, 20]) == (1, 200) and _next([20, 200]) == (1, 20)
    assert _next([0, 0, 5]) == (3, 5)
    # Only in slots next to one another.
    assert _next([10, 10, 10], [2, 3, 5]) == (2, 10) and _next([10, 10], [3, 2]) == (1, 10)
    # No more than a forward takes.
    assert _next([PREFILL_TOKENS // 4] * 6) == (4, PREFILL_TOKENS // 4)
    assert _next([3 * PREFILL_TOKENS, 5]) == (1, PREFILL_TOKENS)


def test_no_more_than_is_left_for_this_round() -> None:
    """But a row that is alone may be fed a whole chunk, as otherwise the last ones would be small."""
    assert _next([30, 30], chunk=64, num_left=64) == (2, 30) and _next([30, 30], chunk=64, num_left=59) == (1, 30)
    assert _next([100, 100], chunk=64, num_left=5) == (1, 64)


@given(st.lists(st.integers(0, 600), min_size=1, max_size=20))
def test_a_row_adds_less_padding_than_a_forward_costs(missing: list[int]) -> None:
    num_rows, width = _next(missing)
    fed = missing[:num_rows]
    assert width == min(max(fed), PREFILL_TOKENS)
    assert num_rows * width - sum(min(n, width) for n in fed) <= MOST_PADDING * (num_rows - 1)


def _count(monkeypatch: pytest.MonkeyPatch, lm: LM) -> Callable[[], int]:
    """Tokens fed to a model so far, padding included."""
    shapes: list[int] = []
    feed = LM._feed

    def counting(self: LM, ids: Tensor, *rest: object) -> object:
        if self is lm:
            shapes.append(ids.numel())
        return feed(self, ids, *rest)

    monkeypatch.setattr(LM, "_feed", counting)
    return lambda: sum(shapes)


def _prompts(lengths: tuple[int, ...], num_tokens: int) -> list[Request]:
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(60, (n,), generator=rng).tolist() for n in lengths]
    return [request(ids, seed=i, max_new_tokens=num_tokens) for i, ids in enumerate(prompts)]


def test_every_token_is_fed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the target and to the draft: nothing is padded where lengths are far apart."""
    target, drafter = llama_pair()
    given = [n - 1 for n in FAR_APART]
    # The round feeds each row's last token; the draft, for which there is nothing to draft, leaves short prompts.
    kept = [n for n in given if n > PREFILL_TOKENS // len(given)]
    for lm, num_tokens in ((target, sum(given) + len(given)), (drafter.lm, sum(kept))):
        with monkeypatch.context() as patch:
            num_fed = _count(patch, lm)
            tokens(target, drafter, _prompts(FAR_APART, 1), BLOCK, 4)
            assert num_fed() == num_tokens


def test_every_token_is_fed_once_to_a_model_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole strides before the first round, which feeds the rest of every row."""
    lm = hybrid_lm(hybrid("qwen3_5_text"))
    num_fed = _count(monkeypatch, lm)
    tokens(lm, NO_DRAFTER, _prompts(FAR_APART, 1), BLOCK, 0)
    rests = [(n - 1) % STRIDE for n in FAR_APART]
    assert num_fed() == sum(n - 1 for n in FAR_APART) - sum(rests) + len(FAR_APART) * (max(rests) + 1)


def test_a_draft_catches_up_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that joined while nothing was drafted."""
    target, drafter = llama_pair()
    engine = Engine(target, drafter, BLOCK, num_slots=4, capacity=256, schedule=InTurn(0, 0, 4), prefill_chunk=None)
    engine.submit(request([1, 2, 3], max_new_tokens=8))
    engine.step()
    num_fed = _count(monkeypatch, drafter.lm)
    lengths = FAR_APART[:3]
    for one in _prompts(lengths, 8):
        engine.submit(one)
    engine.step()
    num_rows = 1 + len(lengths)
    assert num_fed() == 3 + sum(n - 1 for n in lengths) + 4 * num_rows  # the first row's text; and the drafts


@pytest.mark.parametrize("has_states", [False, True])
def test_texts_are_those_of_rows_alone(has_states: bool) -> None:
    """In float64."""
    target, drafter = llama_pair()
    by_model: Drafter = drafter
    if has_states:
        target, by_model = hybrid_lm(hybrid("qwen3_5_text")), NO_DRAFTER
    requests = _prompts(FAR_APART[:5], 12)
    together = tokens(target, by_model, requests, BLOCK, 4)
    assert together == [tokens(target, by_model, [one], BLOCK, 4)[0] for one in requests]
