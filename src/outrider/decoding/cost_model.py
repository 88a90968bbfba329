"""Costs of rounds while the loop runs: measured ones, corrected by the times of its own rounds.

Costs are measured in an idle process (measured_costs.py). A server shares its cores with clients, and rounds take
longer there, in other proportions: rounds that draft less suffer more from work done once per round. So each measured
cost has a factor of its own, a running average of the time of its rounds over the expected time. The machine's pace is
kept beside the factors: it changes from second to second, for all K alike, and affects no choice.

Measured costs may also be wrong, by any factor. Two rounds of one K far from the expected time, in the same direction,
replace its cost.

This module knows no rows and chooses nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

# The time of a round over the expected one is clipped to this factor and its inverse: other work may have delayed it.
_MOST = 1.5
_PACE_ROUNDS = 16  # over which the pace of the machine is averaged
_MOST_WEIGHT = 64.0  # in rounds of its K, over which a factor is averaged
_OWN = 0.7  # a round with this share of its own factor may change it at once
_NEXT_TO_NOTHING = 0.01  # times the expected time: the clock may be coarse
_KEPT = 0.9995  # weight of a round after the next one of any kind
_DOUBT = 0.5  # share by which a cost may be too high before any round of its K
# It falls with this power of the weight: faster than noise does (1/2), since each try of a K costs something.
_DOUBT_FALLS = 0.75


@dataclass(slots=True)
class _Size:
    """Costs at one number of rows.

    Attributes:
        measured: K -> seconds.
        pace: time of all rounds over the measured costs.
        factors: time of each K over its measured cost and the pace.
        recent: rounds behind the pace, by K. If all are of one K, its next round informs the pace alone; the more are
            of other K, the more it informs its factor.
        weights: rounds behind each factor, by how much they inform it; old ones count less.
        surprises: K -> seconds of its last round, where far from the expected time.
    """

    measured: Mapping[int, float]
    pace: float = 1.0
    num_rounds: int = 0
    factors: dict[int, float] = field(init=False)
    weights: dict[int, float] = field(init=False)
    recent: dict[int, float] = field(init=False)
    surprises: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.factors = dict.fromkeys(self.measured, 1.0)
        self.weights = dict.fromkeys(self.measured, 0.0)
        self.recent = dict.fromkeys(self.measured, 0.0)

    def seconds(self, k: int) -> float:
        return self.measured[k] * self.factors[k] * self.pace

    def least_seconds(self, k: int) -> float:
        """Optimistic cost: lower when fewer rounds of this K were seen."""
        return self.seconds(k) * (1 - _DOUBT * math.pow(1 + self.weights[k], -_DOUBT_FALLS))

    def num_seen(self, k: int) -> float:
        return self.weights[k] + self.recent[k]

    def learn(self, k: int, seconds: float) -> None:
        """Learn from the time of a round."""
        error = max(seconds / self.seconds(k), _NEXT_TO_NOTHING)
        self.num_rounds += 1
        for other in self.measured:
            self.weights[other] *= _KEPT
            self.recent[other] *= 1 - 1 / _PACE_ROUNDS
        self.recent[k] += 1
        own = 1 - self.recent[k] / sum(self.recent.values())
        believed = self._believed(k, error) if own > _OWN else 1.0
        for other in self.measured:  # costs measured together are wrong together
            if other == k or (min(k, other) > 0 and self.num_seen(other) == 0):
                self.factors[other] *= believed
        error = min(max(error / believed, 1 / _MOST), _MOST)
        self.pace *= 1 + (error - 1) / min(self.num_rounds, _PACE_ROUNDS)
        self.weights[k] = min(self.weights[k] + own, _MOST_WEIGHT)
        self.factors[k] *= 1 + (error - 1) * own / (1 + self.weights[k])

    def _believed(self, k: int, error: float) -> float:
        """Factor by which the cost of a K changes at once: if two consecutive rounds of it were far from the expected
        time, on the same side, the error of the nearer one."""
        expected = self.seconds(k)
        last = self.surprises.pop(k, expected) / expected
        if 1 / _MOST <= error <= _MOST:
            return 1.0
        is_second = not 1 / _MOST <= last <= _MOST
        if is_second and (last > 1) != (error > 1):
            return 1.0  # noise
        self.surprises[k] = error * expected
        if not is_second:
            return 1.0
        return min(last, error) if error > 1 else max(last, error)


class LiveCosts:
    """Seconds of a round, by its number of rows and of drafted tokens. At a number of rows that was not measured, the
    nearest one counts.

    Args:
        measured: number of rows -> K -> seconds; the K are the same for all numbers of rows.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]]) -> None:
        self._sizes = {num_rows: _Size(costs) for num_rows, costs in measured.items()}
        self.ks = tuple(sorted(next(iter(measured.values()))))
        self._nearest: dict[int, int] = {}  # kept results of nearest_size

    @property
    def measured(self) -> dict[int, Mapping[int, float]]:
        """The costs before any round."""
        return {num_rows: size.measured for num_rows, size in sorted(self._sizes.items())}

    def add(self, measured: Mapping[int, Mapping[int, float]]) -> None:
        """Add costs at other numbers of rows."""
        self._sizes |= {num_rows: _Size(costs) for num_rows, costs in measured.items()}
        self._nearest.clear()

    def nearest_size(self, num_rows: int) -> int:
        """The measured number of rows nearest to this one, by their ratio."""
        if num_rows not in self._nearest:
            ratio = {size: max(size, num_rows) / min(size, num_rows) for size in self._sizes}
            self._nearest[num_rows] = min(ratio, key=ratio.__getitem__)
        return self._nearest[num_rows]

    def seconds(self, num_rows: int, k: int) -> float:
        """Expected cost of a round; for a K that was not measured, that of the next larger one."""
        return self._at(num_rows).seconds(self._measured_k(k))

    def least_seconds(self, num_rows: int, k: int) -> float:
        """Optimistic cost: lower when fewer rounds of this K were seen."""
        return self._at(num_rows).least_seconds(self._measured_k(k))

    def num_seen(self, num_rows: int, k: int) -> float:
        """Rounds of this K behind its cost; old ones count less."""
        return self._at(num_rows).num_seen(k)

    def surprises(self, num_rows: int) -> set[int]:
        """The K whose last round was far from the expected time, so that another round must confirm its cost."""
        return set(self._at(num_rows).surprises)

    def learn(self, num_rows: int, k: int, seconds: float) -> None:
        """Learn from the time of a round without a prefill; rounds of a K that was not measured are ignored."""
        if k in self.ks:
            self._at(num_rows).learn(k, seconds)

    def _at(self, num_rows: int) -> _Size:
        return self._sizes[self.nearest_size(num_rows)]

    def _measured_k(self, k: int) -> int:
        return self.ks[min(bisect_left(self.ks, k), len(self.ks) - 1)]
