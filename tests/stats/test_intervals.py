"""Means, ratios and proportions against published numbers, hand-computed ones, and simulation.

The simulations use a fixed seed; each states how improbable its bound is when the interval is right.
"""

import math

import numpy as np
import pytest
from scipy import stats

from outrider.stats.intervals import (
    Interval,
    bounded_mean,
    mean_std,
    normal_limit,
    num_trials_to_decide,
    paired_difference,
    paired_ratio,
    ratio_of_sums,
    uniform_bins,
    uniform_distance,
    wald,
    wilson,
)

FALSE_ALARM = 1e-6

# Newcombe 1998, Statistics in Medicine 17:857, table I: the simple asymptotic (1) and the score method (3).
NEWCOMBE = [
    (81, 263, (0.2522, 0.3638), (0.2553, 0.3662)),
    (15, 148, (0.0527, 0.1500), (0.0624, 0.1605)),
    (0, 20, (0.0000, 0.0000), (0.0000, 0.1611)),
    (1, 29, (0.0000, 0.1009), (0.0061, 0.1718)),
]


def ends(interval: Interval) -> tuple[float, float]:
    assert interval.low is not None and interval.high is not None
    return interval.low, interval.high


@pytest.mark.parametrize(("successes", "trials", "simple", "score"), NEWCOMBE)
def test_proportions_as_published(
    successes: int, trials: int, simple: tuple[float, float], score: tuple[float, float]
) -> None:
    assert wald(successes, trials).value == wilson(successes, trials).value == successes / trials
    assert ends(wald(successes, trials)) == pytest.approx(simple, abs=5.1e-5)
    assert ends(wilson(successes, trials)) == pytest.approx(score, abs=5.1e-5)


def test_proportions_at_another_level() -> None:
    """z = 1.6449 at 90%: 0.5 -+ 1.6449 * sqrt(0.25 / 100), by hand."""
    interval = wald(50, 100, level=0.9)
    assert ends(interval) == pytest.approx((0.41776, 0.58224), abs=1e-5)
    assert interval.level == 0.9


@pytest.mark.parametrize(("successes", "trials"), [(1, 1), (0, 8)])
def test_nothing_and_everything_stay_within_0_and_1(successes: int, trials: int) -> None:
    """Where Wald claims certainty, Wilson does not."""
    rate = successes / trials
    assert ends(wald(successes, trials)) == (rate, rate)
    low, high = ends(wilson(successes, trials))
    assert 0.0 <= low <= rate <= high <= 1.0
    assert high - low > 0.3


def test_mean_and_standard_deviation() -> None:
    """By hand: 2, 4, 4, 4, 5, 5, 7, 9 have mean 5; their squared deviations add to 32, over 7."""
    assert mean_std([2, 4, 4, 4, 5, 5, 7, 9]) == (5.0, pytest.approx(math.sqrt(32 / 7)))
    assert mean_std([3.5]) == (3.5, None)


def test_paired_ratio_by_hand() -> None:
    """Ratios 1, 2, 4: the logarithms are 0, 1, 2 times ln 2, with mean 1, deviation 1, and t(0.975, 2) = 4.302653."""
    interval = paired_ratio([1.0, 6.0, 20.0], [1.0, 3.0, 5.0])
    half = 4.302653 / math.sqrt(3)
    assert interval.value == pytest.approx(2.0)
    assert ends(interval) == pytest.approx((2 ** (1 - half), 2 ** (1 + half)), rel=1e-6)


def test_one_pair_says_nothing_of_the_spread() -> None:
    interval = paired_ratio([3.0], [2.0])
    assert (interval.value, interval.low, interval.high) == (pytest.approx(1.5), None, None)
    assert interval.to_json() == {"value": pytest.approx(1.5), "low": None, "high": None, "level": 0.95}


def test_an_interval_of_bounded_members_stays_within_the_bounds() -> None:
    """All at one bound, where the groups are no different: there it is Wilson's, with the t quantile; and groups that
    differ as much as they can."""
    members = [10, 30]
    q = float(stats.t.ppf(0.975, 1)) ** 2 / 40
    everything = bounded_mean([50, 150], members, (1.0, 5.0))
    assert (everything.value, *ends(everything)) == pytest.approx((5.0, 5.0 - 4 * q / (1 + q), 5.0))
    nothing = bounded_mean(members, members, (1.0, 5.0))
    assert (nothing.value, *ends(nothing)) == pytest.approx((1.0, 1.0, 1.0 + 4 * q / (1 + q)))
    low, high = ends(bounded_mean([10, 150], members, (1.0, 5.0)))
    assert 1.0 <= low < 4.0 < high <= 5.0
    assert ends(bounded_mean(members, members, (1.0, 1.0))) == (1.0, 1.0)
    assert bounded_mean([50], [10], (1.0, 5.0)) == Interval(5.0, None, None)


def test_the_interval_of_bounded_members_covers_the_truth_near_a_bound() -> None:
    """4000 experiments of 20 texts of 30 rounds, in which nearly all of 4 drafted tokens stand. The control is the
    symmetric interval, which goes beyond the bound and covers less."""
    generator = np.random.default_rng(0)
    num, alpha, covered, covered_by_control = 4000, 0.995, 0, 0
    truth = sum(alpha**i for i in range(5))
    for _ in range(num):
        stands = generator.random((20, 30, 4)) < alpha
        tokens = (1 + np.cumprod(stands, axis=2).sum(axis=2)).sum(axis=1).tolist()
        low, high = ends(bounded_mean(tokens, [30] * 20, (1.0, 5.0)))
        covered += low <= truth <= high <= 5.0
        low, high = ends(ratio_of_sums(tokens, [30] * 20))
        covered_by_control += low <= truth <= high
    at_least, at_most = stats.binom.interval(1 - FALSE_ALARM, num, 0.95)
    assert at_least <= covered <= at_most
    assert covered_by_control < at_least


def test_paired_difference_by_hand() -> None:
    """100 trials, 3 solved by the first alone, 5 by the second: the difference is 0.02, its variance
    (9 - 100 * 0.0004) / 100^2, and the nearer margin is 0.03 / 0.0299333 = 1.002228 standard errors off."""
    first = [True] * 3 + [False] * 5 + [True] * 60 + [False] * 32
    second = [False] * 3 + [True] * 5 + [True] * 60 + [False] * 32
    paired = paired_difference(first, second, margin=0.05)
    assert (paired.only_first, paired.only_second, paired.margin) == (3, 5, 0.05)
    se = math.sqrt(8.96) / 100
    assert paired.difference.value == pytest.approx(0.02)
    assert ends(paired.difference) == pytest.approx((0.02 - 1.959964 * se, 0.02 + 1.959964 * se), abs=1e-7)
    assert paired.tost_p == pytest.approx(0.158116, abs=1e-5)
    assert not paired.is_equivalent


def test_swapping_the_arms_changes_the_sign_only() -> None:
    first, second = [True, True, False, False, True], [True, False, False, True, False]
    one, other = paired_difference(first, second, 0.1), paired_difference(second, first, 0.1)
    assert one.difference.value == -other.difference.value == pytest.approx(-0.2)
    assert ends(one.difference) == pytest.approx(tuple(-end for end in reversed(ends(other.difference))))
    assert one.tost_p == pytest.approx(other.tost_p)


@pytest.mark.parametrize(("num", "is_equivalent"), [(8, False), (58, False), (59, True)])
def test_agreement_everywhere_is_no_proof_if_there_is_little_of_it(num: int, is_equivalent: bool) -> None:
    """A fault in 5% of the trials is in none of n with probability 0.95^n, 4.8% for 59."""
    outcome = [i % 3 == 0 for i in range(num)]
    paired = paired_difference(outcome, outcome, margin=0.05)
    assert paired.difference.value == 0.0
    assert paired.tost_p == pytest.approx(0.95**num, rel=1e-6)
    assert paired.is_equivalent == is_equivalent
    assert ends(paired.difference)[1] > 0  # never infinitely certain


@pytest.mark.parametrize("num", [33, 59, 100])
def test_a_fault_that_goes_one_way_seldom_passes_as_equivalent(num: int) -> None:
    """The exact level, where the second arm fails in 5% of the trials and is never better: each number of failures with
    its binomial probability. (With the variance that is seen it would be 18% for 33 trials, 12% for 100.)"""
    level = 0.0
    for failures in range(num + 1):
        second = [0.0] * failures + [1.0] * (num - failures)
        if paired_difference([1.0] * num, second, margin=0.05).is_equivalent:
            level += stats.binom.pmf(failures, num, 0.05)
    assert level <= 0.05 + 1e-12
    if num >= 100:
        assert level > 0.02, "and not by refusing everything"


@pytest.mark.parametrize(("num", "rate"), [(5, 0.5), (12, 0.4)])
def test_a_difference_is_seldom_found_where_there_is_none(num: int, rate: float) -> None:
    """The exact level, where each arm alone succeeds in half of ``rate`` of the trials. The control is the normal law
    by itself, 10% for 5 trials."""
    level = level_of_control = 0.0
    for num_differing in range(num + 1):
        for only_first in range(num_differing + 1):
            first = [True] * only_first + [False] * (num - only_first)
            second = [False] * only_first + [True] * (num_differing - only_first) + [False] * (num - num_differing)
            paired = paired_difference(first, second, margin=0.1)
            low, high = ends(paired.difference)
            probability = stats.binom.pmf(num_differing, num, rate) * stats.binom.pmf(only_first, num_differing, 0.5)
            level += probability * (paired.difference_p < 0.05)
            level_of_control += probability * (not low <= 0 <= high)
    assert level <= 0.05 < level_of_control


def test_the_number_of_trials_that_decides() -> None:
    """About 190 of 200 pairs of equal arms are found equivalent. With a probability of 0.92 each, 162 or fewer would be
    in 1 run in 10^6. With a quarter of the trials few are."""
    generator = np.random.default_rng(0)

    def num_equivalent(num_trials: int) -> int:
        draws = generator.random((200, num_trials))
        return sum(paired_difference(u < 0.25, u > 0.75, 0.1).is_equivalent for u in draws)

    needed = num_trials_to_decide(0.5, 0.1)
    assert num_equivalent(needed) > 162
    assert num_equivalent(needed // 4) < 100


def test_a_difference_by_hand() -> None:
    """One of 8 differing trials goes the other way: McNemar's exact p is 2 * (1 + 8) / 2^8. With as many either way, or
    none, it is 1."""
    only_second, only_first = ([True] * 7 + [False] * 93, [False] * 7 + [True] + [False] * 92)
    assert paired_difference(only_first, only_second, 0.1).difference_p == pytest.approx(18 / 256)
    assert paired_difference([0, 1, 0], [1, 0, 0], 0.1).difference_p == 1
    assert paired_difference([0, 1, 0], [0, 1, 0], 0.1).difference_p == 1
    steady = paired_difference([0.0] * 100, [0.04, 0.05] * 50, 0.1)
    assert steady.difference_p == pytest.approx(2 * stats.norm.sf(4.5 / math.sqrt(0.205 + 1 - 0.2025)), rel=1e-6)


def test_bands_of_uniform_numbers_hold_as_often_as_they_say() -> None:
    """4,000 samples of 300 numbers in 20 bins, at 95%. The bounds fail with a probability of 1e-6 each if the bands are
    right; a band for another level is outside of them."""
    num_samples, level = 4000, 0.95
    rng = np.random.default_rng(5)
    values = np.sort(rng.random((num_samples, 300)), axis=1)
    counts = np.apply_along_axis(lambda row: np.histogram(row, 20, (0, 1))[0], 1, values)
    ranks = np.arange(300) / 300
    distances = np.maximum(values - ranks, ranks + 1 / 300 - values).max(axis=1)
    largest = np.abs(rng.standard_normal((num_samples, 5))).max(axis=1)

    def outside(level: float) -> list[int]:
        low, high = uniform_bins(300, 20, level)
        is_outside = [
            ((counts < low) | (counts > high)).any(axis=1),
            distances > uniform_distance(300, level),
            largest > normal_limit(5, level),
        ]
        return [int(one.sum()) for one in is_outside]

    most = stats.binom.isf(FALSE_ALARM, num_samples, 1 - level)
    least = stats.binom.ppf(FALSE_ALARM, num_samples, 1 - level)
    bins, distance, limit = outside(level)
    assert bins <= most and least <= distance <= most
    assert least - 0.002 * num_samples <= limit <= most, "Bonferroni costs 0.001 here"
    assert all(count > most for count in outside(0.85))


def test_paired_scores_by_hand() -> None:
    """Differences 0.5, -0.25, 0, 0.25: mean 1/8, squares that add to 3/8, variance (3/8 + 1 - 4/64) / 16."""
    paired = paired_difference([0.0, 1.0, 0.5, 0.25], [0.5, 0.75, 0.5, 0.5], margin=0.2)
    assert (paired.only_first, paired.only_second, paired.difference.value) == (1, 2, 0.125)
    half = 1.959964 * math.sqrt(1.3125) / 4
    assert ends(paired.difference) == pytest.approx((0.125 - half, 0.125 + half), abs=1e-6)
