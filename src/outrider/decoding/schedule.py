"""Schedules: how many tokens to draft in the next round.

``AdaptiveSchedule`` chooses the K with the most expected tokens per second, from the tokens and times of earlier rounds
(of earlier generations too), never from unverified drafts. So K is known before the drafts are drawn, and the output
follows the target's distribution as with a constant K.

The estimate: with a_i the probability that the i-th drafted token is accepted if those before it are, a round of K
drafted tokens commits tau(K) tokens (speedup.py), and tokens per second are tau(K) over the seconds of such a round,
which depend on the number of rows. Rows are verified together, padded to the longest draft, so that a shorter draft in
one row would save nothing: all rows share the K that is best for their sum, except rows with a constant K of their own.
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
# With several sequences, drafting must promise 5%, to cover hidden costs: the draft must prefill each prompt, and rows
# that began together end one after the other.
_WORTH_DRAFTS = 1.05
# Rounds between choices, unless the number of rows changes before: a choice takes a tenth of a millisecond.
_ROUNDS = 4
_ROUNDS_AGAIN = 8  # if K did not change
_SEEN = 0.25  # rounds: the weight of one that ran 2,800 rounds ago
_LOST = 0.03  # share of the time for tries of K that did not run for so long
_TRIED_ROUNDS = 2  # only the second consecutive round of a K shows its cost
_PLAIN_ROUNDS = 2  # and for K = 0 the third: until then the CPU caches hold the draft


_Rates = Callable[[Sequence[float], Callable[[int, int], float]], dict[int, float]]
"""(acceptance, seconds by number of rows and K) -> tokens per second, by K."""


class Schedule(Protocol):
    """Chooses K, round by round.

    Attributes:
        max_k: the largest K that it may choose.
    """

    @property
    def max_k(self) -> int: ...

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        """K for the next round of these rows, which is computed for ``num_rows`` rows."""
        ...

    def learn(self, rounds: Sequence[RowRound]) -> None:
        """Learn from the tokens of the last round."""
        ...

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        """Learn from the time of a round of ``num_rows`` rows with k drafted tokens, like the one before it, without a
        prefill."""
        ...

    def row_ended(self, index: int) -> None:
        """Drop the state of a row that has ended."""
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

    def learn(self, rounds: Sequence[RowRound]) -> None:
        pass

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        pass

    def row_ended(self, index: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class KChoice:
    """The best K at one load, and its reasons.

    Attributes:
        seconds: K -> seconds of a round of ``num_rows`` rows.
        acceptance: assumed for every drafted token.
        best_k: with that acceptance.
        least_acceptance: the least acceptance at which drafting pays, to a hundredth; None if it never does.
    """

    num_rows: int
    seconds: Mapping[int, float]
    acceptance: float
    best_k: int
    least_acceptance: float | None


@dataclass(slots=True)
class AdaptiveSchedule:
    """Chooses the K with the most expected tokens per second at this load, 0 included. A choice lasts for four rounds,
    and for eight if K did not change. Rounds are only queued; the next choice learns from them.

    Acceptance and costs are estimated from all rows and rounds, of earlier generations too (acceptance_estimates.py);
    a row's own rounds shift its acceptance. From time to time another K is tried for two rounds (``_tried_k``), since
    a K that never runs cannot show that its drafts have become better, or its cost lower.

    K is chosen before the draft draws, from earlier rounds and sequences alone. Their noise has no part in the next
    round or sequence, so that the distribution is that of a constant K. (Two sequences with one seed share their noise,
    so K is constant in rows whose seed was given, where it matters: ``Decoder.stream_many``.)
    """

    learned: PairEstimates
    _estimates: dict[int, RowEstimate] = field(default_factory=dict, init=False)
    _usual: list[float] = field(init=False)  # acceptance of all rows when K was last chosen
    _k: int = field(default=0, init=False)
    _num_left: int = field(default=0, init=False)  # rounds until the next choice
    _num_rows: int = field(default=0, init=False)  # at the last choice
    _num_plain: int = field(default=0, init=False)  # consecutive timed rounds without drafts
    _noted: list[Sequence[RowRound]] = field(default_factory=list, init=False)  # since the last choice

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
            self._learn_rows(rows)
            with self.learned.lock:
                self.learned.catch_up()
                # If all rows have a constant K, there is nothing to choose.
                if any(row.request.num_draft_tokens is None for row in rows):
                    self._k = self._chosen_k(rows, num_rows)
        self._num_left -= 1
        return self._k

    def _learn_rows(self, rows: Sequence[Row]) -> None:
        """Update the estimates of these rows with the rounds since the last choice."""
        for row in rows:
            self._estimates.setdefault(row.index, RowEstimate())
        for round_ in chain.from_iterable(self._noted):
            if round_.row in self._estimates:
                self._estimates[round_.row].learn(round_, self._usual)
        self._noted.clear()

    def _chosen_k(self, rows: Sequence[Row], num_rows: int) -> int:
        costs, history = self.learned.costs, self.learned.k_history(num_rows)
        estimate = self.learned.acceptance
        usual = self._usual = estimate.acceptance()
        shifts = [self._estimates[row.index].shift for row in rows]
        least = max((row.request.num_draft_tokens or 0 for row in rows), default=0)  # verified in any case

        def rates(acceptance: Sequence[float], seconds: Callable[[int, int], float]) -> dict[int, float]:
            tokens = _tokens(rows, shifts, acceptance)
            found = {k: tokens[k] / seconds(num_rows, max(k, least)) for k in costs.ks}
            if len(rows) > 1 and least == 0:
                found[0] *= _WORTH_DRAFTS
            return found

        expected = rates(usual, costs.seconds)
        best = max(expected, key=expected.__getitem__)
        if history.usual_k is not None and expected[best] < _WORTH_A_CHANGE * expected[history.usual_k]:
            best = history.usual_k
        if best == history.usual_k:
            self._num_left = _ROUNDS_AGAIN
        history.usual_k = best
        history.time_s += self._num_left * costs.seconds(num_rows, max(best, least))
        tried = self._tried_k(history, num_rows, least, expected, rates)
        if tried is None:
            return best
        history.note_try(tried, expected)
        self._num_left = _rounds_of_try(tried)
        return tried

    def _tried_k(
        self, history: KHistory, num_rows: int, least: int, expected: Mapping[int, float], rates: _Rates
    ) -> int | None:
        """A K to try in place of the best one, if any:

        - its last round took an unexpected time, so that another one must confirm its cost;
        - or neither it nor any other on its side (drafting or not) has run for long, and trying it is expected to lose
          little of the time since the last such try;
        - or it would be the best at the highest plausible acceptance and its optimistic cost, given how few of its
          rounds were seen.
        """
        costs, best = self.learned.costs, history.usual_k
        surprises, may_try = costs.surprises(num_rows), history.may_try(expected)
        assert best is not None
        if not (surprises or may_try):
            return None
        others = [k for k in costs.ks if k != best and k >= least]
        if history.may_try_again:
            for k in others:
                if k in surprises:
                    return k
        if not may_try:
            return None
        other_side = [k for k in costs.ks if (k > 0) != (best > 0)]
        if sum(costs.num_seen(num_rows, k) for k in other_side) < _SEEN:
            for k in others:
                lost_s = _rounds_of_try(k) * costs.seconds(num_rows, k) * (1 - expected[k] / expected[best])
                if k in other_side and lost_s < _LOST * history.time_s:
                    history.time_s = 0.0
                    return k
        hoped = rates(self.learned.acceptance.acceptance(doubt=1.0), costs.least_seconds)
        tried = max([best, *others], key=hoped.__getitem__)
        return tried if tried != best and hoped[tried] > _WORTH_A_CHANGE * expected[best] else None

    def choices(self) -> list[KChoice]:
        """The best K at the prior acceptance, for each measured load."""
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

    def row_ended(self, index: int) -> None:
        self._estimates.pop(index, None)


def _tokens(rows: Sequence[Row], shifts: Sequence[float], acceptance: Sequence[float]) -> list[float]:
    """Expected tokens of a round of all rows, for K = 0, 1, ..."""
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
    """The K with the most tokens per second if every drafted token has this acceptance."""
    tokens = expected_tokens([acceptance] * max(seconds))
    return max(sorted(seconds), key=lambda k: tokens[k] / seconds[k])
