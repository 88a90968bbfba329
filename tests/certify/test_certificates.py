"""Certificates of toys: right loops get them at the stated rate, wrong ones do not."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from hybrids import hybrid, hybrid_lm
from outrider.certify import run as module
from outrider.certify.certificate import Certificate
from outrider.certify.controls import CONTROLS
from outrider.certify.design import Design, num_tests
from outrider.certify.evidence import detectable
from outrider.certify.run import CertifyTask, TokenSample, certify, run_pilot
from outrider.decoder import Decoder
from outrider.drafters.base import Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError, PromptError
from outrider.options import Sampling
from outrider.runtime.lm import LM
from toys import as_lm, llama_pair, perturbed, table_pair, tiny_llama


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short pilot, and few contexts in the exact layer, which test_exact.py tests."""
    monkeypatch.setattr(module, "NUM_PILOT_TOKENS", 256)
    monkeypatch.setattr(module, "_NUM_CONTEXTS", 2)


CONTROLS_BY_NAME = {control.name: control for control in CONTROLS}
PROMPTS = [(1, 2), (3,), (4, 4, 4, 1)]


def _job(
    pair: tuple[LM, Drafter], acceptance: str = "rejection", level: float = 1e-3, **options: object
) -> CertifyTask:
    target, drafter = pair
    decoder = Decoder(target, None, frozenset({0}), drafter, acceptance, num_draft_tokens=4)
    batch_size = options.pop("batch_size", 64)
    sampling = Sampling(**{"max_new_tokens": 24} | options)
    return CertifyTask(decoder, sampling, PROMPTS, level, batch_size, seed=7)


def _certificate(job: CertifyTask, num_tokens: int, *controls: str, **options: Any) -> Certificate:
    return certify(job, run_pilot(job), num_tokens, controls=[CONTROLS_BY_NAME[name] for name in controls], **options)


@pytest.mark.parametrize(
    "controls", [("accept-all",), pytest.param(CONTROLS_BY_NAME, marks=pytest.mark.slow)], ids=["one control", "all"]
)
def test_a_real_model_is_certified(controls: Sequence[str]) -> None:
    """A tiny Llama whose texts end by chance, with penalties; all controls are caught. False alarm: 1e-6."""
    told: list[int] = []
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 3}
    job = _job(llama_pair(), "gumbel", 1e-6, **options)
    certificate = _certificate(job, 2500, *controls, on_tokens=told.append)
    assert certificate.verdict == "passed", certificate
    assert all(control.is_caught for control in certificate.controls) and sum(told) == 2500 * (1 + len(controls))
    statistical = certificate.statistical
    assert statistical is not None and len(statistical.tests) == num_tests(has_rounds=True) == 14
    assert statistical.detectable is not None and statistical.detectable < 0.1
    assert [report.has_noise for report in certificate.greedy] == [False, True]
    assert not any(report.differences for report in certificate.greedy)


def test_a_pair_with_states_is_certified() -> None:
    """A cache that keeps a rejected token is caught. And a draft is certified beyond its context. False alarm: 1e-6."""
    model = hybrid("lfm2")
    pair = hybrid_lm(model), model_drafter(hybrid_lm(perturbed(model, 0.1), "draft"))
    certificate = _certificate(_job(pair, "block", 1e-6), 1500, "rollback")
    assert certificate.verdict == "passed", certificate
    assert [control.is_caught for control in certificate.controls] == [True]
    windows = _job(table_pair(6, draft_context_len=8), "rejection", 1e-6, ignore_eos=True)
    assert _certificate(windows, 1500).verdict == "passed"


def _design(job: CertifyTask, num_tokens: int, num_pilot: int = 256) -> Design:
    pilot = TokenSample(job, first_text=2**32).first(num_pilot)
    return Design.of(pilot, num_tokens, job.level, len(job.prompts))


def test_wrong_loops_fail_certificates() -> None:
    """Shared random numbers show in pairs of tokens alone: each token's own law is right on average over the text
    before it, so that no other test alarms (level: 1e-6)."""
    job = _job(llama_pair())
    design = _design(job, 2500)
    pairs = {"reused": ("rank-by-round-before", "rank-by-distance"), "neighbour": ("rank-by-sequence",)}
    for name in CONTROLS_BY_NAME.keys() - {"rollback", *pairs}:
        report, _ = module.run_control(job, design, CONTROLS_BY_NAME[name], 2500, lambda _: None)
        assert report.is_caught, report
    for name, tests in pairs.items():
        sample = TokenSample(job, CONTROLS_BY_NAME[name]).first(2500)
        alarms = {test.name for test in design.tests(sample, 1e-6) if test.is_alarm}
        assert tests[0] in alarms and alarms <= {*tests}


@pytest.mark.parametrize(
    ("num_certificates", "num_tokens", "level"),
    [(40, 200, 0.05), pytest.param(1000, 1000, 0.01, marks=pytest.mark.slow)],
)
def test_false_alarms_are_as_rare_as_stated(num_certificates: int, num_tokens: int, level: float) -> None:
    """One after the other, of one long row of tokens. More alarms than the bound have a probability under 1e-6."""
    job = _job(table_pair(6), "block", level, batch_size=512, top_k=5)
    design = _design(job, num_tokens, 1024)
    whole = TokenSample(job).first(num_certificates * num_tokens)
    found = 0
    for i in range(num_certificates):
        part = whole.part(slice(i * num_tokens, (i + 1) * num_tokens))
        found += any(test.is_alarm for test in design.tests(part, level)) or bool(part["is_forbidden"].any())
    assert found <= stats.binom.isf(1e-6, num_certificates, level)


def test_too_few_tokens_certify_nothing() -> None:
    """A missed control, or a deviation beyond what is detectable, leaves it open, without an alarm."""
    certificate = _certificate(_job(table_pair(6), level=1e-6), 200, "reseeded", wanted=0.001)
    statistical = certificate.statistical
    assert statistical is not None and not statistical.is_alarm and not statistical.is_enough
    assert certificate.verdict == "inconclusive"
    assert statistical.num_tokens_needed == certificate.num_tokens_needed > 10**6
    (missed,) = certificate.controls
    assert not missed.is_ok and 400 < missed.num_tokens_needed < 10**4
    enough = dataclasses.replace(statistical, wanted=None)
    assert enough.is_enough and dataclasses.replace(certificate, statistical=enough).verdict == "inconclusive"
    assert dataclasses.replace(certificate, controls=()).verdict == "inconclusive"
    assert dataclasses.replace(certificate, statistical=enough, controls=()).verdict == "passed"
    job = _job(table_pair(6), batch_size=256)
    pilot = run_pilot(job)
    num_tokens = pilot.num_tokens_to_detect(0.03, job.level)
    observed, design = TokenSample(job).first(num_tokens), _design(job, num_tokens)
    least = detectable(observed.statistic("score"), observed.drift, design.bets["score"][0], design.level)
    assert least is not None and 0.02 < least <= 0.03
    with pytest.raises(OptionError, match="no farther from the target than"):
        pilot.num_tokens_to_detect(0.9, job.level)


def test_certificate_at_temperature_zero_is_exact() -> None:
    job = _job(llama_pair(), temperature=0.0, batch_size=2)
    pilot = run_pilot(job)
    certificate = certify(job, pilot, 1000)
    assert certificate.verdict == "passed" and certificate.statistical is None and pilot.observed is None
    effective = {control.name for control in certificate.controls if control.excuse is None}
    assert effective == {"keep-all", "accept-all", "replace-last", "rollback"}
    look_up = _job((table_pair(6)[0], ngram_drafter()))
    excused = {control.name for control in CONTROLS if module.excuse_of(look_up, control)}
    assert excused == {"drop-unlikely", "argmax-drafts", "filtered-drafts", "rollback"}


def test_controls_with_small_deviations_are_excused() -> None:
    """With top-k 2 the two likeliest tokens are all there are, so that drafts out of them are right."""
    certificate = _certificate(_job(table_pair(6), top_k=2), 2000, "accept-all", "filtered-drafts")
    assert certificate.verdict == "passed"
    caught, excused = certificate.controls
    assert caught.excuse is None and excused.excuse is not None and "deviates by less than 0.2" in excused.excuse


def test_certificate_without_drafts_is_inconclusive() -> None:
    """Texts of one token are never drafted. And prompts must leave room."""
    certificate = _certificate(_job(table_pair(6), max_new_tokens=1), 600, "accept-all")
    assert certificate.is_idle and certificate.verdict == "inconclusive" and certificate.num_tokens_needed is None
    assert certificate.statistical is not None and not certificate.statistical.is_alarm
    with pytest.raises(PromptError, match="prompt 0 has 2 tokens"):
        _job(llama_pair(context_len=5))


def test_a_model_that_drafts_for_itself_raises_no_alarm() -> None:
    """q = p up to rounding, which must not be taken for a statistic. At a level of 1%, in float32."""
    model = copy.deepcopy(tiny_llama()).to(torch.float32)
    job = _job((as_lm(model), model_drafter(as_lm(model))), level=0.01, temperature=0.7, top_p=0.9)
    certificate = _certificate(job, 1000, "replace-last")
    statistical = certificate.statistical
    assert statistical is not None and statistical.is_enough and statistical.detectable is None
    assert statistical.alpha == pytest.approx(1, abs=1e-6) and certificate.verdict == "passed"
