"""Certificates of toys: right loops get them at the stated rate, wrong ones do not."""

import copy
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from hybrids import hybrid, hybrid_lm
from outrider.certify import run as module
from outrider.certify.certificate import Certificate
from outrider.certify.controls import CONTROLS, REUSED, Control
from outrider.certify.design import Design
from outrider.certify.divergence import plain_batches
from outrider.certify.job import CertifyTask
from outrider.certify.observed import ObservedTokens
from outrider.certify.run import Pilot, TokenSample, certify, check_greedily, plain_texts, run_pilot
from outrider.decoder import Decoder
from outrider.drafters.base import AlteredDrafter, Drafter, Rows
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.errors import OptionError, PromptError
from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.lm import LM
from outrider.sampling.probs import normalised
from outrider.sampling.rules import BLOCK, REJECTION, RULES, Rule
from outrider.stats.evidence import detectable
from round_drafters import head, parallel
from toys import as_lm, llama_pair, perturbed, table_pair, tiny_llama


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short pilot, and few contexts in the exact layer, which test_exact.py tests."""
    monkeypatch.setattr(module, "NUM_PILOT_TOKENS", 256)
    monkeypatch.setattr(module, "_NUM_CONTEXTS", 2)


PROMPTS = [(1, 2), (3,), (4, 4, 4, 1)]


def _job(
    pair: tuple[LM, Drafter], acceptance: str = "rejection", level: float = 1e-3, **options: object
) -> CertifyTask:
    target, drafter = pair
    decoder = Decoder(target, None, frozenset({0}), drafter, acceptance, num_draft_tokens=4)
    batch_size = options.pop("batch_size", 64)
    sampling = Sampling(**{"max_new_tokens": 24} | options)
    return CertifyTask(decoder, sampling, PROMPTS, level, batch_size, seed=7)


def _certificate(job: CertifyTask, num_tokens: int, wanted: float | None = None) -> tuple[Pilot, Certificate]:
    pilot = run_pilot(job)
    return pilot, certify(job, pilot, num_tokens, wanted=wanted)


def _controls(*names: str) -> list[Control]:
    return [control for control in CONTROLS if control.name in names]


def test_mistakes_are_made_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is prepared for a rule that is wrong, which may take longer than the certificate; the texts that are
    tested come from prepared steps."""
    monkeypatch.setattr(module, "CONTROLS", _controls("accept-all", "reseeded", "rollback"))
    target, drafter = llama_pair()
    executions = target.execution, drafter.lm.execution = CapturedExecution(), CapturedExecution()
    _, certificate = _certificate(_job((target, drafter), "block", batch_size=4), 300)
    assert {control.is_caught for control in certificate.controls} == {True, False}  # of the latter texts are compared
    rules = {rule.name for one in executions for (_, _, (rule, *_), *_) in one._programs}
    assert rules == {"block"}


@pytest.mark.parametrize(
    ("acceptance", "controls"),
    [("block", CONTROLS[:1]), ("gumbel", CONTROLS[:2]), pytest.param("gumbel", CONTROLS, marks=pytest.mark.slow)],
)
def test_a_real_model_is_certified(
    acceptance: str, controls: tuple[Control, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny Llama whose texts end by chance, with a penalty; all controls are caught. False alarm: 1e-6."""
    monkeypatch.setattr(module, "CONTROLS", controls)
    told: dict[str, int] = {}
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 3}
    job = _job(llama_pair(), acceptance, 1e-6, **options)
    pilot = run_pilot(job)

    def on_tokens(what: str, done: int, total: int) -> None:
        told[what] = told.get(what, 0) + done
        assert told[what] <= total == 2500

    certificate = certify(job, pilot, 2500, on_tokens=on_tokens)
    assert certificate.is_certified, certificate
    assert all(control.is_caught for control in certificate.controls) and told["sample"] == 2500
    statistical = certificate.statistical
    assert statistical is not None and sum(statistical.pit_histogram) == 2500
    assert statistical.detectable is not None and statistical.detectable < 0.1
    assert statistical.num_texts > 2500 / 24 + 10, "texts end early"
    assert len(certificate.greedy) == (2 if acceptance == "gumbel" else 1)
    assert not any(report.differences for report in certificate.greedy)


@pytest.mark.parametrize("name", ["head", pytest.param("parallel", marks=pytest.mark.slow)])
def test_heads_are_certified(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tests that look towards their own q; mistakes are caught. False alarm: 1e-6."""
    monkeypatch.setattr(module, "CONTROLS", _controls("accept-all", "argmax-drafts"))
    target, model_drafter = llama_pair()
    pair = target, head(target) if name == "head" else parallel(model_drafter.lm)
    _, certificate = _certificate(_job(pair, "block", 1e-6), 2500)
    assert certificate.is_certified, certificate
    assert all(control.is_caught for control in certificate.controls)


def test_a_pair_with_states_is_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a cache that keeps a rejected token is caught. False alarm: 1e-6."""
    monkeypatch.setattr(module, "CONTROLS", _controls("rollback"))
    model = hybrid("lfm2")
    pair = hybrid_lm(model), ModelDrafter(hybrid_lm(perturbed(model, 0.1), "draft"))
    _, certificate = _certificate(_job(pair, "block", 1e-6), 2500)
    assert certificate.is_certified, certificate
    assert [control.is_caught for control in certificate.controls] == [True]


def _misreported_windows(inner: ModelDrafter) -> Drafter:
    """Reports a sharper q than it draws from, but only beyond its context."""

    def alter(rows: Rows, k: int, draft: Draft) -> Draft:
        if draft.probs is None:
            return draft
        is_window = (rows.lengths > inner.draft_lm.context_len)[:, None, None]
        return dataclasses.replace(draft, probs=torch.where(is_window, normalised(draft.probs**2), draft.probs))

    return AlteredDrafter(inner, "misreported", alter)


def test_a_draft_is_certified_beyond_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it reads the last tokens only. A mistake that is made there alone is refused. False alarm: 1e-6."""
    monkeypatch.setattr(module, "CONTROLS", _controls("accept-all"))
    target, drafter = table_pair(6, draft_context_len=8)
    job = _job((target, drafter), "rejection", 1e-6, ignore_eos=True)
    pilot, certificate = _certificate(job, 2000)
    assert certificate.is_certified, certificate
    assert min(len(one.prompt_ids) + len(one.token_ids) for one in pilot.written) > 3 * 8
    monkeypatch.setattr(module, "CONTROLS", ())
    wrong = dataclasses.replace(job, decoder=dataclasses.replace(job.decoder, drafter=_misreported_windows(drafter)))
    _, certificate = _certificate(wrong, 2000)
    assert certificate.verdict == "failed" and certificate.statistical is not None
    assert certificate.statistical.is_alarm


def _design(job: CertifyTask, pilot: ObservedTokens, num_tokens: int) -> Design:
    return Design.of(pilot, num_tokens, job.level, len(job.prompts))


@cache
def _llama_design() -> tuple[CertifyTask, Design]:
    job = _job(llama_pair())
    return job, _design(job, TokenSample(job, first_text=2**32).first(256), 2500)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_what_is_wrong_alarms(control: Control) -> None:
    """At the level of a certificate, by as many tokens as it would have."""
    job, design = _llama_design()
    observed = TokenSample(job, control).first(2500)
    assert any(test.is_alarm for test in design.tests(observed, 1e-3))


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_numbers_used_for_two_rounds_show_in_pairs_of_tokens_alone(rule: Rule) -> None:
    """Each token's own law is right on average over the text before it, so that no other test alarms. Level: 1e-6."""
    job, design = _llama_design()
    wrong = Control("", "", dataclasses.replace(rule, make_noise=REUSED.make_noise))
    alarms = {test.name for test in design.tests(TokenSample(job, wrong).first(2500), 1e-6) if test.is_alarm}
    assert "rank-by-round-before" in alarms and alarms <= {"rank-by-round-before", "rank-by-distance"}


def test_the_numbers_of_a_neighbour_show_in_pairs_of_sequences_alone() -> None:
    """Level: 1e-6."""
    job, design = _llama_design()
    (control,) = _controls("neighbour")
    tests = design.tests(TokenSample(job, control).first(2500), 1e-6)
    assert {test.name for test in tests if test.is_alarm} == {"rank-by-sequence"}


def test_what_is_wrong_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that is made by the very loop that is to be certified."""
    right, (mistake,) = module.generate_texts, _controls("rollback")
    monkeypatch.setattr(module, "generate_texts", lambda job, texts, made=None: right(job, texts, made or mistake))
    monkeypatch.setattr(module, "CONTROLS", ())
    _, certificate = _certificate(_job(llama_pair()), 2000)
    assert certificate.verdict == "failed" and certificate.exact.is_ok
    assert certificate.statistical is not None and certificate.statistical.is_alarm


def _alarms(acceptance: str, num_certificates: int, num_tokens: int, level: float) -> int:
    """Certificates one after the other, of one long row of tokens."""
    job = _job(table_pair(6), acceptance, level, batch_size=512, top_k=5)
    design = _design(job, TokenSample(job, first_text=2**32).first(1024), num_tokens)
    whole = TokenSample(job).first(num_certificates * num_tokens)
    found = 0
    for i in range(num_certificates):
        part = _part(whole, i * num_tokens, (i + 1) * num_tokens)
        found += any(test.is_alarm for test in design.tests(part, level)) or bool(part.is_forbidden.any())
    return found


def _part(whole, begin: int, end: int):
    index = slice(begin, end)

    def of(value):
        if isinstance(value, np.ndarray):
            return value[..., index]
        return type(value)(**{field.name: of(getattr(value, field.name)) for field in dataclasses.fields(value)})

    return of(whole)


@pytest.mark.parametrize(
    "acceptance", ["block", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rejection", "gumbel"))]
)
def test_false_alarms_are_as_rare_as_stated(acceptance: str) -> None:
    """60 certificates at a level of 5%. More alarms than the bound come with a probability under 1e-6."""
    assert _alarms(acceptance, 60, 300, 0.05) <= stats.binom.isf(1e-6, 60, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", RULES)
def test_false_alarms_of_a_thousand_certificates(acceptance: str) -> None:
    """1,000 certificates at 1%. More alarms than the bound come with a probability under 1e-6."""
    assert _alarms(acceptance, 1000, 1000, 0.01) <= stats.binom.isf(1e-6, 1000, 0.01)


def test_too_few_tokens_certify_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls are missed, and what was to be detectable is not: the certificate fails, without an alarm."""
    monkeypatch.setattr(module, "CONTROLS", CONTROLS[2:3])
    _, certificate = _certificate(_job(table_pair(6), level=1e-6), 200, wanted=0.001)
    statistical = certificate.statistical
    assert statistical is not None and not statistical.is_alarm and not statistical.is_ok
    assert not all(control.is_ok for control in certificate.controls) and certificate.verdict == "inconclusive"
    assert statistical.num_tokens_needed == certificate.num_tokens_needed > 10**6
    (missed,) = certificate.controls
    assert 400 < missed.num_tokens_needed < 10**4


def test_the_size_that_is_asked_for_suffices() -> None:
    job = _job(table_pair(6), batch_size=256)
    pilot = run_pilot(job)
    num_tokens = pilot.num_tokens_to_detect(0.03, job.level)
    observed = TokenSample(job).first(num_tokens)
    assert pilot.observed is not None
    design = _design(job, pilot.observed, num_tokens)
    least = detectable(observed.score, observed.drift, design.score, design.level)
    assert least is not None and 0.02 < least <= 0.03
    with pytest.raises(OptionError, match="no farther from the target than"):
        pilot.num_tokens_to_detect(0.9, job.level)
    assert pilot.num_tokens_for(1e-9) == 200


def test_nothing_is_left_to_chance_at_temperature_zero() -> None:
    pilot, certificate = _certificate(_job(llama_pair(), temperature=0.0, batch_size=2), 1000)
    assert certificate.is_certified and certificate.statistical is None and pilot.observed is None
    assert {c.control.name for c in certificate.controls if c.excuse is None} == {
        "keep-all", "accept-all", "replace-last", "rollback"
    }  # fmt: skip
    assert certificate.to_json()["statistical"] is None


def test_look_ups_and_models_without_a_cache_excuse_some_controls() -> None:
    target, _ = table_pair(6)
    _, certificate = _certificate(_job((target, NgramDrafter())), 200)
    excused = {c.control.name: c.excuse for c in certificate.controls if c.excuse}
    assert excused.keys() == {"drop-unlikely", "argmax-drafts", "filtered-drafts", "rollback"}
    assert "cache" in excused["rollback"]
    single = [c.excuse(k=1, num_rows=1, has_probs=True, has_cache=True, is_greedy=False) for c in CONTROLS]
    assert {c.name for c, excuse in zip(CONTROLS, single, strict=True) if excuse} == {"keep-all", "neighbour"}


def test_what_is_hardly_a_mistake_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With top-k 2 the two likeliest tokens are all there are, so that drafts out of them are right; not with 3."""
    monkeypatch.setattr(module, "CONTROLS", (CONTROLS[1], CONTROLS[6]))
    excuses = []
    for top_k in (2, 3):
        _, certificate = _certificate(_job(table_pair(6), top_k=top_k), 2000)
        assert certificate.is_certified
        excuses.append(certificate.controls[1].excuse)
    assert "deviates by less than 0.2" in excuses[0] and excuses[1] is None


@pytest.mark.slow
def test_what_never_comes_up_is_excused_at_temperature_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that agrees so seldom that none is accepted whole leaves no bonus to be forgotten. That says something
    from 922 tokens on."""
    monkeypatch.setattr(module, "CONTROLS", _controls("accept-all", "replace-last"))
    drafter = ModelDrafter(as_lm(tiny_llama(seed=1)))
    job = _job((as_lm(tiny_llama()), drafter), temperature=0.0, max_new_tokens=40, ignore_eos=True, batch_size=24)
    pilot = run_pilot(job)
    for num_prompts, is_enough in ((12, False), (24, True)):
        prompts = [(i, i + 1) for i in range(num_prompts)]
        certificate = certify(dataclasses.replace(job, prompts=prompts), pilot, 1000)
        by_name = {one.control.name: one for one in certificate.controls}
        assert by_name["accept-all"].is_caught and not by_name["replace-last"].is_caught
        assert certificate.is_certified == is_enough == bool(by_name["replace-last"].excuse)
        assert (certificate.verdict, certificate.num_tokens_needed) == (
            ("passed", None) if is_enough else ("inconclusive", 922)
        )


def test_where_no_mistake_would_show_nothing_is_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one token are never drafted; and a look-up that never finds anything is no speculation."""
    monkeypatch.setattr(module, "CONTROLS", CONTROLS[:3])
    _, certificate = _certificate(_job(table_pair(6), max_new_tokens=1), 1000)
    assert certificate.is_idle and certificate.verdict == "inconclusive" and certificate.num_tokens_needed is None
    assert certificate.statistical is not None and certificate.statistical.is_ok


def test_a_model_that_drafts_for_itself_raises_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """q = p up to rounding, which must not be taken for a statistic. At a level of 5%, in float32."""
    monkeypatch.setattr(module, "CONTROLS", CONTROLS[3:4])
    model = copy.deepcopy(tiny_llama()).to(torch.float32)
    job = _job((as_lm(model), ModelDrafter(as_lm(model))), level=0.01, temperature=0.7, top_p=0.9)
    _, certificate = _certificate(job, 1500)
    statistical = certificate.statistical
    assert statistical is not None and statistical.is_ok and statistical.detectable is None
    assert statistical.alpha == pytest.approx(1, abs=1e-6) and certificate.is_certified


def test_the_same_job_gives_the_same_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONTROLS", CONTROLS[:1])
    job = _job(table_pair(6), batch_size=32)
    first, second = (_certificate(job, 300)[1].to_json() for _ in range(2))
    assert first == second


def test_greedy_texts_are_held_against_plain_ones() -> None:
    """The control: a rule that keeps everything writes another text, and not by rounding."""
    job = _job(llama_pair(), temperature=0.0, batch_size=2)
    report = check_greedily(job, plain_texts(job), CONTROLS[1])
    assert report.num_texts == 3 and not report.is_ok
    assert all(one.verdict == "bug" for one in report.differences)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_texts_are_written_once(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again for each control: three prompts of 24 tokens at most, greedily, and above 0 with the noise as well."""
    written = []

    def counting(*arguments: Any) -> Iterator[list[list[int]]]:
        for batch in plain_batches(*arguments):
            written.extend(batch)
            yield batch

    monkeypatch.setattr(module, "plain_batches", counting)
    job = _job(llama_pair(), "gumbel", temperature=temperature)
    certificate = certify(job, run_pilot(job), 200, controls=CONTROLS[1:4])
    assert len(certificate.controls) == 3 and len(written) == 3 * len(certificate.greedy) == (6 if temperature else 3)


def test_prompts_must_leave_room() -> None:
    with pytest.raises(PromptError, match="prompt 0 has 2 tokens"):
        _job(llama_pair(context_len=5))
