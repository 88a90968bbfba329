"""Means, ratios, proportions, tau and closed forms, against published numbers, hand-computed ones, and simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from outrider.decoding.schedule import expected_tokens
from outrider.measure import round_costs
from outrider.measure.intervals import bounded_mean, mean_std, paired_ratio, wald, wilson
from outrider.measure.round_costs import CostArm, Costs, RoundCost, choices, time_rounds
from outrider.measure.tau import counts_json, predict, stats_of
from outrider.records import Interval, Round, Stats, Timing
from outrider.sampling.rules import RULES
from toys import table_pair

# Newcombe 1998, Statistics in Medicine 17:857, table I: the simple asymptotic (1) and the score method (3).
NEWCOMBE = [
    (81, 263, (0.2522, 0.3638), (0.2553, 0.3662)),
    (15, 148, (0.0527, 0.1500), (0.0624, 0.1605)),
    (0, 20, (0.0000, 0.0000), (0.0000, 0.1611)),
    (1, 29, (0.0000, 0.1009), (0.0061, 0.1718)),
]
# Leviathan et al. 2211.17192, table 1 (c = 0) and that of T5-XXL with T5-small: alpha, gamma, c, operations, speed.
LEVIATHAN = [
    (0.6, 2, 0.0, 1.53, 1.96),
    (0.8, 5, 0.0, 1.63, 3.69),
    (0.9, 10, 0.0, 1.60, 6.86),
    (0.75, 7, 0.02, None, 3.2),
    (0.53, 5, 0.02, None, 1.9),
]
ROUNDS = [(2, 2), (2, 0), (2, 1), (1, 1), (2, 2), (0, 0)]


def ends(interval: Interval | None) -> tuple[float, float]:
    assert interval is not None and interval.low is not None and interval.high is not None
    return interval.low, interval.high


def test_proportions_are_those_published() -> None:
    for successes, trials, simple, score in NEWCOMBE:
        assert wald(successes, trials).value == wilson(successes, trials).value == successes / trials
        assert ends(wald(successes, trials)) == pytest.approx(simple, abs=5.1e-5)
        assert ends(wilson(successes, trials)) == pytest.approx(score, abs=5.1e-5)
    low, high = ends(wilson(1, 1))  # where Wald claims certainty, Wilson does not
    assert ends(wald(1, 1)) == (1, 1) and 0.0 <= low < 0.7 and high == 1.0


def test_means_and_paired_ratios_by_hand() -> None:
    assert mean_std([2, 4, 4, 4, 5, 5, 7, 9]) == (5.0, pytest.approx(math.sqrt(32 / 7)))
    # Ratios 1, 2, 4: the logarithms are 0, 1, 2 times ln 2, with mean 1, deviation 1, and t(0.975, 2) = 4.302653.
    interval, half = paired_ratio([1.0, 6.0, 20.0], [1.0, 3.0, 5.0]), 4.302653 / math.sqrt(3)
    assert interval.value == pytest.approx(2.0)
    assert ends(interval) == pytest.approx((2 ** (1 - half), 2 ** (1 + half)), rel=1e-6)


def test_the_interval_of_bounded_members_covers_the_truth_near_a_bound() -> None:
    """4000 experiments of 20 texts of 30 rounds, in which nearly all of 4 drafted tokens stand. False alarm: 1e-6. The
    control is the symmetric interval, which goes beyond the bound and covers less."""
    generator = np.random.default_rng(0)
    num, alpha, covered, covered_by_control = 4000, 0.995, 0, 0
    truth = sum(alpha**i for i in range(5))
    for _ in range(num):
        stands = generator.random((20, 30, 4)) < alpha
        tokens = (1 + np.cumprod(stands, axis=2).sum(axis=2)).sum(axis=1).tolist()
        low, high = ends(bounded_mean(tokens, [30] * 20, (1.0, 5.0)))
        covered += low <= truth <= high <= 5.0
        means = np.array(tokens) / 30
        covered_by_control += abs(means.mean() - truth) <= stats.t.ppf(0.975, 19) * means.std(ddof=1) / math.sqrt(20)
    at_least, at_most = stats.binom.interval(1 - 1e-6, num, 0.95)
    assert at_least <= covered <= at_most
    assert covered_by_control < at_least


def test_counts_by_position_by_hand() -> None:
    """Position 1 was drafted in five rounds and always judged; position 2 in four, of which one stopped before it."""
    counts = stats_of(ROUNDS, 1, 13)
    rates = ("conditional", 4 / 5, 2 / 3), ("unconditional", 4 / 5, 1 / 2)
    by_hand = [("position", 1, 2), ("num_drafted", 5, 4), ("num_judged", 5, 3), ("num_accepted", 4, 2), *rates]
    parts = [stats_of(ROUNDS[:2], 0, 5), stats_of(ROUNDS[2:], 1, 8)]
    assert counts_json(parts)["positions"] == [{name: values[i] for name, *values in by_hand} for i in range(2)]
    assert counts.mean_acceptance_length == 2.0 and counts.draft_acceptance_rate == 6 / 9
    histograms = counts.acceptance_histogram, counts.drafted_histogram, counts.full_histogram
    assert histograms == ((2, 2, 2), (1, 1, 4), (1, 1, 2)) and sum(parts, Stats()) == counts
    assert counts_json([]) == {"tau": None, "stats": Stats().to_json(), "positions": []}


def test_the_closed_forms_are_those_published() -> None:
    for alpha, gamma, c, operations, speed in LEVIATHAN:
        (one,) = predict([gamma], alpha=alpha, c=c, v=1.0, c_ops=c)
        assert round(one.speed_up, 2 if operations else 1) == speed
        assert operations is None or round(one.operations, 2) == operations
        tau = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert one.tau == pytest.approx(tau) == pytest.approx(expected_tokens([alpha] * 12)[gamma], rel=1e-12)
    (one,) = predict([4], alpha=1.0, c=0.25, v=1.5, c_ops=0.1)
    assert (one.tau, one.speed_up, one.operations) == (5.0, 2.0, pytest.approx(1.08))
    assert expected_tokens([0.9, 0.5, 0.8])[-1] == pytest.approx(1 + 0.9 + 0.45 + 0.36)
    assert expected_tokens([]) == [1.0]


def test_the_round_after_a_prefill_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is the only one. What the prefill took is kept all the same. (The times are made up.)"""
    timings = [Timing(8.0, 0.5, 0.5, 9.5), *[Timing(0.0, 0.25, 0.5, 1.0)] * 9]
    arm = CostArm(*table_pair(5), 2)
    for num_rounds, wanted in ((10, [Timing(8.0, 0.25, 0.5, 9.0), *timings[2:5]]), (1, timings[:1])):
        rounds = [Round((), timing) for timing in timings[:num_rounds]]
        monkeypatch.setattr(round_costs, "decode", lambda *_, rounds=rounds, **__: iter(rounds))
        assert time_rounds([arm], RULES["rejection"], num_rows=1, length=4, num_passes=1) == [wanted]


COSTS = Costs(
    num_rows=2,
    context=64,
    prefill_s=0.1,
    plain=RoundCost(0.010, 0.0, 0.009),
    rounds={
        ("cheap", 1): RoundCost(0.012, 0.001, 0.010),
        ("cheap", 3): RoundCost(0.020, 0.004, 0.015),
        ("dear", 1): RoundCost(0.040, 0.028, 0.010),
    },
)


def test_choice_of_k_by_hand() -> None:
    """Texts of nine tokens. A round of "cheap" with two drafted tokens was not timed: it lies between."""
    cut = Stats(9, (2.0, 3.0), (0.0, 5.0), num_truncated_rounds=1.0)
    short = Stats(9, (1.0, 0.0, 1.0, 1.0), (1.0, 0.0, 1.0, 1.0))
    whole = Stats(9, (0.0, 4.5), (0.0, 4.5))
    first, second, third = choices(
        COSTS, {("cheap", 1): [cut] * 2, ("cheap", 3): [short] * 2, ("dear", 1): [whole] * 2}
    )
    assert [(one.draft, one.k) for one in (first, second, third)] == [("cheap", 3), ("cheap", 1), ("dear", 1)]
    seconds = 0.010 + (0.012 + 0.020) / 2 + 0.020  # none drafted, two, three
    assert first.speed_up.value == pytest.approx(0.090 / seconds) and first.tau.value == pytest.approx(3.0)
    assert first.tokens_per_s == pytest.approx(2 * 9 / seconds) and first.round_ms == pytest.approx(20.0)
    assert first.if_free == pytest.approx(0.090 / (seconds - (0.001 + 0.004) / 2 - 0.004))
    assert first.if_agreeing == pytest.approx(0.090 / (3 * 0.020))  # four tokens a round: three rounds
    assert second.tau.value == pytest.approx(9 / 6) and second.speed_up.value == pytest.approx(0.090 / (6 * 0.012))
    assert third.speed_up.value == pytest.approx(0.5)
    # A look-up that finds nothing in ten rounds: the plain round, and the looking.
    costs = replace(COSTS, rounds={("ngram", 4): RoundCost(0.013, 0.002, 0.010)}, lookup_s={"ngram": 0.002})
    (one,) = choices(costs, {("ngram", 4): [Stats(10, (10.0,), (10.0,))]})
    assert one.speed_up.value == pytest.approx(0.010 / 0.012) and one.if_free == pytest.approx(1.0)
