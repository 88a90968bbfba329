"""Candidates against full rows, their slow twin: the same tokens with the same probabilities, the same draws."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from candidate_rows import on_candidates
from outrider.certify.controls import WRONG_RULES
from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime.vocabulary import spread
from outrider.sampling.candidates import CandidateBuffers, Candidates
from outrider.sampling.noise import RoundUniforms, gumbels
from outrider.sampling.probs import (
    Probs,
    Settings,
    certain_rows,
    certain_where,
    draw,
    draw_gumbel,
    full,
    normalise,
    probs_of,
    stack_places,
    to_probs,
)
from outrider.sampling.rules import RULES, Rule, prob_at

OPTIONS = [
    {},
    {"temperature": 0.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 3000, "temperature": 1.5},
    {"top_p": 0.9},
    {"top_p": 0.25, "temperature": 2.0},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 64, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
]
SIZES = [1, 2, 63, 64, 65, 1000, 5000]


def _settings(rows: list[Sampling], vocab_size: int) -> Settings:
    settings = Settings.of(rows, vocab_size, torch.device("cpu"))
    return dataclasses.replace(settings, candidates=CandidateBuffers(vocab_size))


def _logits(vocab_size: int, scale: float, seed: int = 0) -> Tensor:
    """Two rows at three places, with a forbidden token. In quarters for a scale of 2, so that many are equal."""
    x = scale * torch.randn(2, 3, vocab_size, generator=torch.Generator().manual_seed(seed))
    x[0, 0, vocab_size // 2 : vocab_size // 2 + (vocab_size > 2)] = -torch.inf
    return (4 * x).round() / 4 if scale == 2 else x


def _rows(logits: Tensor, settings: Settings) -> Candidates:
    rows, finite = probs_of(logits, settings)
    assert isinstance(rows, Candidates), "there is a compiler"
    assert bool(finite.all())
    return rows


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_equal_full_rows(options: dict) -> None:
    """Tokens, probabilities up to the rounding of a float32 exponential, and draws, by numbers and noise."""
    for vocab_size, scale in itertools.product(SIZES, (0.1, 2, 5)):
        logits, settings = _logits(vocab_size, scale), _settings([Sampling(**options)] * 2, vocab_size)
        want, rows = normalise(to_probs(logits, settings)), _rows(logits, settings)
        found = full(rows)
        assert torch.equal(found > 0, want > 0), (vocab_size, scale)
        torch.testing.assert_close(found, want, rtol=3e-6, atol=0)
        assert torch.equal(prob_at(rows, found.argmax(-1)), found.amax(-1))
        seeds = torch.tensor([5, 2**40 + 3])
        for i, u in ((0, 1e-9), (1, 0.37), (2, 1 - 2**-53)):
            uniforms = torch.tensor([u, 1 - u if u < 0.9 else u], dtype=torch.float64)
            assert torch.equal(rows[:, i].draw(uniforms), draw(found[:, i], uniforms))
            noise = gumbels(seeds, torch.full((2, 1), 7 + i), vocab_size)[:, 0]
            drawn = rows[:, i].draw_with_noise(seeds, torch.full((2,), 7 + i))
            assert torch.equal(drawn, draw_gumbel(found[:, i], noise))


@pytest.mark.parametrize("options", [*OPTIONS, {"logit_bias": {3: 2.0}, "top_p": 0.9}], ids=str)
def test_rows_of_few_tokens(options: dict) -> None:
    for vocab_size, num_tokens in ((5000, 300), (70, 65), (9, 1)):
        ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))[:num_tokens].sort().values
        logits, settings = _logits(num_tokens, 2), _settings([Sampling(**options)] * 2, vocab_size)
        rows, finite = probs_of(logits, settings, token_ids=ids, vocab_size=vocab_size)
        want = normalise(to_probs(spread(logits, ids, vocab_size), settings))
        assert bool(finite.all()) and torch.equal(full(rows) > 0, want > 0)
        torch.testing.assert_close(full(rows), want, rtol=3e-6, atol=0)
        uniforms = torch.tensor([0.2, 0.8], dtype=torch.float64)
        assert torch.equal(draw(rows[:, 1], uniforms), draw(full(rows)[:, 1], uniforms))
        assert isinstance(rows, Candidates) and rows.shape == (2, 3, vocab_size)


def test_a_row_depends_on_nothing_but_itself() -> None:
    samplings = [Sampling(**options) for options in OPTIONS]
    logits = _logits(3000, 2)[:, :1].repeat(len(samplings), 1, 1)[: len(samplings)]
    together = _rows(logits, _settings(samplings, 3000))
    for b, sampling in enumerate(samplings):
        assert torch.equal(full(together)[b], full(_rows(logits[b : b + 1], _settings([sampling], 3000)))[0])


def test_logits_that_are_not_finite_are_told() -> None:
    """The other rows are as they were; the row itself is none that can be drawn from, and is not read."""
    places = itertools.product((math.nan, math.inf), (0, 64, 99), ({}, {"top_k": 5}, {"temperature": 0.0}))
    for value, place, options in places:
        x = torch.randn(2, 1, 100, generator=torch.Generator().manual_seed(1))
        x[0, 0, place] = value
        rows, finite = probs_of(x, _settings([Sampling(**options)] * 2, 100))
        assert finite.tolist() == [[False], [True]]
        assert torch.equal(full(rows)[1], full(_rows(x[1:], _settings([Sampling(**options)], 100)))[0])
    assert probs_of(torch.full((1, 1, 9), -torch.inf), _settings([Sampling()], 9))[1].tolist() == [[False]]


def test_candidates_move_as_full_rows_do() -> None:
    """Stacked, replaced, cut, selected. Buffers that grow keep the rows that are alive."""
    settings = _settings([Sampling(top_k=5), Sampling()], 300)
    rows = [_rows(_logits(300, 3, seed), settings) for seed in range(4)]
    wholes = [full(one) for one in rows]
    is_certain, ids = torch.tensor([True, False]), torch.tensor([[4, 299, 0], [7, 7, 7]])
    moved: list[tuple[Probs, Tensor]] = [
        (stack_places([one[:, 0] for one in rows]), torch.stack([one[:, 0] for one in wholes], dim=1)),
        (rows[0][:, 1:][[1, 0]], wholes[0][:, 1:][[1, 0]]),
        (certain_where(is_certain, ids, rows[1]), certain_where(is_certain, ids, wholes[1])),
        (certain_rows(ids, 300, settings), torch.nn.functional.one_hot(ids, 300).double()),
    ]
    before = len(settings.candidates.ids)
    for seed in range(10, 20):
        _rows(_logits(300, 3, seed), settings)
    assert len(settings.candidates.ids) > before
    for found, want in moved:
        assert isinstance(found, Candidates) and found.shape == want.shape
        assert torch.equal(full(found), want)


def test_buffers_are_used_again() -> None:
    """A round writes over the rows of the last one, in the same memory; and rows of other buffers are refused."""
    settings = _settings([Sampling(top_k=5)] * 2, 300)
    first = _rows(_logits(300, 3, 0), settings)
    memory = settings.candidates.ids.data_ptr()
    for seed in range(1, 9):
        settings.candidates.clear()
        rows = _rows(_logits(300, 3, seed), settings)
    assert settings.candidates.ids.data_ptr() == memory and torch.equal(full(first), full(rows))
    noise = RULES["block"].make_noise(torch.tensor([1, 2]), torch.tensor([4, 9]), 2, 300)
    other = _rows(_logits(300, 3), _settings([Sampling(top_k=5)] * 2, 300))[:, :2]
    with pytest.raises(TypeError, match="same buffers"):
        RULES["block"].verify(rows, Draft(torch.zeros(2, 2).long(), other, torch.tensor([2, 2])), noise)


@pytest.mark.parametrize("rule", (RULES | WRONG_RULES).values(), ids=RULES | WRONG_RULES)
def test_full_rows_of_a_draft_are_taken(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is the same, also of wrong rules. Under gumbel the target's rows are never made full."""
    settings = _settings([Sampling(top_k=20)] * 2, 200)
    p, q = _rows(_logits(200, 2), settings), _rows(_logits(200, 2, seed=1), settings)[:, :2]
    noise = rule.make_noise(torch.tensor([1, 2]), torch.tensor([4, 9]), 2, 200)
    draft = Draft(torch.stack([rule.draw(q[:, i], noise.at(i)) for i in range(2)], dim=1), q, torch.tensor([2, 2]))
    one = rule.verify(p, draft, noise)
    monkeypatch.setattr("outrider.sampling.rules.draw_gumbel", lambda rows, noise: torch.zeros(len(rows)).long())
    other = rule.verify(p, dataclasses.replace(draft, probs=full(q)), noise)
    assert torch.equal(one.num_accepted, other.num_accepted) and torch.equal(one.next_ids, other.next_ids)
    torch.testing.assert_close(one.drafted_probs, other.drafted_probs)


@pytest.mark.parametrize("lists_all", [False, True])
@pytest.mark.parametrize("rule", [RULES["rejection"], RULES["block"]], ids=lambda rule: rule.name)
def test_a_token_that_neither_can_draw_is_rejected(rule: Rule, lists_all: bool) -> None:
    """A drafter that breaks its word costs no token of the target."""
    p, q = torch.tensor([[[0.5, 0.5, 0.0]] * 2]), torch.tensor([[[0.25, 0.75, 0.0]]])
    uniforms = RoundUniforms.of(*(torch.tensor(x, dtype=torch.float64) for x in ([[0.1]], [[0.0]], [0.3])))
    draft = Draft(torch.tensor([[2]]), q, torch.tensor([1]))
    verdict = on_candidates(rule, lists_all=lists_all).verify(p, draft, uniforms)
    assert verdict.num_accepted.tolist() == [0] and verdict.next_ids.tolist() == [0]
