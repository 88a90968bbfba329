"""Means, ratios and proportions with their intervals. Numbers in, numbers out.

Times on a shared machine drift, so arms are measured in turn and compared pair by pair: effects common to the two runs
of a pair cancel in their ratio. Ratios of times are averaged as logarithms, where doubling and halving are symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from outrider.records import Interval


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


def bounded_mean(
    sums: Sequence[float], counts: Sequence[float], bounds: tuple[float, float], level: float = 0.95
) -> Interval:
    """Mean over members that are correlated within a group, each within the bounds, like the interval.

    As a share of the range, the mean has the variance of a proportion of n independent members, with n the effective
    sample size from the variance of the ratio estimator (Cochran, Sampling Techniques, 1977, section 6.4). The interval
    is Wilson's (1927) with this n and the t quantile (Korn and Graubard, Survey Methodology 24, 1998; Dean and Pagano,
    J. Survey Statistics and Methodology 3, 2015). If groups do not differ, as when all members are at one bound, their
    variance is unknown, and n is the number of members. ``sums``, ``counts``: of the members of each group."""
    assert len(sums) == len(counts) > 0 and sum(counts) > 0
    a, b = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    mean, num_groups = float(a.sum() / b.sum()), len(a)
    if num_groups == 1:
        return Interval(mean, None, None, level)
    variance = float(((a - mean * b) ** 2).sum()) * num_groups / (num_groups - 1) / float(b.sum()) ** 2
    low, high = bounds
    mean = min(max(mean, low), high)  # beyond only by rounding
    if low == high:
        return Interval(mean, low, high, level)
    part, variance = (mean - low) / (high - low), variance / (high - low) ** 2
    scatter = part * (1 - part)
    num_effective = scatter / variance if min(scatter, variance) > 0 else sum(counts)
    q = float(stats.t.ppf((1 + level) / 2, num_groups - 1)) ** 2 / num_effective
    centre, half = (part + q / 2) / (1 + q), math.sqrt(q * scatter + q * q / 4) / (1 + q)
    first, last = low + (high - low) * (centre - half), low + (high - low) * (centre + half)
    return Interval(mean, max(low, min(first, mean)), min(high, max(last, mean)), level)


def wald(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Proportion with the normal interval, which is too narrow near 0 and 1; kept because other tools report it."""
    rate = successes / trials
    half = float(stats.norm.ppf((1 + level) / 2)) * math.sqrt(rate * (1 - rate) / trials)
    return Interval(rate, max(0.0, rate - half), min(1.0, rate + half), level)


def wilson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Proportion with the score interval of Wilson (1927), which keeps its level for small counts too."""
    interval = stats.binomtest(successes, trials).proportion_ci(level, method="wilson")
    return Interval(successes / trials, float(interval.low), float(interval.high), level)
