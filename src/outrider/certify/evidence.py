"""Tests of whether tokens follow the distributions that they should be drawn from. Numbers in, numbers out.

The tokens arrive one after the other, and p, the distribution of each given all before it, is known in full. Nothing
else is assumed: neither independence nor a large number of tokens. A statistic is a function of the token minus its
mean under p, so that its sum is a martingale if the tokens follow p; here it is an ``Increments``.

- ``Bet`` makes a test of such a sum: a gambler who stakes theta on every token has a wealth whose mean never rises
  above 1 if the tokens follow p, so that it ever reaches 1/a with probability at most a (Ville 1939). So 1 / wealth is
  a p-value, at any sample size and any stopping time. Wealths under several stakes may be averaged.
- ``pit_tests``: the tests of Kolmogorov and Smirnov and of Pearson on randomised probability integral transforms,
  which are independent and uniform if the tokens follow p (Rosenblatt 1952; Brockwell 2007). The number of tokens must
  have been chosen beforehand.
- ``holm`` bounds the probability of any false alarm among several tests (Holm 1979).
- ``detectable``, ``tokens_needed``: the power of a bet; ``estimate_tv``: the deviation that the tokens show.

Derivations: docs/how-it-works/certificates.md. This module knows neither models nor the meaning of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

POWER = 0.99  # at the stated limit of detection
_QUANTILE = 2.3263478740408408  # of the normal distribution, at POWER


@dataclass(frozen=True, slots=True)
class Increments:
    """A statistic X of n tokens, with its known moments and range: under p it has mean 0."""

    values: Floats  # X at the observed token [n]
    moments: Floats  # E X^2, E X^3 and E X^4 under p [3, n]
    lows: Floats  # -lows <= X <= highs for every token that p allows [n]
    highs: Floats

    def __getitem__(self, index: Any) -> Increments:
        return Increments(self.values[index], self.moments[:, index], self.lows[index], self.highs[index])

    def scaled(self, factors: Floats) -> Increments:
        """X times a factor for each token, which must not depend on the token. [n]"""
        is_negative = factors < 0
        lows, highs = np.where(is_negative, (self.highs, self.lows), (self.lows, self.highs))
        size = np.abs(factors)
        powers = np.stack([factors**power for power in (2, 3, 4)])
        return Increments(factors * self.values, powers * self.moments, size * lows, size * highs)

    @property
    def variance(self) -> float:
        """The variance of the sum under p."""
        return float(self.moments[0].sum())

    @property
    def z(self) -> float:
        """The sum over its standard deviation, for display; no p-value here is computed from it."""
        return float(self.values.sum()) / math.sqrt(self.variance) if self.variance > 0 else 0.0


def _exp_tail(x: Floats) -> Floats:
    """(e^x - 1 - x - x^2/2 - x^3/6) / x^4, which increases with x."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        direct = (np.expm1(x) - x - x**2 / 2 - x**3 / 6) / x**4
    series = 1 / 24 + x / 120 + x**2 / 720 + x**3 / 5040 + x**4 / 40320 + x**5 / 362880
    return np.where(np.abs(x) < 0.1, series, direct)


def log_mgfs(increments: Increments, theta: float) -> Floats:
    """Upper bound of log E exp(theta X) under p, for each token. [n]

    Beyond the third power of X, exp is bounded by its value at the largest X: for x <= h, e^x is at most
    1 + x + x^2/2 + x^3/6 + x^4 _exp_tail(h).
    """
    second, third, fourth = increments.moments
    tail = theta**4 * fourth * _exp_tail(theta * (increments.highs if theta > 0 else -increments.lows))
    logs: Floats = np.log1p(theta**2 * second / 2 + theta**3 * third / 6 + tail)
    return logs


@dataclass(frozen=True, slots=True)
class Bet:
    """Stakes +theta and -theta, with half of the capital each, chosen before the tokens are seen."""

    theta: float

    @classmethod
    def for_sample(cls, like: Increments, num_tokens: float, level: float) -> Bet:
        """The stake that needs the smallest sum of X to reach 1/level with about ``num_tokens`` tokens like the given
        ones; 0 if X never varies among them."""
        if not like.moments.any():
            return cls(0.0)
        guess = math.sqrt(2 * math.log(2 / level) / (num_tokens * float(like.moments[0].mean())))

        def least_sum(log_theta: float) -> float:
            theta = math.exp(log_theta)
            return (math.log(2 / level) + num_tokens * float(log_mgfs(like, theta).mean())) / theta

        # If X is seldom large, the best stake may be far below the one that its variance suggests.
        bounds = math.log(guess) - 7.0, math.log(guess) + 0.5
        return cls(math.exp(optimize.minimize_scalar(least_sum, bounds=bounds, method="bounded").x))

    def log_wealth(self, increments: Increments) -> float:
        """Log of the wealth, which is at least 1/a with probability at most a if the tokens follow p."""
        total = float(increments.values.sum())
        sides = [theta * total - float(log_mgfs(increments, theta).sum()) for theta in (self.theta, -self.theta)]
        return float(np.logaddexp(sides[0], sides[1])) - math.log(2)

    def threshold(self, increments: Increments, level: float) -> float:
        """The least sum of X at which the stake +theta alone reaches 1/level."""
        return (math.log(2 / level) + float(log_mgfs(increments, self.theta).sum())) / self.theta


def p_value(log_wealth: float) -> float:
    return math.exp(min(0.0, -log_wealth))


def mean_wealth(log_wealths: Sequence[float], num_accounts: int) -> float:
    """Log of the mean over ``num_accounts`` accounts; those not given were never staked and hold 1."""
    assert len(log_wealths) <= num_accounts
    idle = [0.0] * (num_accounts - len(log_wealths))
    return float(np.logaddexp.reduce([*log_wealths, *idle])) - math.log(num_accounts)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one test."""

    name: str
    statistic: float  # for display: a z, a distance, a chi-square; the log of the wealth of averaged accounts
    p: float  # p-value, uniform or larger if the tokens follow p
    threshold: float = 0.0  # a p-value at or below it raises an alarm; set by ``holm``

    @property
    def is_alarm(self) -> bool:
        return self.p <= self.threshold


def pit_tests(pits: Floats) -> list[Finding]:
    """Test whether numbers are independent and uniform. Their count must not depend on them. [n]"""
    num_bins = max(2, min(20, len(pits) // 50))  # with fewer per bin Pearson's tail is not that of chi-square
    counts = np.histogram(pits, bins=num_bins, range=(0.0, 1.0))[0]
    found: dict[str, Any] = {"pit-ks": stats.kstest(pits, "uniform"), "pit-chi2": stats.chisquare(counts)}
    return [Finding(name, float(one.statistic), float(one.pvalue)) for name, one in found.items()]


def holm(tests: Sequence[Finding], level: float) -> list[Finding]:
    """Set the thresholds such that the probability of any false alarm is at most ``level``. Starting from the smallest
    p, each is compared with the level over the number of tests left, until one raises no alarm."""
    results, is_open = list(tests), True
    for place, i in enumerate(sorted(range(len(tests)), key=lambda i: tests[i].p)):
        results[i] = replace(tests[i], threshold=level / (len(tests) - place) if is_open else 0.0)
        is_open = is_open and results[i].is_alarm
    return results


class Drift(NamedTuple):
    """E X and E X^2 if the tokens followed another distribution r, and the total variation between r and p. [n] each"""

    means: Floats
    seconds: Floats
    distances: Floats


def rate_bound(num_events: int, num_trials: int) -> float:
    """Upper bound of the rate of events, with confidence POWER (Poisson, Garwood 1936)."""
    return float(stats.chi2.ppf(POWER, 2 * (num_events + 1))) / 2 / num_trials


def detectable(increments: Increments, drift: Drift, bet: Bet, level: float) -> float | None:
    """The least total variation, on average over the tokens, that ``bet`` detects with probability POWER; None if not
    even r itself is detected.

    The distribution detected is p' = (1 - e) p + e r, with r that of ``drift``. Its total variation from p is e
    TV(p, r), and the sum of X has mean e sum(means) and a variance of at most (1 - e) sum(E_p X^2) + e sum(E_r X^2).
    The least e is the one at which the threshold lies POWER's normal quantile below that mean. (The normal distribution
    is used for the power only, never for a p-value.)
    """
    share = _least_share(increments, bet, level, float(drift.means.sum()), float(drift.seconds.sum()))
    return None if share is None else share * float(drift.distances.mean())


def detectable_reuse(products: Increments, bet: Bet, level: float, reused: float) -> float | None:
    """The least share of tokens drawn with the random number of an earlier one that ``bet`` detects with probability
    POWER; None if not even all are detected. Given are the rank of each token times that of its partner, and the mean
    of their sum if every token were drawn with its partner's number."""
    # The square of such a product is largest where ranks are continuous: 1/80, and 1/144 for independent numbers.
    return _least_share(products, bet, level, reused, 144 / 80 * products.variance)


def _least_share(increments: Increments, bet: Bet, level: float, pull: float, second: float) -> float | None:
    """The least e such that the sum of X reaches the threshold with probability POWER, if it has the mean e ``pull``
    and at most the variance (1 - e) sum(E_p X^2) + e ``second``. None where e would exceed 1."""
    if bet.theta == 0:
        return None
    least, own = bet.threshold(increments, level), increments.variance

    def lack(e: float) -> float:
        return least + _QUANTILE * math.sqrt((1 - e) * own + e * second) - e * pull

    return None if lack(1.0) > 0 else float(optimize.brentq(lack, 0.0, 1.0))


def estimate_tv(increments: Increments, drift: Drift) -> tuple[float, float] | None:
    """The total variation, on average over the tokens, of the mixture (1 - e) p + e r that fits the sum of X, and its
    standard error under p: e = sum(X) / sum(E_r X). Negative if the tokens deviate in the opposite direction; None if X
    does not distinguish r from p."""
    pull = float(drift.means.sum())
    if pull <= 0:
        return None
    scale = float(drift.distances.mean()) / pull
    return scale * float(increments.values.sum()), scale * math.sqrt(increments.variance)


def tokens_to_alarm(p: float, num_tokens: int, level: float) -> int:
    """About how many tokens raise an alarm with probability POWER, if ``num_tokens`` gave a p above ``level``.

    With its best stake a bet needs the z t = sqrt(2 log(2/level)), and at another z its log wealth is t z - t^2/2 -
    log 2; z grows with the root of the number of tokens. At p = 1 the wealth may be lower, and the number higher.
    """
    t = math.sqrt(2 * math.log(2 / level))
    z = (-math.log(p) + t**2 / 2 + math.log(2)) / t
    return math.ceil(num_tokens * ((t + _QUANTILE) / z) ** 2)


def tokens_needed(increments: Increments, drift: Drift, wanted: float, level: float) -> int | None:
    """The number of tokens like these that makes ``wanted`` detectable: ``detectable`` solved for the sample size. None
    if r is not that far from p, or X does not distinguish them."""
    e = wanted / float(drift.distances.mean()) if drift.distances.any() else math.inf
    variance, pull = float(increments.moments[0].mean()), e * float(drift.means.mean())
    if e > 1 or pull <= 0:
        return None
    spread = (1 - e) * variance + e * float(drift.seconds.mean())

    def lack(log_n: float) -> float:
        n = math.exp(log_n)
        theta = Bet.for_sample(increments, n, level).theta
        least = (math.log(2 / level) + n * float(log_mgfs(increments, theta).mean())) / theta
        return least + _QUANTILE * math.sqrt(n * spread) - n * pull

    low, high = math.log(10), math.log(1e12)
    if lack(high) > 0:
        return None
    return 10 if lack(low) <= 0 else math.ceil(math.exp(optimize.brentq(lack, low, high)))
