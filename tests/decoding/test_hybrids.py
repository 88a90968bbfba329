"""Models with states generate what Hugging Face's `generate` does, and what they generate alone."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybrids import FAMILIES, V, hybrid, hybrid_lm
from languages import Remainders
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.records import Request, Stats
from outrider.runtime import cache_layers, cache_shapes
from outrider.runtime.cache import STRIDE, SlotCache
from outrider.runtime.cache_shapes import WINDOW
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL
from toys import as_lm, perturbed, request, run, tiny_llama, tokens

NUM_TOKENS = 16
PROMPTS = [(5, 9, 11, 3, 44), (1,), (7, 8) * 12, tuple(range(20, 41))]


def _families(*quick: str) -> pytest.MarkDecorator:
    names = dict.fromkeys((*FAMILIES, *quick))
    marks = [pytest.param(one, marks=[] if one in quick else [pytest.mark.slow]) for one in names]
    return pytest.mark.parametrize("name", marks)


def _pair(name: str) -> tuple[LM, Drafter]:
    model = hybrid(name)
    return hybrid_lm(model), model_drafter(hybrid_lm(perturbed(model, 0.03), "draft"))


def _greedy(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [request(prompt, temperature=0.0, max_new_tokens=NUM_TOKENS) for prompt in prompts]


@pytest.mark.each_execution
@_families("qwen3_5_text", "lfm2")
def test_text_is_that_of_generate_and_of_plain_decoding(name: str) -> None:
    """Greedy and plain, with a draft that has states as well, and with one that has none; sampled under ``gumbel``."""
    target, close = _pair(name)
    expected = []  # with the cache that Hugging Face takes by default
    for ids in (torch.tensor([prompt]) for prompt in PROMPTS):
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        expected.append(tuple(hybrid(name).generate(ids, **how)[0, ids.shape[1] :].tolist()))
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
    """Drafts are made one by one then. Greedy and sampled rows, one without a constraint."""
    target, drafter = _pair("qwen3_5_text")

    def requests() -> list[Request]:
        penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 9, "stop_token_ids": (3, 4)}
        options = {"temperature": 0.0}, penalties
        made = [request(ids, seed=i, max_new_tokens=12, **options[i % 2]) for i, ids in enumerate(PROMPTS)]
        return [replace(one, constraint=Remainders(V)) if i != 2 else one for i, one in enumerate(made)]

    assert tokens(target, drafter, requests(), GUMBEL, 4) == tokens(target, NO_DRAFTER, requests(), GUMBEL, 0)


def _conversation(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The text of one request, and how many tokens of its prompt were found in a cache."""
    engine.submit(request(prompt, temperature=0.0, max_new_tokens=NUM_TOKENS))
    rows = [row for round_ in iter(engine.step, None) for row in round_.rows]
    return [i for row in rows for i in row.token_ids], sum(row.num_cached_tokens for row in rows)


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


@torch.inference_mode()
def _distance(lm: LM) -> float:
    """How far the logits of ragged blocks, after rejected ones, are from one full forward, relative to the largest."""
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
    """Also in a model of convolutions alone, which Transformers' own cache cannot serve, as it keeps no length."""
    assert _distance(hybrid_lm(hybrid(name))) < 1e-4
    assert name != "lfm2" or _distance(hybrid_lm(hybrid("lfm2", layer_types=["conv"] * 4))) < 1e-4


def test_a_state_that_keeps_rejected_tokens_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: every state stays; and rejected tokens are written over what a convolution still sees."""
    lm = hybrid_lm(hybrid("qwen3_5_text"))
    settle = SlotCache.settle
    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "settle", lambda cache, num: settle(cache, num + 1))
        assert _distance(lm) > 1e-2
    for module in (cache_layers, cache_shapes):
        monkeypatch.setattr(module, "WINDOW", 8)
    assert _distance(hybrid_lm(hybrid("lfm2"))) > 1e-2


@_families("qwen3_5_text", "zaya")
def test_a_place_does_not_depend_on_later_tokens(name: str) -> None:
    """Scans mask later tokens of a chunk by zeros: 0 times NaN is NaN. Nor are replaced tokens or other rows spoilt."""
    lms = [hybrid_lm(hybrid(name)) for _ in range(2)]
    lms[0].model.get_input_embeddings().weight.data[5] = torch.nan  # probed before, as there is nothing to compare now
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
