"""The slot cache: after every round it holds what one fresh forward of the committed text would have put there."""

import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from outrider.decoding.batch import Row
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.drafters.base import Drafter
from outrider.drafters.model import ModelSession, WindowSession, window_start
from outrider.records import Request
from outrider.runtime import lm as lm_module
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.runtime.modules import cache_of
from outrider.sampling.rules import RULES, Rule
from toys import InTurn, as_lm, llama_pair, request, tiny_llama

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 12, tuple(range(40))]
NUM_TOKENS = [20, 15, 8, 30]


def _assert_holds(lm: LM, cache: SlotCache, row: int, ids: Sequence[int]) -> None:
    """The first places of a row hold the keys and values of these tokens, to 1e-12."""
    if not ids:
        return
    with torch.inference_mode():
        fresh = cache_of(lm.model(torch.tensor([list(ids)]), use_cache=True))
        assert len(fresh.layers) == len(cache.argument.layers) > 0
        for ours, theirs in zip(cache.argument.layers, fresh.layers, strict=True):
            for store, states in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                held = store[row, : len(ids)].transpose(0, 1)  # [H, T, D]
                torch.testing.assert_close(held, states[0], rtol=0.0, atol=1e-12)


def _engine(target: LM, drafter: Drafter, rule: Rule, schedule: Schedule, num_slots: int = 4) -> Engine:
    return Engine(target, drafter, rule, num_slots=num_slots, capacity=128, schedule=schedule, prefill_chunk=None)


def _open_rows(engine: Engine, requests: list[Request]) -> Iterator[list[Row]]:
    """After each round the rows that generate."""
    for one in requests:
        engine.submit(one)
    while engine.step() is not None:
        yield engine._batch.running


def _assert_draft_holds(engine: Engine, lm: LM, row: Row) -> int:
    """As many committed tokens as it counts; gives their number."""
    session = engine._runner.session
    assert isinstance(session, ModelSession)
    num_cached = min(int(session._cached[row.slot]), row.length - 1)
    _assert_holds(lm, session._cache, row.slot, row.token_ids[:num_cached])
    return num_cached


def _requests() -> list[Request]:
    return [request(ids, seed=i, max_new_tokens=NUM_TOKENS[i]) for i, ids in enumerate(PROMPTS)]


@pytest.mark.parametrize(("rule", "k", "num_slots", "is_pausing"), [("block", 4, 2, False), ("gumbel", 1, 4, True)])
def test_both_caches_hold_the_committed_text_after_every_round(
    rule: str, k: int, num_slots: int, is_pausing: bool
) -> None:
    """Four ragged rows that end at different times, all at once and in two slots. The target's cache holds all
    committed tokens but the last, the draft's as many of them as it counts."""
    target, drafter = llama_pair()
    schedule = InTurn(0, 0, k, k) if is_pausing else ConstantSchedule(k)
    engine = _engine(target, drafter, RULES[rule], schedule, num_slots)
    num_behind = set()
    for rows in _open_rows(engine, _requests()):
        for row in rows:
            _assert_holds(target, engine._runner.cache, row.slot, row.token_ids[:-1])
            num_behind.add(row.length - 1 - _assert_draft_holds(engine, drafter.lm, row))
    # After a rejection nothing is owed but the last token, after a full acceptance one more.
    assert num_behind >= {0, 1}
    assert is_pausing or num_behind == {0, 1}


def test_a_draft_of_shorter_context_keeps_its_window() -> None:
    """Its cache holds the window of each row that was just drafted for, from position 0 on, while windows begin anew
    and prompts are longer than the context."""
    target, drafter = llama_pair(draft_context_len=16)
    engine = _engine(target, drafter, RULES["block"], ConstantSchedule(4))
    session = engine._runner.session
    assert isinstance(session, WindowSession) and isinstance(session._inner, ModelSession)
    starts = set()
    for rows in _open_rows(engine, _requests()):
        for row in rows:
            start = session._starts[row.slot]
            starts.add(start)
            num_cached = min(int(session._inner._cached[row.slot]), row.length - 1 - start)
            assert 0 <= num_cached <= 16
            ids = row.token_ids[start : start + num_cached]
            _assert_holds(drafter.models[0], session._inner._cache, row.slot, ids)
    assert starts == {0, 8, 16, 24, 32, 40, 48, 56}


def test_windows_follow_from_the_length() -> None:
    """They hold the last tokens, at most the context, more than half of it once there are tokens before; and seldom
    move."""
    for context_len in (1, 2, 3, 16, 17):
        starts = [window_start(length, context_len) for length in range(1, 100)]
        for length, start in enumerate(starts, 1):
            assert length - start <= context_len
            assert start == 0 if length <= context_len else length - start > context_len // 2
        assert starts == sorted(starts)
        assert len(set(starts)) <= 2 + 100 // ((context_len + 1) // 2)


def test_slots_are_views_copies_and_zeros() -> None:
    """No second cache is made of a slot."""
    cache = as_lm(tiny_llama()).new_cache(3, 10)
    for store in cache.storage:
        store.copy_(torch.arange(store.numel()).reshape(store.shape))
    view = cache.rows(1, 3)
    assert view.capacity == cache.capacity
    for part, whole in zip(view.storage, cache.storage, strict=True):
        assert part.data_ptr() == whole[1].data_ptr() and part.is_contiguous()
    before = [store.clone() for store in cache.storage]
    cache.copy(0, 2, 4)
    for store, old in zip(cache.storage, before, strict=True):
        assert torch.equal(store[2, :4], old[0, :4]) and torch.equal(store[2, 4:], old[2, 4:])
        assert torch.equal(store[:2], old[:2])
    cache.erase(1)
    assert all(store[1].abs().sum() == 0 < store[0].abs().sum() for store in cache.storage)


# The forward itself.


def _random_ids(num_rows: int, length: int) -> Tensor:
    return torch.randint(60, (num_rows, length), generator=torch.Generator().manual_seed(0))


def _forward_ragged(lm: LM, ids: Tensor, cache: SlotCache, starts: Tensor, widths: Tensor) -> Tensor:
    """Feed ``widths`` tokens of each row from ``starts`` on, padded on the right. -> logits [B, T, V]"""
    offsets = torch.arange(int(widths.max()))
    positions = torch.where(offsets < widths[:, None], starts[:, None] + offsets, -1)
    columns = (starts[:, None] + offsets).clamp_max(ids.shape[1] - 1)
    return lm.forward(ids.gather(1, columns), positions, cache, lm.view_len(int(positions.max()) + 1, cache))


def test_a_cache_is_freed_when_it_is_let_go() -> None:
    """At once, not when the garbage collector comes by: on a GPU it is gigabytes, for each request."""
    target = LM(tiny_llama(), name="target", vocab_size=60, context_len=64)
    cache = target.new_cache(1, 64)
    target.forward(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache, 2)
    keys = weakref.ref(cache.argument.layers[0].keys)
    gc.disable()
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("chunk", [5, 512])
def test_prefill_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From ragged starts to ragged ends, whatever the chunk; a row with nothing to do stays as it is."""
    monkeypatch.setattr(lm_module, "PREFILL_TOKENS", chunk)
    lm = as_lm(tiny_llama())
    ids, cache = _random_ids(4, 70), lm.new_cache(4, 70)
    middles, ends = torch.tensor([3, 0, 12, 70]), torch.tensor([20, 0, 66, 70])
    lm.prefill(ids, torch.zeros(4, dtype=torch.long), middles, cache, latest=0, num_columns=70)
    lm.prefill(ids, middles, ends, cache, latest=70, num_columns=54)
    for row, end in enumerate(ends.tolist()):
        _assert_holds(lm, cache, row, ids[row, :end].tolist())
