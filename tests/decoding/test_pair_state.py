"""What is learned of a pair in one call serves the next, and no text depends on it but through K."""

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from outrider.decoder import Decoder
from outrider.decoding import pair_state
from outrider.decoding.acceptance_estimates import Estimate, PairEstimates, RowEstimate
from outrider.decoding.batch import Row
from outrider.decoding.cost_model import LiveCosts
from outrider.decoding.schedule import AdaptiveSchedule, ConstantSchedule, Schedule
from outrider.options import Sampling
from outrider.records import Request, RowRound
from outrider.sampling.rules import RULES
from toys import MadeUpTimes, adaptive, table_pair, tokens

# Seconds of a round by number of rows and K: of a small target, for which drafts pay in one row and not in eight.
COSTS = {
    1: {0: 3.2, 1: 5.0, 2: 6.1, 3: 7.6, 4: 8.8, 6: 11.4, 8: 13.7},
    2: {0: 3.5, 1: 5.3, 2: 7.1, 3: 8.6, 4: 10.2, 6: 13.5, 8: 16.5},
    4: {0: 4.0, 1: 6.5, 2: 8.9, 3: 10.9, 4: 12.5, 6: 17.5, 8: 22.0},
    8: {0: 4.9, 1: 8.4, 2: 11.1, 3: 14.2, 4: 16.9, 6: 23.5, 8: 29.0},
}
ACCEPTANCE = (0.73, 0.79, 0.81, 0.83, 0.84, 0.85, 0.85, 0.85)
NUM_CALLS, TEXT_LENGTH = 20, 64


def _measured(seed: int) -> dict[int, dict[int, float]]:
    """The costs, each a few per cent off."""
    rng = random.Random(seed)
    return {size: {k: s * math.exp(rng.gauss(0.0, 0.045)) for k, s in by_k.items()} for size, by_k in COSTS.items()}


def _call(schedule: Schedule, num_rows: int, seed: int) -> float:
    """Seconds of a call of so many texts. The first round of another K takes longer, and times scatter by 3%."""
    rng, noise = random.Random(seed), random.Random(-seed - 1)
    rows = [Row(index, Request([1]), 1 + TEXT_LENGTH, 1 + TEXT_LENGTH) for index in range(num_rows)]
    total, last_k = 0.0, -1
    while running := [row for row in rows if row.length < row.limit]:
        size = max(size for size in COSTS if size <= len(running))
        chosen = schedule.next_k(running, size)
        most = max(row.most_drafted(chosen) for row in running)
        by_k = COSTS[size]
        seconds = (by_k.get(most) or (by_k[most - 1] + by_k[most + 1]) / 2) * math.exp(noise.gauss(0.0, 0.03))
        rounds = []
        for row in running:
            k = row.most_drafted(chosen)
            num_accepted = [*(rng.random() < a for a in ACCEPTANCE[:k]), False].index(False)
            row.token_ids += [0] * (num_accepted + 1)
            rounds.append(RowRound(row.index, (), (), k, num_accepted, False, None, None, None))
        schedule.learn(rounds)
        if most == last_k:
            schedule.learn_cost(size, most, seconds)
        else:
            seconds += by_k[0] / 5
        total, last_k = total + seconds, most
    return total


def _seconds(make: Callable[[], Schedule], num_rows: int, first: int) -> float:
    """Seconds of the calls from ``first`` on, each with its own schedule."""
    return sum([_call(make(), num_rows, seed) for seed in range(NUM_CALLS)][first:])


def test_later_calls_begin_with_what_the_first_have_learned() -> None:
    """On average over 1 to 8 rows and several starts within 3% of the best constant K, plain decoding among them. Calls
    that each begin anew stay further below it."""
    kept, anew = [], []
    for num_rows in COSTS:
        best = min(_seconds(lambda k=k: ConstantSchedule(k), num_rows, 5) for k in (0, 1, 2, 4))
        for start in range(3):
            learned = PairEstimates(LiveCosts(_measured(start)))
            kept.append(best / _seconds(lambda learned=learned: AdaptiveSchedule(learned), num_rows, 5))
            anew.append(best / _seconds(lambda start=start: adaptive(_measured(start)), num_rows, 5))
    assert fmean(kept) > 0.97 and fmean(anew) < fmean(kept) - 0.01


def _judged(num_drafted: int, num_accepted: int) -> RowRound:
    return RowRound(0, (), (), num_drafted, num_accepted, False, None, None, None)


def test_a_place_that_was_judged_little_is_like_the_one_before() -> None:
    estimate = Estimate([0.0] * 4, [0.0] * 4)
    for number in range(200):
        estimate.learn([[_judged(1, int(number % 4 > 0))]])
    assert estimate.acceptance() == pytest.approx([0.75] * 4, abs=0.01)
    estimate.learn([[_judged(2, 1)] * 2])  # the second drafted token falls, twice
    a_1, a_2, *_ = usual = estimate.acceptance()
    assert a_1 > 0.75 and 0.6 < a_2 < 0.7
    certain, uncertain, *_ = (hoped - a for hoped, a in zip(estimate.acceptance(doubt=1.0), usual, strict=True))
    assert 0 < certain < uncertain
    estimate.learn([[_judged(0, 0)] * 100])
    assert estimate.acceptance() == usual  # rounds without drafts show nothing


def test_rounds_are_learned_together_as_one_by_one() -> None:
    rng = random.Random(0)
    rounds = [[_judged(k := rng.randrange(5), rng.randint(0, k)) for _ in range(3)] for _ in range(50)]
    together, one_by_one = (Estimate([0.0] * 4, [0.0] * 4) for _ in range(2))
    together.learn(rounds)
    for round_ in rounds:
        one_by_one.learn([round_])
    assert together.verified == pytest.approx(one_by_one.verified)
    assert together.accepted == pytest.approx(one_by_one.accepted)


def _row() -> Row:
    return Row(0, Request([1]), 10_000, 10_000)


def test_the_last_rounds_of_a_call_are_learned_when_the_next_begins() -> None:
    """Also if its stream was given up."""
    learned = PairEstimates(LiveCosts({1: COSTS[1]}))
    schedule = AdaptiveSchedule(learned)
    schedule.next_k([_row()], 1)
    schedule.learn([_judged(2, 1)])
    schedule.learn_cost(1, 2, 1e-3 * COSTS[1][2])
    AdaptiveSchedule(learned)
    assert learned.acceptance.verified[:2] == [1.0, 1.0]
    assert learned.costs.seconds(1, 2) < COSTS[1][2]


def test_no_round_is_lost_between_threads() -> None:
    """The oldest of 2,000 rounds still weighs 0.018, which would be missed."""
    learned = PairEstimates(LiveCosts({1: COSTS[1]}))

    def run(_: int) -> None:
        schedule, row = AdaptiveSchedule(learned), _row()
        for _ in range(500):
            schedule.next_k([row], 1)
            schedule.learn([_judged(1, 1)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    AdaptiveSchedule(learned)
    assert learned.acceptance.verified[0] == pytest.approx(sum(0.998**age for age in range(2_000)), rel=1e-9)


def test_rows_with_a_constant_k_are_learned_from() -> None:
    """Though there is nothing to choose for them."""
    schedule, row = adaptive({1: COSTS[1]}), Row(0, Request([1], num_draft_tokens=2), 100, 100)
    for _ in range(5):
        schedule.next_k([row], 1)
        schedule.learn([_judged(2, 2)])
    assert schedule.learned.acceptance.verified[0] == pytest.approx(4.0, rel=0.01)
    assert schedule.learned.k_history(1).usual_k is None


def test_a_row_differs_by_one_number() -> None:
    row = RowEstimate()
    assert row.shift == 0.0
    row.learn(_judged(3, 3), [0.5, 0.6, 0.7, 0.8])
    assert row.shift == pytest.approx((3 - 1.8) / (3 + 24))
    row.learn(_judged(3, 0), [0.5, 0.6, 0.7, 0.8])
    assert row.shift == pytest.approx((0.95 * 1.2 - 0.5) / (0.95 * 3 + 1 + 24))


@pytest.fixture
def decoder() -> Decoder:
    target, drafter = table_pair(5)
    return Decoder(target, None, frozenset(), drafter, acceptance="rejection", num_draft_tokens="auto")


def test_replace_keeps_the_estimates_of_a_pair(decoder: Decoder) -> None:
    """To decoders of the same pair, and to no others."""
    other = replace(decoder, acceptance="block", num_draft_tokens=3)
    assert other.pair_state is decoder.pair_state
    for changed in (decoder.plain(), replace(decoder, target=table_pair(5, 1)[0]), decoder.compiled()):
        assert changed.pair_state is not decoder.pair_state
        assert replace(changed, num_draft_tokens=2).pair_state is changed.pair_state
    assert replace(decoder) == decoder  # it is no part of what a decoder is


def test_costs_are_read_once_in_a_process(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for loads that were not met before."""
    asked: list[tuple[str, int]] = []

    def costs(target: object, drafter: object, rule: object, num_rows: int, num_tokens: int) -> dict[int, float]:
        asked.append((rule.name, num_rows))
        return COSTS[num_rows]

    monkeypatch.setattr(pair_state, "round_costs", costs)
    prompts = [[1], [2], [3], [4]]
    for acceptance, num_rows in (("rejection", 2), ("rejection", 2), ("rejection", 1), ("rejection", 4), ("block", 1)):
        decoder.generate(prompts[:num_rows], max_new_tokens=30, acceptance=acceptance)
    assert asked == [("rejection", 1), ("rejection", 2), ("rejection", 4), ("block", 1)]
    estimates = decoder.pair_state.estimates
    learned = [estimates(RULES[name], 1, 40).acceptance.verified[0] for name in ("rejection", "block", "gumbel")]
    assert learned[0] > learned[1] > learned[2] == 0.0


def test_a_text_with_a_seed_does_not_depend_on_earlier_calls(decoder: Decoder) -> None:
    before = decoder.generate([[1]], seed=3, max_new_tokens=40)[0]
    decoder.generate([[1], [2]], max_new_tokens=40)
    assert decoder.generate([[1]], seed=3, max_new_tokens=40)[0].token_ids == before.token_ids


def test_calls_at_the_same_time(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share their estimates, and under gumbel each text is that of plain decoding."""
    # Not measured: whether drafts pay would depend on the load.
    monkeypatch.setattr(pair_state, "round_costs", lambda *_: {0: 1.0, 1: 1.01, 2: 1.02, 4: 1.04})
    plain = [text.token_ids for text in decoder.plain().generate([[1]] * 4, seed=[0, 1, 2, 3], acceptance="gumbel")]

    def text(seed: int) -> tuple[int, ...]:
        return decoder.generate([[1]], seed=seed, acceptance="gumbel")[0].token_ids

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(4))) == plain
    learned = decoder.pair_state.estimates(RULES["gumbel"], 1, 40)
    with learned.lock:
        learned.catch_up()
    assert learned.acceptance.verified[0] > 0


def test_the_law_of_later_calls() -> None:
    """6,000 texts of three tokens over three, in sixty calls of one schedule, whose K follows from all texts before:
    against the exact law (chi-square over 27 texts; false alarm 1e-6)."""
    target, drafter = table_pair(3)
    schedule = MadeUpTimes({1: {0: 10.0, 1: 18.0, 2: 24.5, 3: 32.0}})
    counts, chosen = torch.zeros(27), set()
    for call in range(60):
        asked = [Request([0], Sampling(seed=100 * call + i, max_new_tokens=3)) for i in range(100)]
        for a, b, c in tokens(target, drafter, asked, RULES["block"], schedule):
            counts[a * 9 + b * 3 + c] += 1
        chosen.add(schedule.inner._k)
    p = target.model.table.softmax(-1)
    law = torch.einsum("a,ab,bc->abc", p[0], p, p).flatten()
    assert float(((counts - 6_000 * law).square() / (6_000 * law)).sum()) < 79.0  # 26 degrees of freedom: 3e-7
    assert len(chosen) > 1
