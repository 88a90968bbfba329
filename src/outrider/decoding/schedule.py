"""Schedules: how many tokens to draft in the next round.

``AdaptiveSchedule`` chooses the K with the most expected tokens per second. It measures nothing beforehand: it begins
with a guess from the sizes of the models, and learns from its own rounds (of earlier generations too).

A round for which K was chosen commits tau(K) tokens on average (``expected_tokens``), with a_i how often a row's i-th
token was drafted and accepted where those before it were. Its time is that of the columns that were verified: a look-up
drafts fewer tokens than K, often none. All rows share one K: they are verified together, padded to the longest draft,
so that a shorter draft in one row would save nothing. (A row may have a constant K of its own.)

K is chosen before the drafts are drawn, from committed tokens and times alone, never from unverified drafts. So the
output follows the target's distribution, as with a constant K. Two sequences with one seed share their noise, though:
where it matters, K is constant in rows whose seed was given (``Decoder.request``).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, NamedTuple, Protocol

import numpy as np

from outrider.decoding.batch import Row
from outrider.drafters.base import Drafter
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule

# Acceptance
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0  # of a_1, in drafted tokens
_NEXT_WEIGHT = 6.0  # of a_i in the estimate of a_i+1: they differ little, and later ones are rare
_MEMORY = 0.97  # weight of a round after its next one, so that the estimate follows the text
_FADE = 0.99  # of what is known, for each round without drafts since

# Times. A guess: each further token of a forward takes 7% of a plain step, a draft step its share of the sizes.
_MORE = 0.07
_GUESS_SD = 0.4  # of the logarithm of a cost, before a round of its K
_DRIFT = 2e-5  # of the first doubt that comes back with every round, as sequences grow and neighbours come
_PACE_SD = 0.04  # of the machine's pace, from round to round
_SPREAD = 0.1  # mean distance of a time from the median, on a logarithmic scale, before any is known
_FLOOR = 4e-4  # variance of a median that more rounds do not lessen
_SURPRISE = 4.0  # squared standard errors

# Choices
_ROUNDS, _ROUNDS_AGAIN = 4, 8  # between choices, and if K did not change: a choice takes a tenth of a millisecond
_CHANGE = 1.04  # times as many tokens per second: the first round of another K takes longer
# With several sequences, drafting must promise 5%, to cover hidden costs: the draft must prefill each prompt, and rows
# that began together end one after the other.
_WORTH_DRAFTS = 1.05
_TRIED_ROUNDS = 3  # the first one of a K takes longer
_PLAIN_ROUNDS = 2  # and the second without drafts: until then the CPU caches hold the draft
# Tries of another K may cost this share of all rounds, two rounds at the start, and twelve after a long time.
_LOST, _FIRST_LOST, _MOST_LOST = 0.007, 2.0, 12.0
_LENGTH = 2048  # tokens, up to which attention is a small part of a round
_SWITCH = 0.5  # rounds that a change of K costs


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """tau(K), the expected tokens committed by a round of K drafted tokens, for K = 0, 1, ..., len(acceptance).

    tau(K) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K, where a_i of ``acceptance`` is the probability that the i-th drafted
    token is accepted if those before are; for equal a_i tau(K) is (1 - alpha^(K+1)) / (1 - alpha) (Leviathan et al.
    2211.17192, equation 1; there K is gamma)."""
    expected, reach = [1.0], 1.0
    for a in acceptance:
        reach *= a
        expected.append(expected[-1] + reach)
    return expected


class RowCounts(NamedTuple):
    """Tokens of a row in a round: the most that it was to draft, drafted, and accepted."""

    num_wanted: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The facts of a round from which a schedule learns."""

    k: int  # the number chosen for the round
    num_rows: int  # rows that were computed
    num_columns: int  # tokens verified beyond the first, in each row, padding included
    rows: Sequence[RowCounts]  # the counts of each sequence
    seconds: float | None  # the time of the round; None after a prefill or another K, or when the loop goes idle
    longest: int = 0  # tokens of the longest sequence


class Schedule(Protocol):
    """Chooses K, round by round, up to ``max_k``."""

    @property
    def max_k(self) -> int: ...

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        """K for the next round of these rows, which is computed for ``num_rows`` rows."""
        ...

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn from a round. Another may have been started since."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantSchedule:
    """A constant K, in a cache and a session with room for ``most``, if that is more."""

    k: int
    most: int = 0

    @property
    def max_k(self) -> int:
        return max(self.k, self.most)

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        return self.k

    def learn(self, outcome: RoundOutcome) -> None:
        pass


def favoured_ks(target: LM, drafter: Drafter) -> tuple[int, ...]:
    """Values of K for adaptive schedules, 0 included: those that the execution or the drafter favours, and the drafter
    can draft."""
    most = drafter.most_drafted
    return tuple(k for k in sorted({*target.execution.favoured_k, *drafter.favoured_k}) if most is None or k <= most)


class _Chain:
    """Counts of chains of tokens: how often one of i tokens might grow, and how often it did. Each round weighs
    ``_MEMORY`` times as much as the next one."""

    def __init__(self, most: int) -> None:
        self._tried, self._grown = [0.0] * most, [0.0] * most

    def learn(self, chains: Sequence[tuple[int, int]]) -> None:
        self._tried = [_MEMORY * num for num in self._tried]
        self._grown = [_MEMORY * num for num in self._grown]
        for length, limit in chains:
            for i in range(min(length + 1, limit)):
                self._tried[i] += 1
                self._grown[i] += i < length

    def chances(self, prior: float, fade: float = 1.0) -> list[float]:
        """The probability that a chain of 0, 1, ... tokens grows, each beginning with the one before it."""
        found, weight = [], _PRIOR_WEIGHT
        for tried, grown in zip(self._tried, self._grown, strict=True):
            prior = (fade * grown + weight * prior) / (fade * tried + weight)
            found.append(prior)
            weight = _NEXT_WEIGHT
        return found


class _Load:
    """Seconds of rounds at about one number of rows and one length, and K there.

    The logarithm of a time is that of the guess, plus a deviation for each K, plus the machine's pace, which changes
    from round to round for all K alike, and so affects no choice. A Kalman filter estimates deviations and pace
    together (Kalman 1960): near K deviate alike, and two K are compared by rounds that ran close to one another.
    A surprise is a change of the pace, unless another K contradicts it.

    Attributes:
        usual_k: the last K chosen and not merely tried; None before the first.
        credit: what tries may cost, in rounds of the usual K.
    """

    def __init__(self, ks: Sequence[int], draft_share: float, drafts_at_once: bool, like: _Load | None) -> None:
        """``draft_share`` is the size of the draft over that of the target. The load begins with the deviations of
        another, ``like``."""
        self.usual_k: int | None = None
        self.credit = _FIRST_LOST
        self._ks, self._draft_share, self._drafts_at_once = ks, draft_share, drafts_at_once
        self._widths = _Chain(ks[-1])
        self._spread = _SPREAD
        places = np.log2(1 + np.array(ks))
        self._doubt = np.pad(_GUESS_SD**2 * np.exp(-np.abs(places[:, None] - places)), (0, 1))
        self._mean: Any = np.zeros(len(ks) + 1) if like is None else like._mean.copy()
        self._covariance: Any = self._doubt.copy() if like is None else like._covariance + self._doubt / 4
        self._covariance[-1, -1] += 100.0  # of the pace, which is the last entry
        self._index = [min(range(len(ks)), key=lambda i: abs(ks[i] - k)) for k in range(ks[-1] + 1)]

    def _log_guess(self, num_rows: int, k: int) -> float:
        num_steps = min(k, 1) if self._drafts_at_once else k
        return math.log(1 + _MORE * (num_rows * (k + 1) - 1) + self._draft_share * num_steps)

    def learn_width(self, outcome: RoundOutcome) -> None:
        most_wanted = max((row.num_wanted for row in outcome.rows), default=0)
        self._widths.learn([(outcome.num_columns, most_wanted)])

    def learn_times(self, num_rows: int, k: int, seconds: Sequence[float]) -> None:
        logs = [math.log(max(one, 1e-9)) for one in seconds]
        middle, num = median_low(logs), len(logs)
        if num > 1:
            self._spread += 0.1 * (sum(abs(one - middle) for one in logs) / (num - 1) - self._spread)
        noise = 1.5 * self._spread**2 / num + _FLOOR  # of a normal distribution the variance is 1.57 times the square
        i, covariance = self._index[k], self._covariance
        covariance += num * _DRIFT * self._doubt
        covariance[-1, -1] += num * _PACE_SD**2
        error = middle - self._log_guess(num_rows, k) - self._mean[i] - self._mean[-1]
        variance = covariance[i, i] + 2 * covariance[i, -1] + covariance[-1, -1] + noise
        if error**2 > _SURPRISE * variance:
            covariance[-1, -1] += error**2
            variance += error**2
        gain = covariance[i] + covariance[-1]
        self._mean += gain * (error / variance)
        covariance -= np.outer(gain, gain) / variance

    def seconds(self, num_rows: int, least_k: int) -> list[float]:
        """Expected time of a round for which K = 0, 1, ... was chosen; ``least_k`` tokens are verified in any case."""
        mean, pace = self._mean.tolist(), float(self._mean[-1])
        by_width = [
            math.exp(self._log_guess(num_rows, k) + mean[self._index[k]] + pace)
            for k in (max(k, least_k) for k in range(self._ks[-1] + 1))
        ]
        expected, reached = by_width[:1], 1.0
        for k, chance in enumerate(self._widths.chances(1.0), start=1):
            reached *= chance
            expected.append(expected[-1] + reached * (by_width[k] - by_width[k - 1]))
        return expected

    def doubts(self, k: int) -> list[float]:
        """Standard error of the logarithm of each cost over that of k, in the order of the K."""
        i, variances = self._index[k], np.diagonal(self._covariance)[:-1]
        of_ratios = variances + variances[i] - 2 * self._covariance[i, :-1]
        found: list[float] = np.sqrt(np.maximum(of_ratios, 0.0)).tolist()
        return found


def _load_of(num_rows: int, longest: int) -> tuple[int, int]:
    """Logarithms of a load: of the number of rows, to base 2; and of the length over 2,048 tokens, to base 4, 0 below.
    The costs of attention grow with the length, more for the columns of a verify than for a draft with a window."""
    return round(math.log2(num_rows)), ((longest // _LENGTH).bit_length() + 1) // 2


class Estimates:
    """Estimates from the rounds of a pair under one rule, for any number of generations, also at the same time.
    Thread-safe."""

    def __init__(self, ks: Sequence[int], draft_share: float = 0.1, drafts_at_once: bool = False) -> None:
        self.ks = tuple(ks)
        self._guess = draft_share, drafts_at_once
        self._lock = threading.Lock()
        # Other threads append while one empties it.
        self._outcomes: deque[RoundOutcome] = deque()
        self._accepted = _Chain(self.ks[-1])
        self._num_plain = 0  # rounds since the last one with drafts
        self._loads: dict[tuple[int, int], _Load] = {}

    def note(self, outcome: RoundOutcome) -> None:
        """Queue a round, in a microsecond, to be learned with the next choice."""
        self._outcomes.append(outcome)

    def choose(self, rows: Sequence[Row], num_rows: int) -> tuple[int, int]:
        """K for these rows, and the number of rounds for which K stays."""
        with self._lock:
            self._catch_up()
            return self._choose(rows, num_rows)

    def _catch_up(self) -> None:
        outcomes = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        times: dict[tuple[int, int, int], list[float]] = {}
        for one in outcomes:
            if any(row.num_wanted for row in one.rows):
                self._accepted.learn([(row.num_accepted, row.num_wanted) for row in one.rows])
                self._at(*_load_of(one.num_rows, one.longest)).learn_width(one)
                self._num_plain = 0
            else:
                self._num_plain += 1
            if one.seconds is not None:
                _, length = _load_of(one.num_rows, one.longest)
                times.setdefault((one.num_rows, length, one.num_columns), []).append(one.seconds)
        for (num_rows, length, k), seconds in times.items():
            self._at(_load_of(num_rows, 0)[0], length).learn_times(num_rows, k, seconds)

    def _at(self, size: int, length: int) -> _Load:
        if (size, length) not in self._loads:
            nearest = min(self._loads, key=lambda one: abs(one[0] - size) + abs(one[1] - length), default=None)
            like = None if nearest is None else self._loads[nearest]
            self._loads[size, length] = _Load(self.ks, *self._guess, like)
        return self._loads[size, length]

    def _tokens(self, rows: Sequence[Row], fade: float = 1.0) -> list[float]:
        """Expected tokens of a round of all rows, for K = 0, 1, ..."""
        tau = expected_tokens(self._accepted.chances(_PRIOR, fade))
        constant = [k for row in rows if (k := row.request.num_draft_tokens) is not None]
        fixed = sum(tau[k] for k in constant)
        tokens = [fixed + (len(rows) - len(constant)) * one for one in tau]
        if len(rows) > 1 and not constant:
            tokens[0] *= _WORTH_DRAFTS
        return tokens

    def _choose(self, rows: Sequence[Row], num_rows: int) -> tuple[int, int]:
        load = self._at(*_load_of(num_rows, max((row.length for row in rows), default=0)))
        tokens = self._tokens(rows)
        seconds = load.seconds(num_rows, max((row.request.num_draft_tokens or 0 for row in rows), default=0))
        rates = {k: tokens[k] / seconds[k] for k in self.ks}
        best = max(rates, key=rates.__getitem__)
        if load.usual_k is not None and rates[best] < _CHANGE * rates[load.usual_k]:
            best = load.usual_k
        num = _ROUNDS_AGAIN if best == load.usual_k else _ROUNDS
        load.usual_k = best
        load.credit = min(load.credit + _LOST * num, _MOST_LOST)
        # The K with the best hopes, given how little is known of its cost, and of drafts after a time without them.
        hoped = self._tokens(rows, _FADE**self._num_plain)
        tried, most = None, _CHANGE * rates[best]
        for k, doubt in zip(self.ks, load.doubts(best), strict=True):
            hope = hoped[k] / seconds[k] * math.exp(doubt)
            if k != best and hope > most and _cost_of_try(k, best, rates, seconds) <= load.credit:
                tried, most = k, hope
        if tried is None:
            return best, num
        load.credit -= _cost_of_try(tried, best, rates, seconds)
        return tried, _rounds_of_try(tried)


def _rounds_of_try(k: int) -> int:
    return _TRIED_ROUNDS if k > 0 else _TRIED_ROUNDS + _PLAIN_ROUNDS - 1


def _cost_of_try(k: int, best: int, rates: dict[int, float], seconds: Sequence[float]) -> float:
    """Expected loss by a few rounds of k, in rounds of the best K."""
    return _SWITCH + _rounds_of_try(k) * seconds[k] / seconds[best] * max(0.0, 1 - rates[k] / rates[best])


class AdaptiveSchedule:
    """Chooses the K with the most expected tokens per second at this load, 0 included, for four rounds, or for eight if
    K did not change. Now and then another K is tried for a few rounds, since a K that never runs cannot show that its
    drafts have become better, or its cost lower."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates
        self._k = 0
        self._num_left = 0  # rounds until the next choice
        self._num_rows = 0  # at the last choice
        self._num_plain = 0  # consecutive rounds without drafts

    @property
    def max_k(self) -> int:
        return self._estimates.ks[-1]

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        if self._num_left == 0 or len(rows) != self._num_rows:
            self._num_left, self._num_rows = _ROUNDS, len(rows)
            # If all rows have a constant K, there is nothing to choose.
            if any(row.request.num_draft_tokens is None for row in rows):
                self._k, self._num_left = self._estimates.choose(rows, num_rows)
        self._num_left -= 1
        return self._k

    def learn(self, outcome: RoundOutcome) -> None:
        self._num_plain = self._num_plain + 1 if outcome.k == 0 else 0
        if 0 < self._num_plain <= _PLAIN_ROUNDS:
            outcome = RoundOutcome(0, outcome.num_rows, outcome.num_columns, outcome.rows, None)
        self._estimates.note(outcome)


@dataclass(frozen=True, slots=True)
class PairState:
    """Estimates of one pair, kept from one generation to the next, for each rule. Sampling options are not part of it:
    the last rounds correct the estimates soon."""

    target: LM
    drafter: Drafter
    _by_rule: dict[str, Estimates] = field(default_factory=dict, init=False)

    def estimates(self, rule: Rule) -> Estimates:
        if rule.name not in self._by_rule:
            sizes = [sum(one.numel() for one in lm.weights.parameters()) for lm in (self.target, *self.drafter.models)]
            share = sum(sizes[1:]) / max(1, sizes[0])
            # Drafters that favour some K draft all tokens in one forward.
            new = Estimates(favoured_ks(self.target, self.drafter), share, bool(self.drafter.favoured_k))
            self._by_rule.setdefault(rule.name, new)
        return self._by_rule[rule.name]
