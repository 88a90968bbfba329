"""Texts of other systems: right ones pass at the stated rate, wrong ones do not."""

import dataclasses

import pytest
from scipy import stats

from outrider.certify.controls import ARGMAX_DRAFTS, REUSED
from outrider.certify.samples import SampledText, check_samples, judge, judge_greedily, level_of_kept, num_repeats
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.errors import PromptError
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, REJECTION, Rule
from outrider.text.row_text import RowText
from toys import llama_pair, table_pair, tokens

PROMPTS = [(1, 2), (3,), (4, 4, 4, 1)]
END = 0


def _written(
    target: LM,
    drafter: Drafter,
    num_texts: int,
    sampling: Sampling,
    *,
    rule: Rule = REJECTION,
    said: Sampling | None = None,
    has_one_seed: bool = False,
) -> list[SampledText]:
    """Texts of our own loop, which end by chance, said to be sampled by other options perhaps."""
    requests = []
    for i in range(num_texts):
        row = dataclasses.replace(sampling, seed=0 if has_one_seed else i)
        requests.append(Request(PROMPTS[i % 3], row, RowText(None, (END,), ())))
    return [
        SampledText(i, tuple(request.prompt_ids), text, said or sampling)
        for i, (request, text) in enumerate(zip(requests, tokens(target, drafter, requests, rule, 4), strict=True))
    ]


def _is_alarm(target: LM, drafter: Drafter, samples: list[SampledText], level: float = 1e-6) -> bool:
    return judge(target, drafter, samples, level=level, seed=1, batch_size=256)[0].is_alarm


def test_right_texts_pass_and_the_report_says_what_was_looked_at() -> None:
    target, drafter = llama_pair()
    samples = _written(target, drafter, 120, Sampling(max_new_tokens=20, repetition_penalty=1.2))
    told: list[int] = []
    report, controls = judge(target, drafter, samples, level=1e-6, seed=1, batch_size=50, on_texts=told.append)
    assert not report.is_alarm and report.places == [] and sum(told) == 120
    (control,) = controls
    assert control.is_caught and control.p is not None and control.p < 1e-7
    assert report.num_texts == 108 and report.num_tokens == sum(len(one.token_ids) for one in samples[12:])
    assert len(report.tests) == 9


def test_reused_uniform_numbers_alarm() -> None:
    """In the next round, or in the next text, since all have one seed. And a wrong rule is found out."""
    target, drafter = table_pair(6)
    assert _is_alarm(target, drafter, _written(target, drafter, 600, Sampling(max_new_tokens=20), rule=ARGMAX_DRAFTS))
    target, drafter = llama_pair()
    options = Sampling(max_new_tokens=24)
    reused = _written(target, drafter, 150, options, rule=dataclasses.replace(BLOCK, make_noise=REUSED.make_noise))
    same = _written(target, drafter, 150, options, has_one_seed=True)
    for samples, name in ((reused, "rank-by-distance"), (same, "rank-by-sequence")):
        report, _ = judge(target, drafter, samples, level=1e-6, seed=1, batch_size=256)
        assert {test.name for test in report.tests if test.is_alarm} >= {name}


def test_samples_estimate_the_deviation() -> None:
    """Texts of the draft itself are as far away as the draft is; of the target, not at all."""
    target, drafter = table_pair(6)
    for writer, share in ((drafter.lm, 1.0), (target, 0.0)):
        samples = _written(writer, NO_DRAFTER, 400, Sampling(max_new_tokens=20))
        report, _ = judge(target, drafter, samples, level=1e-6, seed=1, batch_size=256)
        assert report.estimate is not None and report.estimate_std is not None
        wanted = share * (1 - report.alpha)
        assert abs(report.estimate - wanted) < 5 * report.estimate_std < 0.25 * (1 - report.alpha)


def test_a_forbidden_token_is_seen_in_any_text() -> None:
    """Also in the first ones, by which the stakes are chosen."""
    target, drafter = table_pair(6)
    options = Sampling(top_k=2, max_new_tokens=20)
    right = _written(target, drafter, 60, options)
    wrong = _written(target, drafter, 6, Sampling(max_new_tokens=20), said=options)
    for samples in ([*wrong, *right], [*right, *wrong]):
        report, _ = judge(target, drafter, samples, level=1e-6, seed=1, batch_size=256)
        assert report.num_forbidden > 0 and report.is_alarm
        assert dataclasses.replace(report, num_forbidden=1, tests=()).is_alarm
    assert num_repeats(right) == 60 - len({(one.prompt_ids, one.token_ids) for one in right}) > 0


def test_each_text_is_held_against_its_own_options() -> None:
    target, drafter = table_pair(6)
    hot, cold = Sampling(max_new_tokens=20), Sampling(temperature=0.6, top_k=3, max_new_tokens=20)
    texts = [_written(target, drafter, 200, options) for options in (hot, cold)]
    mixed = [one for pair in zip(*texts, strict=True) for one in pair]
    swapped = [dataclasses.replace(one, sampling=cold if one.sampling is hot else hot) for one in mixed]
    for one in (drafter, NO_DRAFTER):
        assert not _is_alarm(target, one, mixed) and _is_alarm(target, one, swapped)


def test_false_alarms_are_as_rare_as_stated_where_texts_end_by_chance() -> None:
    """40 files at a level of 5%, of 40 texts of some four tokens. More alarms than the bound: under 1e-6."""
    target, drafter = table_pair(6)
    found = 0
    whole = _written(target, drafter, 40 * 40, Sampling(max_new_tokens=12))
    assert sum(one.token_ids[-1] == END for one in whole) > 0.5 * len(whole)
    for i in range(40):
        found += _is_alarm(target, drafter, whole[40 * i : 40 * (i + 1)], 0.05)
    assert found <= stats.binom.isf(1e-6, 40, 0.05)


def test_greedy_texts_are_held_against_plain_decoding() -> None:
    target, drafter = llama_pair()
    samples = _written(target, drafter, 5, Sampling(temperature=0.0, max_new_tokens=15))
    report = judge_greedily(target, samples, 2)
    assert report.is_ok and not report.differences and report.num_texts == 5
    ids = samples[3].token_ids
    samples[3] = dataclasses.replace(samples[3], token_ids=(*ids[:-1], (ids[-1] + 1) % 60))
    (difference,) = judge_greedily(target, samples, 2).differences
    assert (difference.prompt, difference.position, difference.verdict) == (3, len(ids) - 1, "bug")
    with pytest.raises(PromptError, match=r"outside 0\.\.5"):
        check_samples([SampledText(0, (1, 2), (6,), Sampling())], 6, 41)
    with pytest.raises(PromptError, match="42 tokens, but at most 41 are possible here"):
        check_samples([SampledText(0, (1, 2), (1,) * 40, Sampling())], 6, 41)


def test_texts_may_be_left_out_for_what_they_say_at_a_price() -> None:
    """Texts with a token are left out: the others are no sample of the target, and alarm at the level of a whole one.
    At the level for those kept they cannot; a wrong rule still does, where few are left out."""
    target, drafter = table_pair(6)
    options = Sampling(max_new_tokens=20)
    whole = _written(target, drafter, 600, options)
    kept = [one for one in whole if 3 not in one.token_ids]
    assert 0.2 < len(kept) / len(whole) < 0.8 and _is_alarm(target, drafter, kept)
    assert not _is_alarm(target, drafter, kept, level_of_kept(1e-3, len(kept), len(whole) - len(kept)))
    wrong = _written(target, drafter, 600, Sampling(max_new_tokens=20), rule=ARGMAX_DRAFTS)
    kept = [one for i, one in enumerate(wrong) if i % 60]
    assert _is_alarm(target, drafter, kept, level_of_kept(1e-3, len(kept), len(wrong) - len(kept)))
    for num in (1, 10, 100):  # the level bounds the density: the expected number bounds it
        assert level_of_kept(1e-3, 1000, num) < 1e-3 * (1 - num / (1000 + num)) ** 1000
