"""Schedules: how many tokens to draft in the next round.

``AdaptiveSchedule`` drafts as many as promise the most tokens per second. It looks at what earlier rounds committed and
at costs that were measured before the run, never at drafts that are not verified yet; so the number of drafted tokens
is known before they are drawn, and the output follows the target's law as it does for a constant K.

The estimate: with a_i the probability that the i-th drafted token stands if those before it do, a round of K drafted
tokens commits tau(K) tokens (speedup.py), and tokens per second are tau(K) over the seconds of such a round. Rows of a
batch are verified together, padded to the longest draft, so that a shorter draft in one row would save nothing: the
batch has one K, the best for the sum of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.decoding.batch import Row
from outrider.records import RowRound
from outrider.stats.speedup import expected_tokens

_PRIOR = 0.6  # a_1 before anything is known
_PRIOR_WEIGHT = 1.0  # in rounds; each a_i starts from the estimate of the one before it
_MEMORY = 0.95  # weight of a round after the next one, so that the estimate follows the text
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64  # rounds without drafts before another try; doubled with each that fails


class Schedule(Protocol):
    """Chooses K, round by round.

    Attributes:
        max_k: the most it will ever choose.
    """

    @property
    def max_k(self) -> int: ...

    def next_k(self, rows: Sequence[Row]) -> int:
        """K for the next round of these rows."""
        ...

    def learn(self, rounds: Sequence[RowRound]) -> None:
        """See what the last round committed."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantSchedule:
    """Always the same."""

    max_k: int

    def next_k(self, rows: Sequence[Row]) -> int:
        return self.max_k

    def learn(self, rounds: Sequence[RowRound]) -> None:
        pass


@dataclass(slots=True)
class _RowEstimate:
    """Rounds in which the i-th drafted token was judged, and in which it stood; older rounds count less."""

    judged: list[float]
    stood: list[float]

    def learn(self, round_: RowRound) -> None:
        if round_.num_drafted == 0:
            return
        for i in range(len(self.judged)):
            self.judged[i] *= _MEMORY
            self.stood[i] *= _MEMORY
        for i in range(min(round_.num_accepted + 1, round_.num_drafted)):
            self.judged[i] += 1.0
            self.stood[i] += i < round_.num_accepted

    def expected_tokens(self) -> list[float]:
        """tau(K) for K = 0, 1, ..."""
        acceptance, a = [], _PRIOR
        for judged, stood in zip(self.judged, self.stood, strict=True):
            a = (stood + _PRIOR_WEIGHT * a) / (judged + _PRIOR_WEIGHT)
            acceptance.append(a)
        return expected_tokens(acceptance)


@dataclass(slots=True)
class AdaptiveSchedule:
    """The K with the most expected tokens per second, 0 included.

    Where 0 is best it says so for a while, then tries the least K above it, since a draft that does not draft cannot
    show that it has become useful. Each try that fails doubles the while.

    Args:
        costs: K -> seconds of a round with K drafted tokens, measured; 0 is among them.
    """

    costs: Mapping[int, float]
    _estimates: dict[int, _RowEstimate] = field(default_factory=dict, init=False)
    _pause: int = field(default=_FIRST_PAUSE, init=False)
    _num_idle: int = field(default=0, init=False)

    @property
    def max_k(self) -> int:
        return max(self.costs)

    def next_k(self, rows: Sequence[Row]) -> int:
        totals = [0.0] * (self.max_k + 1)
        for row in rows:
            if not row.is_done:
                for k, tokens in enumerate(self._of(row.index).expected_tokens()):
                    # What goes beyond the row's end is not worth anything.
                    totals[k] += min(tokens, row.limit - row.length)
        best = max(sorted(self.costs), key=lambda k: totals[k] / self.costs[k])
        if best > 0:
            self._num_idle, self._pause = 0, _FIRST_PAUSE
            return best
        self._num_idle += 1
        if self._num_idle <= self._pause or self.max_k == 0:
            return 0
        self._num_idle, self._pause = 0, min(2 * self._pause, _LONGEST_PAUSE)
        return min(k for k in self.costs if k > 0)

    def learn(self, rounds: Sequence[RowRound]) -> None:
        for round_ in rounds:
            self._of(round_.row).learn(round_)

    def _of(self, row: int) -> _RowEstimate:
        if row not in self._estimates:
            self._estimates[row] = _RowEstimate([0.0] * self.max_k, [0.0] * self.max_k)
        return self._estimates[row]
