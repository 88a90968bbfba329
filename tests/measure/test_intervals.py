"""Means, ratios and proportions against published numbers, hand-computed ones, and simulation.

The simulations use a fixed seed; each states how improbable its bound is when the interval is right.
"""

import math

import numpy as np
import pytest
from scipy import stats

from outrider.measure.intervals import bounded_mean, mean_std, paired_ratio, wald, wilson
from outrider.records import Interval

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
        means = np.array(tokens) / 30
        half = stats.t.ppf(0.975, 19) * means.std(ddof=1) / math.sqrt(20)
        covered_by_control += abs(means.mean() - truth) <= half
    at_least, at_most = stats.binom.interval(1 - FALSE_ALARM, num, 0.95)
    assert at_least <= covered <= at_most
    assert covered_by_control < at_least
