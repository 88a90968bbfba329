"""Estimates from the rounds of a pair: acceptance of its drafts, cost of its rounds, and K at each load.

A ``PairEstimates`` serves many generations, one after the other or concurrently, so that each begins with what earlier
ones have learned. It holds no sequences, and chooses nothing (schedule.py does).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.decoding.cost_model import LiveCosts
from outrider.records import RowRound
from outrider.system.ranks import current_ranks

PRIOR = 0.6
"""a_1 before anything is known."""

_PRIOR_WEIGHT = 2.0  # in drafted tokens
_NEXT_WEIGHT = 16.0  # of a_i in the estimate of a_i+1: they differ little, and later ones are rare
# Of the pair's acceptance in the estimate of one row. Sequences of a pair differ less than the first rounds of one
# sequence do: those of the embedded pair by 0.02, where a_i is 0.73 to 0.83.
_USUAL_WEIGHT = 24.0
_MEMORY = 0.95  # weight of a row's round after its next one, so that its estimate follows the sequence
_MEMORY_OF_ALL = 0.998  # and after the next one of any row, which may be many
_FIRST_TRY, _MORE_EACH_TRY, _LONGEST_WITHOUT = 2, 16, 64  # choices between tries
_A_SUCCESS = 1.1  # a K whose expected rate grows by this factor when tried is tried again soon


class Counts(NamedTuple):
    """Drafted and accepted tokens of one row in a round."""

    num_drafted: int
    num_accepted: int


@dataclass(slots=True)
class Estimate:
    """Acceptance over all rows: how often the i-th drafted token was verified, and how often accepted. A round with
    drafts weighs ``_MEMORY_OF_ALL`` times as much as the next one of any row."""

    verified: list[float]
    accepted: list[float]

    def learn(self, rounds: Sequence[Sequence[Counts]]) -> None:
        """
        Args:
            rounds: the counts of each, by row; the oldest first.
        """
        verified, accepted, weight = [0.0] * len(self.verified), [0.0] * len(self.accepted), 1.0
        for rows in reversed(rounds):
            drafted = [row for row in rows if row.num_drafted > 0]
            for row in drafted:
                for i in range(num_verified(row)):
                    verified[i] += weight
                    accepted[i] += weight * (i < row.num_accepted)
            weight *= _MEMORY_OF_ALL ** len(drafted)
        self.verified = [weight * old + new for old, new in zip(self.verified, verified, strict=True)]
        self.accepted = [weight * old + new for old, new in zip(self.accepted, accepted, strict=True)]

    def acceptance(self, doubt: float = 0.0) -> list[float]:
        """a_1, a_2, ..., each starting from the estimate of the one before it.

        Args:
            doubt: standard errors above the estimate.
        """
        acceptance, a, weight = [], PRIOR, _PRIOR_WEIGHT
        for verified, accepted in zip(self.verified, self.accepted, strict=True):
            a = (accepted + weight * a) / (verified + weight)
            acceptance.append(min(1.0, a + doubt * math.sqrt(a * (1 - a) / (verified + weight))))
            weight = _NEXT_WEIGHT
        return acceptance


@dataclass(slots=True)
class RowEstimate:
    """Deviation of one row's acceptance from the usual one: a single number for all positions, since a sequence has too
    few rounds for more. Each round weighs ``_MEMORY`` times as much as the next one."""

    verified: float = 0.0
    surplus: float = 0.0  # accepted tokens beyond the expected number

    def learn(self, round_: RowRound, usual: Sequence[float]) -> None:
        """
        Args:
            usual: a_1, a_2, ... of all rows.
        """
        if round_.num_drafted > 0:
            num = num_verified(round_)
            self.verified = _MEMORY * self.verified + num
            self.surplus = _MEMORY * self.surplus + round_.num_accepted - sum(usual[:num])

    @property
    def shift(self) -> float:
        """Acceptance minus the usual one."""
        return self.surplus / (self.verified + _USUAL_WEIGHT)


def num_verified(round_: Counts | RowRound) -> int:
    """Number of drafted tokens up to the first rejected one."""
    return min(round_.num_accepted + 1, round_.num_drafted)


@dataclass(slots=True)
class KHistory:
    """K at one load, and the tries of other K.

    Attributes:
        usual_k: the last K chosen and not merely tried; None before the first.
        time_s: about the seconds of rounds since a K was last tried only because it had not run for long.
    """

    usual_k: int | None = None
    time_s: float = 0.0
    _tried: tuple[int, float] | None = None  # the last K tried, and its expected rate over that of the usual one
    _num_tries: int = 0
    _num_since_try: int = 0

    def may_try(self, rates: Mapping[int, float]) -> bool:
        """Whether K was chosen often enough since the last try, this time included. Call it once per choice.

        Args:
            rates: K -> expected tokens per second.
        """
        assert self.usual_k is not None
        self._num_since_try += 1
        if self._tried is not None:
            k, expected = self._tried
            self._tried = None
            if rates[k] / rates[self.usual_k] > _A_SUCCESS * expected:
                self._num_tries = 0
        return self._num_since_try >= min(_FIRST_TRY + _MORE_EACH_TRY * self._num_tries, _LONGEST_WITHOUT)

    @property
    def may_try_again(self) -> bool:
        """Whether K was chosen as often as before a first try."""
        return self._num_since_try >= _FIRST_TRY

    def note_try(self, k: int, rates: Mapping[int, float]) -> None:
        assert self.usual_k is not None
        self._tried = k, rates[k] / rates[self.usual_k]
        self._num_tries += 1
        self._num_since_try = 0


@dataclass(slots=True)
class PairEstimates:
    """Acceptance and cost estimates of one pair, under one rule.

    Schedules of several threads may share it. A round is only queued, without a lock and within a microsecond or two;
    learning takes twenty when the round's own work has evicted the CPU caches. For all else schedules hold ``lock``,
    and call ``catch_up`` before they read.

    Attributes:
        costs: of rounds, measured before and corrected since.
        acceptance: over all rows.
    """

    costs: LiveCosts
    acceptance: Estimate = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _k_histories: dict[int, KHistory] = field(default_factory=dict, init=False)
    # Queued rounds and times. Another thread may append to a deque while this one empties it.
    _rounds: deque[Sequence[Counts]] = field(default_factory=deque, init=False)
    _times: deque[tuple[int, int, float]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        max_k = self.costs.ks[-1]
        self.acceptance = Estimate([0.0] * max_k, [0.0] * max_k)

    def note(self, rounds: Sequence[RowRound]) -> None:
        """Queue the counts of a round."""
        self._rounds.append([Counts(round_.num_drafted, round_.num_accepted) for round_ in rounds])

    def note_time(self, num_rows: int, k: int, seconds: float) -> None:
        """Queue the time of a round; see ``LiveCosts.learn``."""
        self._times.append((num_rows, k, seconds))

    def catch_up(self) -> None:
        """Learn from the queued rounds. The ranks of a job use the times of the first rank."""
        self.acceptance.learn([self._rounds.popleft() for _ in range(len(self._rounds))])
        times = [self._times.popleft() for _ in range(len(self._times))]
        for time in current_ranks().shared(times):
            self.costs.learn(*time)

    def k_history(self, num_rows: int) -> KHistory:
        """History of K at this load: at the nearest measured number of rows."""
        return self._k_histories.setdefault(self.costs.nearest_size(num_rows), KHistory())
