"""Schedules: how many tokens to draft in the next round.

``AdaptiveSchedule`` drafts as many as promise the most tokens per second. It looks at what earlier rounds committed and
at what they took, never at drafts that are not verified yet; so the number of drafted tokens is known before they are
drawn, and the output follows the target's law as it does for a constant K.

The estimate: with a_i the probability that the i-th drafted token stands if those before it do, a round of K drafted
tokens commits tau(K) tokens (speedup.py), and tokens per second are tau(K) over the seconds of such a round, which
depend on the number of rows. Rows are verified together, padded to the longest draft, so that a shorter draft in one
row would save nothing: all rows have one K, the best for their sum, but for those with a constant K of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.decoding.batch import Row
from outrider.decoding.live_costs import LiveCosts
from outrider.records import RowRound
from outrider.stats.speedup import expected_tokens
from outrider.system.ranks import here

_PRIOR = 0.6  # a_1 before anything is known
_PRIOR_WEIGHT = 2.0  # in rounds; each a_i starts from the estimate of the one before it
# Of all rows so far, in the estimate of one: texts of a pair differ less than the first rounds of one text do, and with
# less weight two rejections end a row's drafts.
_OTHERS_WEIGHT = 8.0
_MEMORY = 0.95  # weight of a round after the next one, so that the estimate follows the text
_MEMORY_OF_ALL = 0.98  # of rows that may be many
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64  # rounds without drafts before another try; doubled with each that fails
_WORTH_A_CHANGE = 1.03  # times as many tokens per second: the first round of another K takes longer
_TRY_EVERY = 32  # rounds, at most, a K whose cost may be lower than it seems


class Schedule(Protocol):
    """Chooses K, round by round.

    Attributes:
        max_k: the most it will ever choose.
    """

    @property
    def max_k(self) -> int: ...

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        """K for the next round of these rows, which is computed for ``num_rows`` rows."""
        ...

    def learn(self, rounds: Sequence[RowRound]) -> None:
        """See what the last round committed."""
        ...

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        """See what a round took that was computed for so many rows with k drafted tokens, as the one before it was, and
        did nothing else."""
        ...

    def forget(self, index: int) -> None:
        """A row has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantSchedule:
    """Always the same."""

    max_k: int

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        return self.max_k

    def learn(self, rounds: Sequence[RowRound]) -> None:
        pass

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        pass

    def forget(self, index: int) -> None:
        pass


@dataclass(slots=True)
class _RowEstimate:
    """Rounds in which the i-th drafted token was judged, and in which it stood; each round weighs ``memory`` times what
    the next one does."""

    judged: list[float]
    stood: list[float]
    memory: float

    def learn(self, round_: RowRound) -> None:
        if round_.num_drafted == 0:
            return
        for i in range(len(self.judged)):
            self.judged[i] *= self.memory
            self.stood[i] *= self.memory
        for i in range(min(round_.num_accepted + 1, round_.num_drafted)):
            self.judged[i] += 1.0
            self.stood[i] += i < round_.num_accepted

    def acceptance(self, prior: Sequence[float] | None = None) -> list[float]:
        """a_1, a_2, ... Each starts from its prior; without priors from the estimate of the one before it."""
        acceptance, a = [], _PRIOR
        weight = _PRIOR_WEIGHT if prior is None else _OTHERS_WEIGHT
        for i, (judged, stood) in enumerate(zip(self.judged, self.stood, strict=True)):
            start = a if prior is None else prior[i]
            a = (stood + weight * start) / (judged + weight)
            acceptance.append(a)
        return acceptance


@dataclass(frozen=True, slots=True)
class Choice:
    """K at one load, and why.

    Attributes:
        seconds: K -> seconds of a round of ``num_rows`` rows.
        acceptance: that is assumed for every drafted token.
        best_k: with that acceptance.
        least_acceptance: from which on it pays to draft, to a hundredth; None if it never does.
    """

    num_rows: int
    seconds: Mapping[int, float]
    acceptance: float
    best_k: int
    least_acceptance: float | None


@dataclass(slots=True)
class AdaptiveSchedule:
    """The K with the most expected tokens per second at this load, 0 included.

    A new row starts from the acceptance of the rows before it. Where 0 is best, 0 is chosen for a while, then the best
    K above it is tried, since a draft that does not draft cannot show that it has become useful. Each try that fails
    doubles the while.

    Costs are corrected by the rounds that are run. At most every 32 rounds a K is tried that would be the best if its
    cost were as much lower as so few rounds of it leave possible.

    Args:
        costs: number of rows -> K -> seconds of a round of so many rows with K drafted tokens, measured before the run;
            0 is among the K, and the K are the same for all numbers of rows.
    """

    costs: Mapping[int, Mapping[int, float]]
    _live_costs: LiveCosts = field(init=False)
    _all_rows: _RowEstimate = field(init=False)
    _estimates: dict[int, _RowEstimate] = field(default_factory=dict, init=False)
    _pause: int = field(default=_FIRST_PAUSE, init=False)
    _num_idle: int = field(default=0, init=False)
    _num_since_try: int = field(default=0, init=False)
    _usual: int = field(default=0, init=False)  # the K of the last round that tried none
    _again: int | None = field(default=None, init=False)  # a K that is being tried

    def __post_init__(self) -> None:
        self._live_costs = LiveCosts(self.costs)
        self._all_rows = self._new_estimate(_MEMORY_OF_ALL)

    @property
    def max_k(self) -> int:
        return max(max(costs) for costs in self.costs.values())

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        if self._again is not None:
            k, self._again = self._again, None
            return k
        own = [row.request.num_draft_tokens for row in rows]
        least = max((k for k in own if k is not None), default=0)  # columns that are verified in any case
        totals = [0.0] * (self.max_k + 1)
        prior = self._all_rows.acceptance()
        for row, constant_k in zip(rows, own, strict=True):
            tokens = expected_tokens(self._of(row.index).acceptance(prior))
            for k in range(len(totals)):
                # Tokens beyond the row's end are worth nothing.
                totals[k] += min(tokens[k if constant_k is None else constant_k], row.limit - row.length)
        costs = self._live_costs
        rates = {k: totals[k] / costs.seconds(num_rows, max(k, least)) for k in costs.ks}
        best = max(rates, key=rates.__getitem__)
        if rates[best] < _WORTH_A_CHANGE * rates[self._usual]:
            best = self._usual
        self._usual = best
        self._num_since_try += 1
        if self._num_since_try >= _TRY_EVERY:
            self._num_since_try = 0
            tried = (k for k in costs.ks if k >= least)  # those that show what they cost
            tried_k = max(tried, key=lambda k: totals[k] / costs.least_seconds(num_rows, k), default=best)
            if tried_k != best:
                self._again = tried_k  # only the second round in a row shows what it costs
                return tried_k
        if best > 0:
            self._num_idle, self._pause = 0, _FIRST_PAUSE
            return best
        self._num_idle += 1
        if self._num_idle <= self._pause or self.max_k == 0:
            return 0
        self._num_idle, self._pause = 0, min(2 * self._pause, _LONGEST_PAUSE)
        return max((k for k in costs.ks if k > 0), key=rates.__getitem__)

    def choices(self) -> list[Choice]:
        """K before anything is known of the texts, for each load that was measured."""
        found = []
        for num_rows, seconds in sorted(self.costs.items()):
            paying = (percent / 100 for percent in range(101) if _best(seconds, percent / 100) > 0)
            found.append(Choice(num_rows, seconds, _PRIOR, _best(seconds, _PRIOR), next(paying, None)))
        return found

    def learn(self, rounds: Sequence[RowRound]) -> None:
        for round_ in rounds:
            self._all_rows.learn(round_)
            self._of(round_.row).learn(round_)

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        self._live_costs.learn(num_rows, k, here().shared(seconds))

    def forget(self, index: int) -> None:
        self._estimates.pop(index, None)

    def _of(self, row: int) -> _RowEstimate:
        if row not in self._estimates:
            self._estimates[row] = self._new_estimate(_MEMORY)
        return self._estimates[row]

    def _new_estimate(self, memory: float) -> _RowEstimate:
        return _RowEstimate([0.0] * self.max_k, [0.0] * self.max_k, memory)


def _best(seconds: Mapping[int, float], acceptance: float) -> int:
    """The K with the most tokens per second where every drafted token has this acceptance."""
    tokens = expected_tokens([acceptance] * max(seconds))
    return max(sorted(seconds), key=lambda k: tokens[k] / seconds[k])
