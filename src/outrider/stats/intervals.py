"""Means, ratios and proportions with their intervals. Numbers in, numbers out.

Times on a shared machine drift, so arms are measured in turn and compared pair by pair: effects common to the two runs
of a pair cancel in their ratio. Ratios of times are averaged as logarithms, where doubling and halving are symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval; the ends are None for a single value."""

    value: float
    low: float | None
    high: float | None
    level: float = 0.95

    def to_json(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high, "level": self.level}


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (None for one value)."""
    array = np.asarray(values, dtype=float)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95) -> Interval:
    """Geometric mean of the ratios of pairs, with the t interval of their logarithms."""
    assert len(numerators) == len(denominators) > 0
    logs = np.log(np.asarray(numerators, dtype=float) / np.asarray(denominators, dtype=float))
    mean = float(logs.mean())
    if len(logs) == 1:
        return Interval(math.exp(mean), None, None, level)
    half = float(stats.t.ppf((1 + level) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), level)


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95) -> Interval:
    """sum(numerators) / sum(denominators) over independent groups (prompts, say), with the t
    interval of the ratio estimator by linearisation (Cochran, Sampling Techniques, 1977, section 6.4).

    With sums and counts of the groups it is the mean over members that are correlated within a group.
    """
    ratio, error = _ratio_and_error(numerators, denominators)
    if error is None:
        return Interval(ratio, None, None, level)
    half = _t(level, len(numerators)) * error
    return Interval(ratio, ratio - half, ratio + half, level)


def bounded_mean(
    sums: Sequence[float], counts: Sequence[float], bounds: tuple[float, float], level: float = 0.95
) -> Interval:
    """Mean over members that are correlated within a group, each within the bounds, like the interval.

    As a share of the range, the mean has the variance of a proportion of n independent members, with n the effective
    sample size from the estimate of ``ratio_of_sums``. The interval is Wilson's (1927) with this n and the t quantile
    (Korn and Graubard, Survey Methodology 24, 1998; Dean and Pagano, J. Survey Statistics and Methodology 3, 2015).
    If groups do not differ, as when all members are at one bound, their variance is unknown, and n is the number of
    members.

    Args:
        sums, counts: of the members of each group.
    """
    mean, error = _ratio_and_error(sums, counts)
    if error is None:
        return Interval(mean, None, None, level)
    low, high = bounds
    mean = min(max(mean, low), high)  # beyond only by rounding
    if low == high:
        return Interval(mean, low, high, level)
    part = (mean - low) / (high - low)
    scatter, variance = part * (1 - part), (error / (high - low)) ** 2
    num_effective = scatter / variance if min(scatter, variance) > 0 else sum(counts)
    q = _t(level, len(counts)) ** 2 / num_effective
    centre, half = (part + q / 2) / (1 + q), math.sqrt(q * scatter + q * q / 4) / (1 + q)
    first, last = low + (high - low) * (centre - half), low + (high - low) * (centre + half)
    return Interval(mean, max(low, min(first, mean)), min(high, max(last, mean)), level)


def _ratio_and_error(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float | None]:
    """Ratio of the sums, and its standard error by linearisation; None for a single group."""
    assert len(numerators) == len(denominators) > 0 and sum(denominators) > 0
    a, b = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    ratio = float(a.sum() / b.sum())
    if len(a) == 1:
        return ratio, None
    return ratio, math.sqrt(float(((a - ratio * b) ** 2).sum()) * len(a) / (len(a) - 1)) / float(b.sum())


def wald(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Proportion with the normal interval, which is too narrow near 0 and 1; kept because other tools report it."""
    rate = successes / trials
    half = _z(level) * math.sqrt(rate * (1 - rate) / trials)
    return Interval(rate, max(0.0, rate - half), min(1.0, rate + half), level)


def wilson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Proportion with the score interval of Wilson (1927), which keeps its level for small counts too."""
    interval = stats.binomtest(successes, trials).proportion_ci(level, method="wilson")
    return Interval(successes / trials, float(interval.low), float(interval.high), level)


def uniform_bins(num_values: int, num_bins: int, level: float = 0.99) -> tuple[int, int]:
    """Bounds of the counts of independent uniform numbers in equal bins, which hold for all bins with a probability of
    at least ``level`` (Bonferroni)."""
    low, high = stats.binom.interval(1 - (1 - level) / num_bins, num_values, 1 / num_bins)
    return int(low), int(high)


def uniform_distance(num_values: int, level: float = 0.99) -> float:
    """Bound of the distance between the empirical distribution of independent uniform numbers and the uniform one,
    which holds with probability ``level`` (Kolmogorov and Smirnov)."""
    return float(stats.kstwo.ppf(level, num_values))


def normal_limit(num_values: int, level: float = 0.99) -> float:
    """Bound of the magnitude of standard normal numbers; it holds for all with a probability of at least ``level``."""
    return _z(1 - (1 - level) / num_values)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Difference of two mean scores on the same trials, second minus first.

    Attributes:
        only_first, only_second: trials in which only this arm succeeded (for other scores: had the higher score); the
            comparison rests on these.
        difference: with the normal interval of paired means.
        margin: means closer than this count as equivalent.
        tost_p: p-value of the two one-sided tests against a difference of at least ``margin`` either way
            (Schuirmann 1987), each by the normal distribution or, where that is larger, by the binomial one of faults
            in one direction. Below 0.05: equivalent within the margin.
        difference_p: two-sided p-value against no difference: the normal one or, where that is larger, that of the
            sign test over the trials in which the arms differ (for successes: McNemar's exact test).
    """

    only_first: int
    only_second: int
    difference: Interval
    margin: float
    tost_p: float
    difference_p: float

    @property
    def is_equivalent(self) -> bool:
        return self.tost_p < 0.05


def paired_difference(
    first: Sequence[float], second: Sequence[float], margin: float, level: float = 0.95
) -> PairedDifference:
    """Compare two arms trial by trial.

    With n trials and the differences d, the variance of their mean is estimated as
    (sum d^2 + 1 - (sum d)^2 / n) / n^2. The 1 adds half a trial won by the first arm only, and half a trial won by the
    second only, so that full agreement does not look like certainty.

    Args:
        first, second: the score of each trial, from 0 to 1; True or 1 is a success.
    """
    n = len(first)
    assert n == len(second) > 0 and margin > 0
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    value = float(differences.mean())
    se = math.sqrt(float((differences**2).sum()) + 1 - n * value**2) / n
    half = _z(level) * se
    tost_p = max(_p_of_worse(value, se, margin, n), _p_of_worse(-value, se, margin, n))
    only_first, only_second = int((differences < 0).sum()), int((differences > 0).sum())
    # A few differences in the same direction are not normal: five of five have a normal p of 0.04, and truly 0.06.
    sign_p = 2 * stats.binom.cdf(min(only_first, only_second), only_first + only_second, 0.5)
    return PairedDifference(
        only_first=only_first,
        only_second=only_second,
        difference=Interval(value, value - half, value + half, level),
        margin=margin,
        tost_p=float(tost_p),
        difference_p=float(min(1.0, max(2 * stats.norm.sf(abs(value) / se), sign_p))),
    )


def num_trials_to_decide(share: float, margin: float, power: float = 0.95) -> int:
    """Number of trials at which ``paired_difference`` finds two equal arms equivalent with a probability of about
    ``power``: the solution of margin n = (z_0.95 + z) sqrt(share n + 1), where a normal number is within z of
    0 with that probability.

    Args:
        share: the share of the trials in which the arms differ.
    """
    z = float(stats.norm.ppf(0.95) + stats.norm.ppf((1 + power) / 2))
    return math.ceil((z**2 * share + z * math.sqrt(z**2 * share**2 + 4 * margin**2)) / (2 * margin**2))


def _p_of_worse(value: float, se: float, margin: float, n: int) -> float:
    """Probability of a loss this small or smaller, if the second arm is worse by the margin: the larger of two
    p-values. The normal one covers differences both ways. A fault in one direction only, in a share ``margin`` of the
    trials, appears in few of them, and the observed variance is then no evidence; the number of losses is then
    binomial."""
    num_losses = math.ceil(-value * n - 1e-9)
    return max(stats.norm.sf((value + margin) / se), stats.binom.cdf(num_losses, n, min(1.0, margin)))


def _t(level: float, num_groups: int) -> float:
    return float(stats.t.ppf((1 + level) / 2, num_groups - 1))


def _z(level: float) -> float:
    return float(stats.norm.ppf((1 + level) / 2))
