"""The exact layer: right rules are right to float64, and what is off by little is found to be off."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from outrider.certify.controls import (
    ALL_OR_NOTHING,
    ARGMAX_DRAFTS,
    BLOCK_BY_POSITION,
    REPLACE_LAST,
    REUSED,
)
from outrider.certify.exact import check_exactly, forcing_gap, identity_gap, noise_gap, two_rounds_gap
from outrider.drafters.lookups import ngram_drafter
from outrider.measure.teacher_forcing import Text
from outrider.options import Sampling
from outrider.records import Draft, Verdict
from outrider.sampling.noise import GumbelNoise, RoundUniforms, round_uniforms
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, RULES, Rule
from toys import llama_pair, table_pair

CONTEXTS = [Text((0, 3, 1, 2), 2), Text((4, 1), 2)]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5, top_k=3),
    Sampling(temperature=0),
    Sampling(top_p=0.7, repetition_penalty=1.5, frequency_penalty=0.5, min_tokens=4, stop_token_ids=(1, 2)),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_right_rules_are_exact(rule: Rule, sampling: Sampling) -> None:
    report = check_exactly(*table_pair(6), sampling, rule, CONTEXTS)
    assert report.is_ok and report.identity < 1e-14 and report.round_law < 1e-14
    assert report.two_rounds < 1e-12
    assert report.num_contexts == 2 and report.num_rows == 2 * (1 + 4 + 16)
    assert report.is_ok and not dataclasses.replace(report, round_law=float("nan")).is_ok


def test_what_is_no_number_is_not_lost_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A maximum that NaN has no part in would call the second context as good as the first."""
    gaps = iter([1e-16, float("nan")])
    monkeypatch.setattr("outrider.certify.exact.round_gap", lambda *_: next(gaps))
    report = check_exactly(*table_pair(6), Sampling(), REJECTION, CONTEXTS)
    assert not report.is_ok and math.isnan(report.round_law)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_other_drafters_and_small_vocabularies(rule: Rule) -> None:
    target, drafter = llama_pair()
    text = (3, 1, 4, 1, 5, 9, 3, 1)
    for draft in (drafter, ngram_drafter()):
        report = check_exactly(target, draft, Sampling(), rule, [Text(text, 3)])
        assert report.is_ok and report.distance > 0.05
        assert report.forcing < 1e-9  # 0 where forwards of any shape round alike
    assert check_exactly(*table_pair(3), Sampling(), rule, [Text((0, 1))]).is_ok


@pytest.mark.parametrize("rule", [ALL_OR_NOTHING, REPLACE_LAST, ARGMAX_DRAFTS], ids=lambda rule: rule.name)
def test_wrong_rules_are_not(rule: Rule) -> None:
    assert check_exactly(*table_pair(6), Sampling(), rule, CONTEXTS).round_law > 1e-3


def _by_round_alone(seeds: Tensor, round_starts: Tensor, k: int, vocab_size: int) -> RoundUniforms:
    """The generator starts anew in each round."""
    return round_uniforms(seeds, torch.zeros_like(round_starts), k)


@pytest.mark.parametrize(("rule", "make_noise"), [(REJECTION, REUSED.make_noise), (BLOCK, _by_round_alone)])
def test_numbers_used_in_two_rounds(rule: Rule, make_noise: object) -> None:
    """Each round alone is right, two together are not. (A certificate with them fails.)"""
    wrong = dataclasses.replace(rule, make_noise=make_noise)
    report = check_exactly(*table_pair(6), Sampling(), wrong, CONTEXTS[:1])
    assert report.identity < 1e-14 and report.round_law < 1e-14
    assert report.two_rounds > 0.05 and not report.is_ok


def test_noise_by_position_alone() -> None:
    """Wrong under ``block``, where a token depends on tokens drafted after it; right under ``rejection``."""
    assert two_rounds_gap(BLOCK_BY_POSITION) > 5e-4
    assert two_rounds_gap(dataclasses.replace(REJECTION, make_noise=BLOCK_BY_POSITION.make_noise)) < 1e-12


def test_noise_of_gumbel_by_round() -> None:
    assert noise_gap(GUMBEL.make_noise) == 0
    assert noise_gap(lambda seeds, starts, k, v: GumbelNoise(seeds, torch.zeros_like(starts), v)) > 0.1


def _lenient(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Coins come up a little more often than they should."""
    return REJECTION.verify(target_probs, draft, RoundUniforms.of(noise.draft, noise.accept * (1 - 1e-6), noise.next))


def test_small_mistakes_show() -> None:
    report = check_exactly(*table_pair(6), Sampling(), dataclasses.replace(REJECTION, verify=_lenient), CONTEXTS)
    assert 1e-8 < report.round_law < 1e-6 and not report.is_ok


def test_the_identity_by_hand() -> None:
    p, q = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.4, 0.1], [0.0, 0.0, 1.0]])
    assert identity_gap(p, q) < 1e-15


def test_the_yardstick_is_held_against_a_plain_forward() -> None:
    """The control: a cache that forgets the first token."""
    target, drafter = llama_pair()
    text = (3, 1, 4, 1, 5, 9, 3, 1)
    assert forcing_gap(target, text) < 1e-12
    right = target.visibility

    class BlindToTheFirst:
        def masks(self, positions: Tensor, view_len: int, dtype: torch.dtype) -> Tensor:
            return right.masks(positions, view_len, dtype).index_fill(3, torch.tensor([0]), -1e9)

    target.visibility = BlindToTheFirst()
    assert forcing_gap(target, text) > 1e-3
    report = check_exactly(target, drafter, Sampling(), REJECTION, [Text(text)])
    assert report.forcing > 1e-3 and not report.is_ok
