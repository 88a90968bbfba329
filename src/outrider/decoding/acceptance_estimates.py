"""What rounds have shown of a pair: how often its drafts stand, what its rounds take, which K served which load.

A ``PairEstimates`` serves many generations, one after the other or at the same time, so that the second one begins with
what the first has found out. It holds nothing of any text, and chooses nothing (schedule.py does).
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
_NEXT_WEIGHT = 16.0  # of the estimate of one place, in that of the next: they differ little, and later ones are rare
# Of what is usual for the pair, in the estimate of one row. Texts of a pair differ less than the first rounds of one
# text do: those of the embedded pair by 0.02, where a_i is 0.73 to 0.83.
_USUAL_WEIGHT = 24.0
_MEMORY = 0.95  # weight of a row's round after its next one, so that its estimate follows the text
_MEMORY_OF_ALL = 0.998  # and after the next one of any row, which may be many
_FIRST_TRY, _MORE_EACH_TRY, _LONGEST_WITHOUT = 2, 16, 64  # choices from one try to the next
_A_SUCCESS = 1.1  # a K whose promise grows by this factor with its try is tried again soon


class Counts(NamedTuple):
    """Of one row in a round: tokens that were drafted, and that were accepted."""

    num_drafted: int
    num_accepted: int


@dataclass(slots=True)
class Estimate:
    """Of all rows: how often the i-th drafted token was judged, and how often it stood. A round with drafts weighs
    ``_MEMORY_OF_ALL`` times what the next one of any row does."""

    judged: list[float]
    stood: list[float]

    def learn(self, rounds: Sequence[Sequence[Counts]]) -> None:
        """
        Args:
            rounds: each of some rows; the oldest first.
        """
        judged, stood, weight = [0.0] * len(self.judged), [0.0] * len(self.stood), 1.0
        for rows in reversed(rounds):
            drafted = [row for row in rows if row.num_drafted > 0]
            for row in drafted:
                for i in range(num_judged(row)):
                    judged[i] += weight
                    stood[i] += weight * (i < row.num_accepted)
            weight *= _MEMORY_OF_ALL ** len(drafted)
        self.judged = [weight * old + new for old, new in zip(self.judged, judged, strict=True)]
        self.stood = [weight * old + new for old, new in zip(self.stood, stood, strict=True)]

    def acceptance(self, doubt: float = 0.0) -> list[float]:
        """a_1, a_2, ..., each starting from the estimate of the one before it.

        Args:
            doubt: how many standard errors above the estimate.
        """
        acceptance, a, weight = [], PRIOR, _PRIOR_WEIGHT
        for judged, stood in zip(self.judged, self.stood, strict=True):
            a = (stood + weight * a) / (judged + weight)
            acceptance.append(min(1.0, a + doubt * math.sqrt(a * (1 - a) / (judged + weight))))
            weight = _NEXT_WEIGHT
        return acceptance


@dataclass(slots=True)
class RowEstimate:
    """How the drafts of one row differ from the usual ones: by one number for all places, since a text has too few
    rounds to show more. Each of its rounds weighs ``_MEMORY`` times what the next one does."""

    judged: float = 0.0
    surplus: float = 0.0  # tokens that stood, beyond those that were to be expected

    def learn(self, round_: RowRound, usual: Sequence[float]) -> None:
        """
        Args:
            usual: a_1, a_2, ... of all rows.
        """
        if round_.num_drafted > 0:
            num = num_judged(round_)
            self.judged = _MEMORY * self.judged + num
            self.surplus = _MEMORY * self.surplus + round_.num_accepted - sum(usual[:num])

    @property
    def shift(self) -> float:
        """By how much its acceptance is above the usual one."""
        return self.surplus / (self.judged + _USUAL_WEIGHT)


def num_judged(round_: Counts | RowRound) -> int:
    """How many drafted tokens the rule has looked at: up to the first that fell."""
    return min(round_.num_accepted + 1, round_.num_drafted)


@dataclass(slots=True)
class KHistory:
    """Which K serves one load, and how often others were tried.

    Attributes:
        usual_k: the last that was chosen and not tried; None before the first.
        time_s: of rounds, about, since a K was tried for no other reason than that it had not run for long.
    """

    usual_k: int | None = None
    time_s: float = 0.0
    _tried: tuple[int, float] | None = None  # the last K tried, and what it promised, over the usual one
    _num_tries: int = 0
    _num_since_try: int = 0

    def may_try(self, rates: Mapping[int, float]) -> bool:
        """Whether K was chosen often enough, this time included, since one was tried. To be called once a choice.

        Args:
            rates: K -> expected tokens per second.
        """
        assert self.usual_k is not None
        self._num_since_try += 1
        if self._tried is not None:
            k, promised = self._tried
            self._tried = None
            if rates[k] / rates[self.usual_k] > _A_SUCCESS * promised:
                self._num_tries = 0
        return self._num_since_try >= min(_FIRST_TRY + _MORE_EACH_TRY * self._num_tries, _LONGEST_WITHOUT)

    @property
    def may_try_again(self) -> bool:
        """Whether K was chosen as often as it is before a first try."""
        return self._num_since_try >= _FIRST_TRY

    def note_try(self, k: int, rates: Mapping[int, float]) -> None:
        assert self.usual_k is not None
        self._tried = k, rates[k] / rates[self.usual_k]
        self._num_tries += 1
        self._num_since_try = 0


@dataclass(slots=True)
class PairEstimates:
    """What was learned of a target with a drafter, under one rule.

    The schedules of several threads may share it. Rounds are only noted, which needs no lock and takes a microsecond or
    two; to learn from one takes twenty where its own work has swept the processor's caches. For all else schedules hold
    ``lock``, and call ``catch_up`` before they read.

    Attributes:
        costs: of rounds, as they were measured before and corrected since.
        acceptance: of all rows.
    """

    costs: LiveCosts
    acceptance: Estimate = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _habits: dict[int, KHistory] = field(default_factory=dict, init=False)
    # Not learned yet. Another thread may append to a deque while this one empties it.
    _rounds: deque[Sequence[Counts]] = field(default_factory=deque, init=False)
    _times: deque[tuple[int, int, float]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        max_k = self.costs.ks[-1]
        self.acceptance = Estimate([0.0] * max_k, [0.0] * max_k)

    def note(self, rounds: Sequence[RowRound]) -> None:
        """A round has committed this."""
        self._rounds.append([Counts(round_.num_drafted, round_.num_accepted) for round_ in rounds])

    def note_time(self, num_rows: int, k: int, seconds: float) -> None:
        """A round took so long; see ``LiveCosts.learn``."""
        self._times.append((num_rows, k, seconds))

    def catch_up(self) -> None:
        """Learn what was noted, round by round. The processes of one job take the times of the first."""
        self.acceptance.learn([self._rounds.popleft() for _ in range(len(self._rounds))])
        times = [self._times.popleft() for _ in range(len(self._times))]
        for time in current_ranks().shared(times):
            self.costs.learn(*time)

    def habit(self, num_rows: int) -> KHistory:
        """At this load: that of the largest measured number of rows that is not above it."""
        return self._habits.setdefault(self.costs.size_below(num_rows), KHistory())
