"""Models with states: what the loop generates with them is what Hugging Face's `generate` does, and what they generate
alone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import toys
from hybrids import FAMILIES, V, hybrid, hybrid_lm
from languages import Remainders
from outrider.decoding.engine import Engine, decode
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.measure.teacher_forcing import Text, force
from outrider.records import Request, Round, Stats
from outrider.runtime import cache_layers, cache_shapes
from outrider.runtime.cache import STRIDE, SlotCache
from outrider.runtime.cache_shapes import WINDOW
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION
from toys import as_lm, perturbed, request, run, table_lm, tiny_llama, tokens

NUM_TOKENS = 16
PROMPTS = [(5, 9, 11, 3, 44), (1,), (7, 8) * 12, tuple(range(20, 41))]


def _families(*quick: str) -> pytest.MarkDecorator:
    """All families and these; the others are slow."""
    names = [*FAMILIES, *(name for name in quick if name not in FAMILIES)]
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "name", [name if name in quick else pytest.param(name, marks=slow) for name in names]
    )


@cache
def _expected(name: str) -> list[tuple[int, ...]]:
    """Hugging Face's greedy texts, with the cache that it takes by default."""
    model, texts = hybrid(name), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
        texts.append(tuple(text[0, len(prompt) :].tolist()))
    return texts


def _pair(name: str) -> tuple[LM, Drafter]:
    """A model with states, and itself with perturbed weights as the draft."""
    model = hybrid(name)
    return hybrid_lm(model), model_drafter(hybrid_lm(perturbed(model, 0.03), "draft"))


def _greedy(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [request(prompt, temperature=0.0, max_new_tokens=NUM_TOKENS) for prompt in prompts]


def _texts(rounds: Iterable[Round], num_rows: int) -> list[tuple[int, ...]]:
    texts: list[tuple[int, ...]] = [()] * num_rows
    for round_ in rounds:
        for row in round_.rows:
            texts[row.row] += row.token_ids
    return texts


@pytest.mark.each_execution
@_families("qwen3_5_text", "lfm2")
def test_text_is_that_of_generate_and_of_plain_decoding(name: str) -> None:
    """Greedy and plain, with a draft that has states as well, and with one that has none; sampled under ``gumbel``."""
    target, close = _pair(name)
    expected = _expected(name)
    assert len(set(sum(expected, ()))) > 20, "a text this dull would show no error"
    for drafter in (NO_DRAFTER, close, model_drafter(as_lm(tiny_llama(3, vocab_size=V), "far draft"))):
        outputs = run(target, drafter, _greedy(), BLOCK, 3)
        assert [output.token_ids for output in outputs] == expected
        if drafter is close:
            stats = sum((output.stats for output in outputs), Stats())
            assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    sampled = [request(prompt, seed=i, max_new_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]
    assert tokens(target, close, sampled, GUMBEL, 4) == tokens(target, NO_DRAFTER, sampled, GUMBEL, 0)


@pytest.mark.each_execution
def test_constraints_and_penalties() -> None:
    """Drafts are made one by one then. Greedy and sampled rows in two slots, one without a constraint."""
    target, drafter = _pair("qwen3_5_text")

    def requests() -> list[Request]:
        penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 9, "stop_token_ids": (3, 4)}
        options = {"temperature": 0.0}, penalties
        made = [request(ids, seed=i, max_new_tokens=12, **options[i % 2]) for i, ids in enumerate(PROMPTS)]
        return [replace(one, constraint=Remainders(V)) if i != 2 else one for i, one in enumerate(made)]

    expected = tokens(target, NO_DRAFTER, requests(), GUMBEL, 0)
    assert _texts(decode(target, drafter, requests(), GUMBEL, num_draft_tokens=4, num_slots=2), 4) == expected


@pytest.mark.each_execution
def test_few_steps_are_recorded_for_a_constrained_row() -> None:
    """Its drafts move states that have fixed places."""
    target, drafter = _pair("qwen3_5_text")
    if not target.execution.is_prepared:
        pytest.skip("nothing is prepared")
    for seed in range(2):
        one = request(PROMPTS[0], seed=seed, max_new_tokens=60)
        tokens(target, drafter, [replace(one, constraint=Remainders(V))], GUMBEL, 3)
    steps = [key for lm in (target, drafter.lm) for key in lm.execution._programs]  # type: ignore[attr-defined]
    assert 0 < len(steps) <= 24


def test_plain_steps_are_recorded_one_token_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding is never behind its text."""
    monkeypatch.setattr(toys, "execution", CapturedExecution)
    target = hybrid_lm(hybrid("qwen3_5_text"))
    assert target.mixers  # found by a forward of their own
    widths: list[int] = []
    feed = LM._feed
    monkeypatch.setattr(LM, "_feed", lambda self, ids, *rest: widths.append(ids.shape[1]) or feed(self, ids, *rest))
    tokens(target, NO_DRAFTER, [request(range(1, 10), max_new_tokens=12)], BLOCK, 0)
    assert widths[0] == STRIDE and set(widths[1:]) == {1}


def test_a_row_that_is_not_finite_leaves_no_state_behind() -> None:
    """Nor does one that was cancelled in the middle of its prompt. A token whose embedding is NaN spoils all that
    follow it."""
    model = hybrid("qwen3_5_text", tie_word_embeddings=False)
    draft = perturbed(model, 0.03)
    target, drafter = hybrid_lm(model), model_drafter(hybrid_lm(draft, "draft"))
    for spoilt in (model, draft):
        spoilt.get_input_embeddings().weight[V - 1] = torch.nan
    options = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "logit_bias": {V - 1: -1e3}}
    good = [request(prompt, **options) for prompt in PROMPTS]
    expected = tokens(target, NO_DRAFTER, good, BLOCK, 0)
    engine = Engine(target, drafter, BLOCK, num_slots=2, capacity=100, schedule=ConstantSchedule(3), prefill_chunk=9)
    bad = request((*PROMPTS[2][:5], V - 1, *PROMPTS[2][5:]), max_new_tokens=NUM_TOKENS)
    for one in (bad, good[0], bad, bad, *good[1:]):
        engine.submit(one)
    rounds: list[Round] = []
    for round_ in iter(engine.step, None):
        rounds.append(round_)
        if len(rounds) == 2:
            engine.cancel(2)
    errors = {row.row for round_ in rounds for row in round_.rows if row.error is not None}
    assert errors in ({0, 3}, {0, 2, 3})
    _, first, _, _, *others = _texts(rounds, 7)
    assert [first, *others] == expected


def _conversation(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The text of one request, and how many tokens of its prompt were found in a cache."""
    engine.submit(request(prompt, temperature=0.0, max_new_tokens=NUM_TOKENS))
    rows = [row for round_ in iter(engine.step, None) for row in round_.rows]
    return [i for row in rows for i in row.token_ids], sum(row.num_cached_tokens for row in rows)


def test_a_text_that_goes_on_reuses_the_states() -> None:
    """As a conversation does. A prompt that leaves the cached text before its anchor cannot; it is fed from the
    start."""
    target, drafter = _pair("qwen3_5_text")
    engine = Engine(target, drafter, BLOCK, num_slots=2, capacity=150, schedule=ConstantSchedule(3))
    first = [*PROMPTS[2]]
    text, num_cached = _conversation(engine, first)
    assert num_cached == 0
    second = [*first, *text, 3, 4, 5]
    anchor = int(engine._runner.cache.anchors.amax())
    text, num_cached = _conversation(engine, second)
    assert num_cached == anchor >= len(first)
    prompts, texts = [[*first, 9], [*second, *text, 6]], [tuple(text)]
    for prompt, is_found in zip(prompts, (False, True), strict=True):
        text, num_cached = _conversation(engine, prompt)
        assert num_cached == 0 if not is_found else num_cached >= len(second)
        texts.append(tuple(text))
    assert texts == tokens(target, NO_DRAFTER, _greedy([second, *prompts]), BLOCK, 0)


def test_tokens_after_the_anchor_are_not_reported_as_cached() -> None:
    """They are fed again: a row that is cancelled leaves its anchor behind the tokens that the next prompt shares."""
    target, drafter = _pair("qwen3_5_text")
    engine = Engine(target, drafter, BLOCK, num_slots=1, capacity=150, schedule=ConstantSchedule(3))
    prompt, num_behind = [*PROMPTS[2], *PROMPTS[3]], 0
    for num_rounds in (2, 3, 4):
        index = engine.submit(request(prompt, temperature=0.0, max_new_tokens=60))
        rounds = [engine.step() for _ in range(num_rounds)]
        engine.cancel(index)
        assert engine.step() is None
        held, anchor = engine._slots.num_held(0), int(engine._runner.cache.anchors[0])
        prompt += [i for round_ in rounds for i in round_.rows[0].token_ids]
        num_behind += held - anchor
        again, num_cached = _conversation(engine, [*prompt, 9])
        assert num_cached == anchor and again
    assert num_behind > 0


def test_inputs_of_convolutions_need_no_anchor() -> None:
    """They can be taken back by some tokens, and by no more. A prompt that leaves a cached text so late reuses it."""
    target, drafter = _pair("lfm2")
    engine = Engine(target, drafter, BLOCK, num_slots=2, capacity=200, schedule=ConstantSchedule(3))
    first = [*PROMPTS[2], *PROMPTS[3]] * 3
    text, _ = _conversation(engine, first)
    for num_shared, is_found in ((len(first), True), (len(first) - 10, True), (len(first) - WINDOW, False)):
        prompt = [*first[:num_shared], 9]
        text, num_cached = _conversation(engine, prompt)
        assert [tuple(text)] == tokens(target, NO_DRAFTER, _greedy([prompt]), BLOCK, 0)
        assert num_cached == (num_shared if is_found else 0)
    with pytest.raises(OptionError, match=f"num_draft_tokens = {WINDOW} is invalid: target has layers whose inputs"):
        tokens(target, ngram_drafter(), _greedy([first]), BLOCK, WINDOW)


def test_places_of_inputs_that_are_used_again_too_early_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with fewer of them, rejected tokens are written over what a convolution still sees."""
    for module in (cache_layers, cache_shapes):
        monkeypatch.setattr(module, "WINDOW", 8)
    assert _distance(hybrid_lm(hybrid("lfm2"))) > 1e-2


@torch.inference_mode()
def _distance(lm: LM) -> float:
    """How far the logits of ragged blocks are from one full forward, relative to the largest. Each block is fed with
    other tokens first, which are rejected."""
    ids = torch.randint(V, (3, 70), generator=torch.Generator().manual_seed(0))
    full = lm.model(input_ids=ids, use_cache=False).logits
    cache, distance = lm.new_cache(3, 70), 0.0
    done = torch.tensor([20, 0, 9])
    lm.prefill(ids, torch.zeros_like(done), done, cache, latest=0, num_columns=20)
    for widths in torch.tensor(
        [[5, 1, 8], [1, 0, 2], [0, 4, 1], [3, 3, 3], [7, 1, 0], [9, 9, 9], [2, 20, 2], [1, 1, 1]]
    ):
        if cache.has_states:
            lm.advance(cache, done)
            assert bool((done - cache.anchors < STRIDE).all())
        assert bool((cache.anchors <= done).all())
        offsets = torch.arange(int(widths.max()))
        positions = torch.where(offsets < widths[:, None], done[:, None] + offsets, -1)
        tokens_fed = ids.gather(1, positions.clamp_min(0))
        view_len = lm.view_len(int(positions.max()) + 1, cache)
        lm.forward((tokens_fed + 1) % V, positions, cache, view_len)
        cache.settle(done)
        logits = lm.forward(tokens_fed, positions, cache, view_len)
        done = done + widths
        cache.settle(done)
        rows = full[torch.arange(3)[:, None], positions.clamp_min(0)]
        distance = max(distance, (logits - rows)[positions >= 0].abs().max().item())
    return distance / full.abs().max().item()


@_families("qwen3_5_text", "lfm2", "falcon_h1", "kimi_linear", "jamba")
def test_ragged_blocks_equal_one_full_forward(name: str) -> None:
    assert _distance(hybrid_lm(hybrid(name))) < 1e-4


def test_a_model_of_convolutions_alone() -> None:
    """Transformers' own cache cannot serve it, as it keeps no length."""
    lm = hybrid_lm(hybrid("lfm2", layer_types=["conv"] * 4))
    assert _distance(lm) < 1e-4


def test_a_state_that_keeps_rejected_tokens_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: every state stays."""
    lm = hybrid_lm(hybrid("qwen3_5_text"))
    settle = SlotCache.settle
    monkeypatch.setattr(SlotCache, "settle", lambda cache, num: settle(cache, num + 1))
    assert _distance(lm) > 1e-2


def test_teacher_forcing_feeds_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, of texts of different lengths."""
    lm = hybrid_lm(hybrid("qwen3_5_text"))
    assert lm.mixers  # found by a forward of their own
    widths: list[int] = []
    feed = LM._feed
    monkeypatch.setattr(LM, "_feed", lambda self, ids, *rest: widths.append(ids.shape[1]) or feed(self, ids, *rest))
    ids = torch.randint(V, (2, 250), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        full = lm.model(input_ids=ids, use_cache=False).logits
    forced = list(force(lm, [Text(ids[0, :240].tolist()), Text(ids[1].tolist())]))
    assert len(forced) > 1 and sum(widths) == 249
    for row, length in ((0, 240), (1, 250)):
        logits = torch.cat([one.logits[one.rows == row] for one in forced])
        torch.testing.assert_close(logits, full[row, : length - 1], rtol=1e-5, atol=1e-5)


def test_slots_move_their_states() -> None:
    lm = hybrid_lm(hybrid("qwen3_5_text"))
    cache = lm.new_cache(3, 40)
    ids = torch.randint(V, (3, 40), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([19, 0, 8])
    lm.prefill(ids, torch.zeros_like(ends), ends, cache, latest=0, num_columns=19)
    assert cache.anchors.tolist() == [16, 0, 8]
    assert [cache.take_over(0, n) for n in (15, 16, 19)] == [0, 16, 19]
    cache.copy(0, 1, 19)
    for store in cache.storage[cache.num_token_stores :]:
        assert torch.equal(store[0], store[1]) and bool(store[0].any())
    cache.copy(0, 0, 3)  # another text begins like this one
    cache.erase(1, 17)
    cache.erase(2, 7)
    assert cache.anchors.tolist() == [0, 16, 0]
    for store in cache.storage[cache.num_token_stores :]:
        assert not store[0].any() and not store[2].any() and bool(store[1].any())


# Numbers that are not finite.


def _spoilt(lm: LM, token_id: int) -> LM:
    """Target with NaN after a token and all that attend to it. (Probed before: with broken weights there is nothing to
    compare.)"""
    lm.model.get_input_embeddings().weight.data[token_id] = torch.nan
    return lm


@_families("qwen3_5_text", "zaya")
def test_a_place_does_not_depend_on_later_tokens(name: str) -> None:
    """Scans work through chunks of tokens, by products in which later tokens are masked by zeros: 0 times NaN is NaN.
    Tokens that replace the rejected ones are not spoilt either, nor is another row."""
    lms = [hybrid_lm(hybrid(name)) for _ in range(2)]
    _spoilt(lms[0], 5)
    caches = [lm.new_cache(2, 64) for lm in lms]
    has_experts = any("experts" in parameter for parameter, _ in lms[0].model.named_parameters())

    def logits(ids: Sequence[Sequence[int]], first: int, num_committed: int) -> list[Tensor]:
        positions = torch.arange(first, first + len(ids[0])).expand(2, -1)
        given = torch.tensor(ids), positions
        found = [lm.forward(*given, own, 64, keeps_finite=True) for lm, own in zip(lms, caches, strict=True)]
        for own in caches:
            own.settle(torch.tensor([num_committed] * 2))
        return found

    def assert_equal(got: Tensor, want: Tensor) -> None:
        # Experts multiply the tokens that come to them together, so that their rounding depends on the others.
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 if has_experts else 1e-12)

    with torch.inference_mode():
        logits([range(6, 6 + STRIDE + 3)] * 2, 0, STRIDE + 3)
        got, want = logits([[1, 2, 5, 3, 4], [1, 2, 7, 3, 4]], STRIDE + 3, STRIDE + 5)
        assert got[0, 2:].isnan().all()
        assert_equal(got[0, :2], want[0, :2])
        assert_equal(got[1], want[1])
        assert_equal(*logits([[4, 3, 8]] * 2, STRIDE + 5, STRIDE + 8))


@pytest.mark.each_execution
def test_a_place_behind_a_rejected_token_ends_no_text() -> None:
    """The draft proposes a token that the target never takes, and gives NaN after. Plain decoding takes the text to its
    limit, and so must speculation."""
    bad = _spoilt(hybrid_lm(hybrid("qwen3_5_text")), 5)
    options = dict(max_new_tokens=12, logit_bias={5: -60.0})
    requests = [request((1, 2, 3), seed=seed, **options) for seed in range(2)]
    table = torch.eye(V, dtype=torch.float64)[5] * 64.0  # against the bias, which it is given as well
    likes_it = model_drafter(table_lm(table.expand(V, V).clone()))
    plain = tokens(bad, NO_DRAFTER, requests, GUMBEL, 0)
    assert all(len(text) == 12 and 5 not in text for text in plain)
    assert tokens(bad, likes_it, requests, GUMBEL, 4) == plain
    for rule in (REJECTION, BLOCK):
        assert [len(text) for text in tokens(bad, likes_it, requests, rule, 4)] == [12, 12]
