"""Schedules: how many tokens to draft in the next round.

``AdaptiveSchedule`` drafts as many as promise the most tokens per second. It looks at what earlier rounds committed, of
earlier generations too, and at what they took, never at drafts that are not verified yet; so the number of drafted
tokens is known before they are drawn, and the output follows the target's law as it does for a constant K.

The estimate: with a_i the probability that the i-th drafted token stands if those before it do, a round of K drafted
tokens commits tau(K) tokens (speedup.py), and tokens per second are tau(K) over the seconds of such a round, which
depend on the number of rows. Rows are verified together, padded to the longest draft, so that a shorter draft in one
row would save nothing: all rows have one K, the best for their sum, but for those with a constant K of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from outrider.decoding.acceptance_estimates import PRIOR, KHistory, PairEstimates, RowEstimate
from outrider.decoding.batch import Row
from outrider.records import RowRound
from outrider.stats.speedup import expected_tokens

_WORTH_A_CHANGE = 1.03  # times as many tokens per second: the first round of another K takes longer
# The same for drafting at all where there are several rows. It costs what no round shows: the draft has to read each
# prompt, and rows that began together end one after the other.
_WORTH_DRAFTS = 1.05
# Rounds that a choice stands for, unless the number of rows changes before: to choose takes a tenth of a millisecond.
_ROUNDS = 4
_ROUNDS_AGAIN = 8  # where it is the last one again
_SEEN = 0.25  # of a round: how much one counts that was seen 2,800 rounds ago
_LOST = 0.03  # of the time, for checks of what was not seen for so long
_TRIED_ROUNDS = 2  # only the second of a K in a row shows what it costs
_PLAIN_ROUNDS = 2  # and of K = 0 the third: until then the processor's caches are full of the draft


_Rates = Callable[[Sequence[float], Callable[[int, int], float]], dict[int, float]]
"""Acceptance, and seconds by numbers of rows and K -> by K, tokens per second."""


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


@dataclass(frozen=True, slots=True)
class KChoice:
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
    """The K with the most expected tokens per second at this load, 0 included. A choice stands for four rounds, and for
    eight if it is the last one again. A round is only noted; it is learned from when K is chosen next.

    Acceptance and costs are those that all rows and rounds have shown, in earlier generations too
    (acceptance_estimates.py); what a row has shown itself moves its acceptance. From time to time another K is tried
    for two rounds (``_tried_k``): a draft that does not draft cannot show that it has become useful, nor a K that is
    never run that it costs less than was measured.

    K is chosen before the draft draws, from earlier rounds and texts alone. Their noise has no part in the next round
    or text, so that the law of each is that of a constant K. (Two texts of one seed meet the same noise, which is why
    K is constant in rows whose seed was given, where it matters: ``Decoder.stream_many``.)
    """

    learned: PairEstimates
    _estimates: dict[int, RowEstimate] = field(default_factory=dict, init=False)
    _usual: list[float] = field(init=False)  # acceptance of all rows when K was last chosen
    _k: int = field(default=0, init=False)
    _num_left: int = field(default=0, init=False)  # rounds for which it still stands
    _num_rows: int = field(default=0, init=False)  # that it was chosen for
    _num_plain: int = field(default=0, init=False)  # rounds in a row without drafts whose time was seen
    _noted: list[Sequence[RowRound]] = field(default_factory=list, init=False)  # since then, for the estimates

    def __post_init__(self) -> None:
        with self.learned.lock:
            self.learned.catch_up()
            self._usual = self.learned.acceptance.acceptance()

    @property
    def max_k(self) -> int:
        return self.learned.costs.ks[-1]

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        if self._num_left == 0 or len(rows) != self._num_rows:
            self._num_left, self._num_rows = _ROUNDS, len(rows)
            self._learn_of_rows(rows)
            with self.learned.lock:
                self.learned.catch_up()
                # Otherwise there is nothing to choose, and nothing to be learned of the choice.
                if any(row.request.num_draft_tokens is None for row in rows):
                    self._k = self._chosen_k(rows, num_rows)
        self._num_left -= 1
        return self._k

    def _learn_of_rows(self, rows: Sequence[Row]) -> None:
        """What these have shown since K was last chosen."""
        for row in rows:
            self._estimates.setdefault(row.index, RowEstimate())
        for round_ in chain.from_iterable(self._noted):
            if round_.row in self._estimates:
                self._estimates[round_.row].learn(round_, self._usual)
        self._noted.clear()

    def _chosen_k(self, rows: Sequence[Row], num_rows: int) -> int:
        costs, habit = self.learned.costs, self.learned.habit(num_rows)
        estimate = self.learned.acceptance
        usual = self._usual = estimate.acceptance()
        shifts = [self._estimates[row.index].shift for row in rows]
        least = max((row.request.num_draft_tokens or 0 for row in rows), default=0)  # that are verified in any case

        def rates(acceptance: Sequence[float], seconds: Callable[[int, int], float]) -> dict[int, float]:
            tokens = _tokens(rows, shifts, acceptance)
            found = {k: tokens[k] / seconds(num_rows, max(k, least)) for k in costs.ks}
            if len(rows) > 1 and least == 0:
                found[0] *= _WORTH_DRAFTS
            return found

        expected = rates(usual, costs.seconds)
        best = max(expected, key=expected.__getitem__)
        if habit.usual_k is not None and expected[best] < _WORTH_A_CHANGE * expected[habit.usual_k]:
            best = habit.usual_k
        if best == habit.usual_k:
            self._num_left = _ROUNDS_AGAIN
        habit.usual_k = best
        habit.time_s += self._num_left * costs.seconds(num_rows, max(best, least))
        tried = self._tried_k(habit, num_rows, least, expected, rates)
        if tried is None:
            return best
        habit.note_try(tried, expected)
        self._num_left = _rounds_of_try(tried)
        return tried

    def _tried_k(
        self, habit: KHistory, num_rows: int, least: int, expected: Mapping[int, float], rates: _Rates
    ) -> int | None:
        """A K to be tried in place of the best one, if there is one now: that would be the best if acceptance were as
        much higher as what was seen leaves possible, and

        - its last round was a surprise, so that another one has to tell what it costs;
        - or neither it nor any other on its side (drafting or not) was seen for long, and to try it is believed to lose
          little of the time since the last such check;
        - or its cost is as much lower as so few rounds of it leave possible.
        """
        costs, best = self.learned.costs, habit.usual_k
        surprises, may_try = costs.surprises(num_rows), habit.may_try(expected)
        assert best is not None
        if not (surprises or may_try):
            return None
        acceptance, worth = self.learned.acceptance.acceptance(doubt=1.0), _WORTH_A_CHANGE * expected[best]
        possible, hoped = rates(acceptance, costs.least_possible), rates(acceptance, costs.least_seconds)
        others = [k for k in costs.ks if k != best and k >= least]
        promising = [k for k in others if possible[k] > worth]
        if habit.may_try_again:
            for k in promising:
                if k in surprises:
                    return k
        if not may_try:
            return None
        other_side = [k for k in costs.ks if (k > 0) != (best > 0)]
        if sum(costs.num_seen(num_rows, k) for k in other_side) < _SEEN:
            for k in promising:
                lost_s = _rounds_of_try(k) * costs.seconds(num_rows, k) * (1 - expected[k] / expected[best])
                if k in other_side and lost_s < _LOST * habit.time_s:
                    habit.time_s = 0.0
                    return k
        tried = max([best, *others], key=hoped.__getitem__)
        return tried if tried != best and hoped[tried] > worth else None

    def choices(self) -> list[KChoice]:
        """K before anything is known of the texts, for each load that was measured."""
        found = []
        with self.learned.lock:
            measured = self.learned.costs.measured
        for num_rows, seconds in measured.items():
            paying = (percent / 100 for percent in range(101) if _best(seconds, percent / 100) > 0)
            found.append(KChoice(num_rows, seconds, PRIOR, _best(seconds, PRIOR), next(paying, None)))
        return found

    def learn(self, rounds: Sequence[RowRound]) -> None:
        self.learned.note(rounds)
        self._noted.append(rounds)

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        self._num_plain = self._num_plain + 1 if k == 0 else 0
        if k > 0 or self._num_plain >= _PLAIN_ROUNDS:
            self.learned.note_time(num_rows, k, seconds)

    def forget(self, index: int) -> None:
        self._estimates.pop(index, None)


def _tokens(rows: Sequence[Row], shifts: Sequence[float], acceptance: Sequence[float]) -> list[float]:
    """Tokens that a round of all rows is expected to commit, for K = 0, 1, ..."""
    totals = [0.0] * (len(acceptance) + 1)
    for row, shift in zip(rows, shifts, strict=True):
        tokens = expected_tokens([min(max(a + shift, 0.0), 1.0) for a in acceptance])
        constant_k = row.request.num_draft_tokens
        for k in range(len(totals)):
            totals[k] += tokens[k if constant_k is None else constant_k]
    return totals


def _rounds_of_try(k: int) -> int:
    return _TRIED_ROUNDS if k > 0 else _PLAIN_ROUNDS + 2


def _best(seconds: Mapping[int, float], acceptance: float) -> int:
    """The K with the most tokens per second where every drafted token has this acceptance."""
    tokens = expected_tokens([acceptance] * max(seconds))
    return max(sorted(seconds), key=lambda k: tokens[k] / seconds[k])
