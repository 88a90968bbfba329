"""The exact layer: right rules are right to float64, and what is off by little is found to be off."""

import dataclasses

import pytest
import torch
from torch import Tensor

from outrider.certify.controls import ALL_OR_NOTHING, ARGMAX_DRAFTS, BLOCK_BY_POSITION, REPLACE_LAST, REUSED
from outrider.certify.exact import check_exactly, forcing_gap, identity_gap, noise_gap, two_rounds_gap
from outrider.drafters.lookups import ngram_drafter
from outrider.measure.teacher_forcing import Text
from outrider.options import Sampling
from outrider.records import Draft, Verdict
from outrider.sampling.noise import GumbelNoise, RoundUniforms, round_uniforms
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, RULES, Rule
from toys import llama_pair, table_pair

CONTEXTS = [Text((0, 3, 1, 2), 2), Text((4, 1), 2)]
TEXT = (3, 1, 4, 1, 5, 9, 3, 1)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5, top_k=3),
    Sampling(temperature=0),
    Sampling(top_p=0.7, repetition_penalty=1.5, frequency_penalty=0.5, min_tokens=4, stop_token_ids=(1, 2)),
]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_rules_follow_the_enumerated_law(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gap that is no number is not lost among the others."""
    for sampling in SAMPLINGS:
        report = check_exactly(*table_pair(6), sampling, rule, CONTEXTS)
        assert report.is_ok and report.identity < 1e-14 and report.round_law < 1e-14
        assert report.two_rounds < 1e-12
        assert report.num_contexts == 2 and report.num_rows == 2 * (1 + 4 + 16)
    gaps = iter([1e-16, float("nan")])
    monkeypatch.setattr("outrider.certify.exact.round_gap", lambda *_: next(gaps))
    assert not check_exactly(*table_pair(6), Sampling(), REJECTION, CONTEXTS).is_ok


def test_other_drafters_and_small_vocabularies_are_exact_too() -> None:
    target, drafter = llama_pair()
    for draft, rule in ((drafter, BLOCK), (ngram_drafter(), REJECTION)):
        report = check_exactly(target, draft, Sampling(), rule, [Text(TEXT, 3)])
        assert report.is_ok and report.distance > 0.05
        assert report.forcing < 1e-9  # 0 where forwards of any shape round alike
        assert check_exactly(*table_pair(3), Sampling(), rule, [Text((0, 1))]).is_ok


def _lenient(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Coins come up a little more often than they should."""
    return REJECTION.verify(target_probs, draft, RoundUniforms.of(noise.draft, noise.accept * (1 - 1e-6), noise.next))


@pytest.mark.parametrize(
    ("rule", "least"),
    [
        *((rule, 1e-3) for rule in (ALL_OR_NOTHING, REPLACE_LAST, ARGMAX_DRAFTS)),
        (dataclasses.replace(REJECTION, name="lenient", verify=_lenient), 1e-8),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_wrong_rules_break_the_enumerated_law(rule: Rule, least: float) -> None:
    report = check_exactly(*table_pair(6), Sampling(), rule, CONTEXTS)
    assert report.round_law > least and not report.is_ok


def test_numbers_used_in_two_rounds_show_in_two_rounds_alone() -> None:
    """Those of the round before; and a generator that starts anew in each round."""
    for rule, make_noise in (
        (REJECTION, REUSED.make_noise),
        (BLOCK, lambda seeds, starts, k, _: round_uniforms(seeds, torch.zeros_like(starts), k)),
    ):
        wrong = dataclasses.replace(rule, make_noise=make_noise)
        report = check_exactly(*table_pair(6), Sampling(), wrong, CONTEXTS[:1])
        assert report.identity < 1e-14 and report.round_law < 1e-14
        assert report.two_rounds > 0.05 and not report.is_ok


def test_noise_by_position_is_wrong_under_block_and_noise_by_round_under_gumbel() -> None:
    """Under ``block`` a token depends on tokens drafted after it; ``rejection`` does not care."""
    assert two_rounds_gap(BLOCK_BY_POSITION) > 5e-4
    assert two_rounds_gap(dataclasses.replace(REJECTION, make_noise=BLOCK_BY_POSITION.make_noise)) < 1e-12
    assert noise_gap(GUMBEL.make_noise) == 0
    assert noise_gap(lambda seeds, starts, k, v: GumbelNoise(seeds, torch.zeros_like(starts), v)) > 0.1
    p, q = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.4, 0.1], [0.0, 0.0, 1.0]])
    assert identity_gap(p, q) < 1e-15


def test_teacher_forcing_is_held_against_a_plain_forward() -> None:
    """The control: a cache that forgets the first token."""
    target, drafter = llama_pair()
    assert forcing_gap(target, TEXT) < 1e-12
    right = target.backend.visibility

    class BlindToTheFirst:
        def masks(self, positions: Tensor, view_len: int, dtype: torch.dtype) -> Tensor:
            return right.masks(positions, view_len, dtype).index_fill(3, torch.tensor([0]), -1e9)

    target.backend.visibility = BlindToTheFirst()
    report = check_exactly(target, drafter, Sampling(), REJECTION, [Text(TEXT)])
    assert report.forcing > 1e-3 and not report.is_ok
