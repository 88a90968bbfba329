"""Costs that are learned from the loop's own rounds: K ends up near the best one however wrong they were measured."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import pytest

from outrider.decoding.batch import Row
from outrider.decoding.cost_model import LiveCosts
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.records import Request, Round, RowRound
from outrider.sampling.rules import REJECTION
from toys import adaptive, llama_pair, request

MEASURED = {0: 5.2, 1: 6.8, 2: 8.0, 3: 9.4, 4: 10.8, 6: 14.0, 8: 17.0}
DEAR = {0: 1.0, 1: 2.3, 2: 3.6, 3: 4.9, 4: 6.2, 6: 8.8, 8: 11.4}  # drafts do not pay
NUM_TEXTS, TEXT_LENGTH = 100, 64
LATER = 40 * TEXT_LENGTH


def _rounds(
    schedule: Schedule, costs: Mapping[int, float], alpha: float, seed: int
) -> Iterator[tuple[int, int, float]]:
    """K, tokens and seconds of the rounds of texts, one after the other, where rounds cost ``costs`` in truth, and a
    plain step's quarter more after a change of K. Times scatter by 15%; one in fifty is five times as long. Drafted
    tokens stand with the probability of their text, about ``alpha``; the token at each place would stand or fall under
    every schedule alike."""
    rng, noise = random.Random(seed), random.Random(seed + 1)
    last_k = 0
    for index in range(NUM_TEXTS):
        row, acceptance = Row(index, Request([1]), 1 + TEXT_LENGTH, 1 + TEXT_LENGTH), rng.gauss(alpha, 0.1)
        stands = [rng.random() < acceptance for _ in range(row.limit)]
        while row.length < row.limit:
            k = row.most_drafted(schedule.next_k([row], 1))
            num_accepted = [*stands[row.length : row.length + k], False].index(False)
            seconds = costs.get(k) or (costs[k - 1] + costs[k + 1]) / 2
            row.token_ids += [0] * (num_accepted + 1)
            schedule.learn([RowRound(index, (), (), k, num_accepted, False, None, None, None)])
            held_up = 5 if noise.random() < 0.02 else 1
            if k == last_k:
                schedule.learn_cost(1, k, seconds * held_up * math.exp(noise.gauss(0.0, 0.15)))
            else:
                seconds += costs[0] / 4
            last_k = k
            yield k, num_accepted + 1, seconds
        schedule.row_ended(index)


def _rate(
    schedule: Schedule, costs: Mapping[int, float], alpha: float, seed: int, begin: int = LATER, end: int = 10**9
) -> float:
    """Tokens per second, from the begin-th token to the end-th."""
    num_tokens, num_counted, total = 0, 0, 0.0
    for _, num, seconds in _rounds(schedule, costs, alpha, seed):
        if begin <= num_tokens < end:
            num_counted, total = num_counted + num, total + seconds
        num_tokens += num
    return num_counted / total


def test_costs_that_were_measured_wrong_are_put_right() -> None:
    """Each K costs 0.7 to 1.5 times what was measured. The schedule ends up within 5% of the best constant K; on the
    measured costs alone, it would stay a tenth below."""
    rng = random.Random(0)
    learned, measured_only = [], []
    for draw in range(9):
        costs = {k: seconds * math.exp(rng.uniform(math.log(0.7), math.log(1.5))) for k, seconds in MEASURED.items()}
        alpha = (0.4, 0.6, 0.8)[draw % 3]
        best = max(_rate(ConstantSchedule(k), costs, alpha, draw) for k in costs)
        learned.append(_rate(adaptive({1: MEASURED}), costs, alpha, draw) / best)
        measured_only.append(_rate(_Deaf(), costs, alpha, draw) / best)
    assert min(learned) > 0.95 and fmean(learned) > 0.98
    assert fmean(measured_only) < 0.92


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("drafting", "plain"), [(3.0, 1.0), (1.0, 1 / 3)], ids=["drafts seem dear", "plain seems cheap"]
)
def test_drafts_that_seemed_too_dear_are_found_to_pay(drafting: float, plain: float, seed: int) -> None:
    """Beside a plain round, one with drafts costs a third of what was measured. After 400 tokens the schedule drafts in
    nearly every round, and loses 5% at most; without looking at times it never drafts."""
    measured = {k: seconds * (drafting if k else plain) for k, seconds in MEASURED.items()}
    rounds = list(_rounds(adaptive({1: measured}), MEASURED, 0.8, seed))
    chosen = [k for k, num_tokens, _ in rounds for _ in range(num_tokens)]
    assert fmean(k > 0 for k in chosen[400:800]) > 0.9
    best = max(_rate(ConstantSchedule(k), MEASURED, 0.8, seed, 400) for k in (2, 3, 4, 6))
    assert _rate(adaptive({1: measured}), MEASURED, 0.8, seed, 400) > 0.95 * best
    alone = list(_rounds(_Deaf(measured), MEASURED, 0.8, seed))
    assert not any(k for k, *_ in alone)


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_seemed_too_cheap_are_given_up(seed: int) -> None:
    measured = {k: seconds * (0.3 if k else 1.0) for k, seconds in DEAR.items()}
    chosen = [k for k, num_tokens, _ in _rounds(adaptive({1: measured}), DEAR, 0.8, seed) for _ in range(num_tokens)]
    assert fmean(k > 0 for k in chosen[400:800]) < 0.1


def test_little_is_lost_where_drafts_do_not_pay() -> None:
    """With the right costs: 5% of the first 500 tokens, and 2% of the rest."""
    ratios = []
    for begin, end in ((0, 500), (500, 10**9)):
        rates = [_rate(adaptive({1: DEAR}), DEAR, 0.8, seed, begin, end) for seed in range(4)]
        ratios.append(fmean(rates) * DEAR[0])
    assert ratios[0] > 0.95 and ratios[1] > 0.98


def test_one_surprise_is_doubted_and_two_are_believed() -> None:
    costs = LiveCosts({1: {0: 1.0, 1: 6.0, 2: 8.0}})
    for _ in range(30):
        costs.learn(1, 0, 1.0)
    costs.learn(1, 1, 1.5)
    assert costs.seconds(1, 1) > 4.5 and costs.surprises(1) == {1}
    for _ in range(16):
        costs.learn(1, 0, 1.0)
    costs.learn(1, 1, 2.0)
    assert costs.seconds(1, 1) == pytest.approx(2.0, rel=0.01)
    # Measured at the same time: as wrong, until it runs.
    assert costs.seconds(1, 2) == pytest.approx(8.0 * 2.0 / costs.measured[1][1], rel=0.4)
    costs.learn(1, 1, 2.0)
    assert costs.surprises(1) == set()
    for seconds, suspected in ((9.0, {1}), (0.3, set())):  # on both sides: times scatter
        for _ in range(16):
            costs.learn(1, 0, 1.0)
        costs.learn(1, 1, seconds)
        assert costs.surprises(1) == suspected
    assert 1.5 < costs.seconds(1, 1) < 3.0


class _Deaf:
    """Schedule that ignores times, and so never tries a K for its cost."""

    def __init__(self, measured: Mapping[int, float] = MEASURED) -> None:
        self.inner = adaptive({1: measured})
        self.max_k = self.inner.max_k

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        self.inner.learned.k_history(num_rows)._num_since_try = -1
        return self.inner.next_k(rows, num_rows)

    def learn(self, rounds: Sequence[RowRound]) -> None:
        self.inner.learn(rounds)

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        pass

    def row_ended(self, index: int) -> None:
        self.inner.row_ended(index)


def test_a_machine_that_is_slower_now_is_slower_for_every_k() -> None:
    costs = LiveCosts({1: {0: 1.0, 2: 2.0, 4: 3.0}})
    for _ in range(100):
        costs.learn(1, 2, 3.0)
    assert [costs.seconds(1, k) for k in (0, 2, 4)] == pytest.approx([1.5, 3.0, 4.5], rel=1e-3)


def test_one_k_that_takes_longer_is_told_apart() -> None:
    costs = LiveCosts({1: {0: 1.0, 2: 2.0, 4: 3.0}})
    for _ in range(200):
        costs.learn(1, 2, 2.0)
        costs.learn(1, 4, 4.5)
    assert costs.seconds(1, 4) / costs.seconds(1, 2) == pytest.approx(2.25, rel=0.01)


def test_a_round_that_was_held_up_decides_nothing() -> None:
    costs = LiveCosts({1: {0: 1.0, 2: 2.0}})
    for _ in range(50):
        costs.learn(1, 0, 1.0)
        costs.learn(1, 2, 2.0)
    costs.learn(1, 2, 1e6)
    assert costs.seconds(1, 2) / costs.seconds(1, 0) < 2.05


def test_a_round_without_a_time_leaves_costs_above_zero() -> None:
    """A clock may be coarse; and the costs that were measured may be far too high."""
    costs = LiveCosts({1: {0: 1.0, 2: 2.0}})
    costs.learn(1, 0, 0.0)
    assert costs.seconds(1, 0) > 0 and costs.seconds(1, 2) > 0
    for _ in range(200):
        costs.learn(1, 0, 0.05)
        costs.learn(1, 2, 0.1)
    assert [costs.seconds(1, k) for k in (0, 2)] == pytest.approx([0.05, 0.1], rel=0.01)


def test_between_the_numbers_of_rows() -> None:
    """The nearest one serves, and learns."""
    costs = LiveCosts({1: {0: 1.0, 2: 3.0}, 4: {0: 2.0, 2: 6.0}, 8: {0: 3.0, 2: 9.0}})
    assert [costs.seconds(n, 0) for n in (1, 2, 3, 4, 5, 6, 8, 9)] == [1, 1, 2, 2, 2, 3, 3, 3]
    assert costs.seconds(1, 1) == costs.seconds(1, 2) == costs.seconds(1, 5) == 3.0
    for _ in range(300):
        costs.learn(5, 0, costs.seconds(5, 2) / 2)
        costs.learn(5, 2, costs.seconds(5, 2))
    ratios = [costs.seconds(n, 2) / costs.seconds(n, 0) for n in (1, 4, 5, 8)]
    assert ratios == pytest.approx([3.0, 2.0, 2.0, 3.0], rel=0.01)


def test_what_was_tried_often_is_doubted_less() -> None:
    costs = LiveCosts({1: {0: 1.0, 2: 2.0}})
    assert costs.least_seconds(1, 2) == pytest.approx(1.0)
    for _ in range(60):
        costs.learn(1, 0, 1.0)
        costs.learn(1, 2, 2.0)
    known = costs.least_seconds(1, 2)
    assert known > 1.7
    for _ in range(1000):
        costs.learn(1, 0, 1.0)
    assert costs.least_seconds(1, 2) < known  # it was long ago


class _Noting:
    """Three times K = 3, three times 0; notes what rounds are said to have taken."""

    max_k = 3

    def __init__(self) -> None:
        self.noted: list[tuple[int, int, float]] = []
        self.num_rounds = 0

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        self.num_rounds += 1
        return 3 if self.num_rounds % 6 in (1, 2, 3) else 0

    def learn(self, rounds: Sequence[RowRound]) -> None:
        pass

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        self.noted.append((num_rows, k, seconds))

    def row_ended(self, index: int) -> None:
        pass


@pytest.mark.each_execution
def test_rounds_that_did_something_else_are_not_learned_from() -> None:
    """Those with a prefill, the first ones of another K, and the last one, which may have to wait for a round too
    many."""
    target, drafter = llama_pair()
    schedule = _Noting()
    engine = Engine(target, drafter, REJECTION, num_slots=2, capacity=128, schedule=schedule)
    engine.submit(request((1, 2, 3), max_new_tokens=60))
    rounds: list[Round] = []
    while (round_ := engine.step()) is not None:
        rounds.append(round_)
        if len(rounds) == 5:
            engine.submit(request((4, 5, 6), seed=1, max_new_tokens=60))
    noted = [seconds for *_, seconds in schedule.noted]
    for number, one in enumerate(rounds[:15]):  # all before the first row comes to its end
        is_usual = number % 3 > 0 and one.timing.prefill_s == 0
        assert (one.timing.decode_s in noted) is is_usual, number
    assert rounds[-1].timing.decode_s not in noted
    assert {num_rows for num_rows, *_ in schedule.noted} == {1, 2}
    assert {0, 3} <= {k for _, k, _ in schedule.noted}
