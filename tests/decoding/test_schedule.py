"""Adaptive K: near the best constant K, little lost with a useless draft, and the law of the output untouched."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from outrider.decoder import Decoder
from outrider.decoding import measured_costs
from outrider.decoding.acceptance_estimates import PairEstimates
from outrider.decoding.batch import Row
from outrider.decoding.engine import decode
from outrider.decoding.measured_costs import CostArm, measure_round_costs, time_rounds
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.drafters.base import NoDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.errors import OptionError
from outrider.options import Sampling
from outrider.records import Request, Round, RowRound, Timing
from outrider.sampling.rules import RULES, Rule
from toys import MadeUpTimes, adaptive, random_table, table_lm, table_pair, tokens

# Seconds of a round by K: a draft that is dear, one that is middling, one that is cheap beside its target.
COSTS = {
    "dear": {0: 0.78, 1: 1.15, 2: 1.45, 3: 1.8, 4: 2.2, 6: 2.9, 8: 4.0},
    "middling": {0: 5.2, 1: 6.8, 2: 8.0, 3: 9.4, 4: 10.8, 6: 14.0, 8: 17.0},
    "cheap": {0: 15.0, 1: 16.5, 2: 17.5, 3: 18.6, 4: 20.0, 6: 24.0, 8: 30.0},
}


def _row(length: int, limit: int) -> Row:
    return Row(0, Request([1] * length), limit, limit)


def _round(num_drafted: int, num_accepted: int) -> RowRound:
    return RowRound(0, (), (), num_drafted, num_accepted, False, None, None, None)


def _seconds(make: Callable[[], Schedule], costs: dict[int, float], alpha: float, num_texts: int = 200) -> float:
    """Cost of texts of 128 tokens whose drafted tokens stand with probability alpha, each alone."""
    rng, total = random.Random(0), 0.0
    for _ in range(num_texts):
        schedule, row, last_k = make(), _row(1, 129), -1
        while row.length < row.limit:
            k = schedule.next_k([row], 1)
            num_accepted = 0
            while num_accepted < k and rng.random() < alpha:
                num_accepted += 1
            total += costs[k]
            row.token_ids += [0] * (num_accepted + 1)
            schedule.learn([_round(k, num_accepted)])
            if k == last_k:
                schedule.learn_cost(1, k, costs[k])
            last_k = k
    return total


@pytest.mark.pairwise
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_near_the_best_constant(alpha: float, costs: dict[int, float]) -> None:
    """Never more than 5% worse than the best of all constant K, plain decoding among them: so a useless draft (alpha 0)
    costs at most that. And the control: a constant K = 4 costs far more there."""
    constants = {k: _seconds(lambda k=k: ConstantSchedule(k), costs, alpha) for k in costs}
    assert _seconds(lambda: adaptive({1: costs}), costs, alpha) < min(constants.values()) / 0.95
    assert alpha > 0 or constants[4] > 1.2 * constants[0]


def test_a_draft_that_becomes_useful_is_found_again() -> None:
    schedule, row = adaptive({1: COSTS["cheap"]}), _row(1, 10_000)
    chosen = []
    for number in range(500):
        k = schedule.next_k([row], 1)
        schedule.learn([_round(k, k if number >= 300 else 0)])
        schedule.learn_cost(1, k, COSTS["cheap"][k])
        chosen.append(k)
    # K = 8 would be 2.9% faster, too little for a change
    assert sum(k > 0 for k in chosen[:300]) < 30 and chosen[299] == 0 and chosen[-1] >= 6


def test_a_choice_stands_while_the_rows_are_the_same() -> None:
    """For four rounds: to choose takes time."""
    schedule, row = adaptive({1: COSTS["cheap"], 2: {**COSTS["cheap"], 0: 1.0}}), _row(1, 1_000)
    assert schedule.next_k([row], 1) > 0
    for _ in range(3):
        schedule.learn([_round(8, 0)] * 30)
        schedule.learn_cost(1, 8, COSTS["cheap"][8])
        assert schedule.next_k([row], 1) > 0
    assert schedule.next_k([row], 1) == 0
    schedule.learn([_round(8, 8)] * 300)
    assert schedule.next_k([row], 1) == 0
    assert schedule.next_k([row, Row(1, row.request, 1_000, 1_000)], 2) == 0
    assert schedule.next_k([row], 1) > 0


def test_a_choice_that_is_made_again_stands_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """For eight rounds, not four. (Each choice asks once for the history of K at its load.)"""
    schedule, row = adaptive({1: {0: 1.0, 2: 9.0}}), _row(1, 1_000)
    asked, k_history = [], PairEstimates.k_history
    monkeypatch.setattr(
        PairEstimates, "k_history", lambda learned, num_rows: asked.append(number) or k_history(learned, num_rows)
    )
    for number in range(30):  # noqa: B007
        assert schedule.next_k([row], 1) == 0
    assert asked == [0, 4, 12, 20, 28]


class Wandering:
    """K that follows the text: the worst case for a law that would depend on it."""

    max_k = 3

    def __init__(self) -> None:
        self.last = 0

    def next_k(self, rows: object, num_rows: int) -> int:
        return self.last

    def learn(self, rounds: Sequence[RowRound]) -> None:
        self.last = sum(round_.token_ids[-1] + len(round_.token_ids) for round_ in rounds) % 4

    def learn_cost(self, num_rows: int, k: int, seconds: float) -> None:
        pass

    def row_ended(self, index: int) -> None:
        pass


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_the_law_does_not_depend_on_how_k_is_chosen(rule: Rule) -> None:
    """6,000 texts of three tokens over three, a hundred at a time. The K of each round is chosen by the tokens that all
    of them have committed. Against the exact law (chi-square over 27 texts; false alarm 1e-6). A K chosen by the drafts
    themselves would be the wrong rule "drop-unlikely" of test_lossless.py, which is detected there."""
    target, drafter = table_pair(3)
    counts = torch.zeros(27)
    num_texts, at_a_time = 6_000, 100
    for first in range(0, num_texts, at_a_time):
        seeds = range(first, first + at_a_time)
        asked = [Request([0], Sampling(seed=seed, max_new_tokens=3)) for seed in seeds]
        for a, b, c in tokens(target, drafter, asked, rule, Wandering()):
            counts[a * 9 + b * 3 + c] += 1
    p = target.model.table.softmax(-1)
    law = torch.einsum("a,ab,bc->abc", p[0], p, p).flatten()
    statistic = float(((counts - num_texts * law).square() / (num_texts * law)).sum())
    assert statistic < 79.0  # chi-square with 26 degrees of freedom: 3e-7


@pytest.mark.parametrize("rule_name", ["gumbel", "rejection"])
def test_auto_in_the_loop(rule_name: str) -> None:
    """Under gumbel, and under any rule at temperature 0, auto gives the very tokens of plain decoding."""
    target, drafter = table_pair(6)
    temperature = 1.0 if rule_name == "gumbel" else 0.0
    asked = [Request([i], Sampling(seed=i, max_new_tokens=40, temperature=temperature)) for i in range(3)]
    schedule = MadeUpTimes({1: COSTS["cheap"]})
    rounds = list(decode(target, drafter, asked, RULES[rule_name], num_draft_tokens=schedule))
    assert len({row.num_drafted for round_ in rounds for row in round_.rows}) > 2
    texts = [tuple(i for r in rounds for row in r.rows if row.row == n for i in row.token_ids) for n in range(3)]
    assert texts == tokens(target, NoDrafter(), asked, RULES[rule_name], 0)


def test_costs_are_those_of_rounds() -> None:
    target, drafter = table_pair(5)
    # A look-up finds nothing in random text; its rounds are measured all the same.
    for one in (drafter, NgramDrafter()):
        measured = measure_round_costs(target, one, RULES["rejection"], 2, 60)
        assert list(measured.seconds) == list(target.execution.favoured_k) == list(measured.spread)
        for k, seconds in measured.seconds.items():
            assert 0 < measured.verify_s[k] < seconds and measured.num_rounds[k] % 4 == 0


def test_the_round_after_a_prefill_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is the only one. What the prefill took is kept all the same. (The times are made up.)"""
    timings = [Timing(8.0, 0.5, 0.5, 9.5), *[Timing(0.0, 0.25, 0.5, 1.0)] * 9]
    arm = CostArm(*table_pair(5), 2)
    for num_rounds, wanted in ((10, [Timing(8.0, 0.25, 0.5, 9.0), *timings[2:5]]), (1, timings[:1])):
        rounds = [Round((), timing) for timing in timings[:num_rounds]]
        monkeypatch.setattr(measured_costs, "decode", lambda *_, rounds=rounds, **__: iter(rounds))
        assert time_rounds([arm], RULES["rejection"], num_rows=1, length=4, num_passes=1) == [wanted]


def test_costs_of_a_model_with_hardly_any_context() -> None:
    """Every text ends in its first round or two."""
    model = table_lm(random_table(5, 0), context_len=4)
    costs = measure_round_costs(model, ModelDrafter(model), RULES["rejection"], 1, 4)
    assert min(costs.seconds.values()) > 0


def test_auto_through_the_door() -> None:
    target, drafter = table_pair(5)
    decoder = Decoder(target, None, frozenset(), drafter, acceptance="gumbel", num_draft_tokens="auto")
    auto, plain = (d.generate([[1], [2]], seed=[3, 4], max_new_tokens=30) for d in (decoder, decoder.plain()))
    assert [c.token_ids for c in auto] == [c.token_ids for c in plain]
    with pytest.raises(OptionError, match="num_draft_tokens = 'much'"):
        decoder.generate([[1]], num_draft_tokens="much")
    # Rows of one seed meet the same noise, so that K for one must not follow from what happened to the other.
    chunks = list(decoder.stream_many([[1], [2]], seed=[3, 3], max_new_tokens=30, acceptance="rejection"))
    assert [chunk.stats.num_draft_tokens for chunk in chunks[:6]] == [4] * 6


def test_why_a_k_is_chosen() -> None:
    """With acceptance a, two drafted tokens give 1 + a + a^2 tokens: for the price of 1.75 from a = 1/2 on."""
    one, other = adaptive({1: {0: 1.0, 2: 1.74}, 4: {0: 1.0, 2: 3.0}}).choices()
    assert (one.num_rows, one.best_k, one.least_acceptance) == (1, 2, 0.5)
    assert (other.num_rows, other.best_k, other.least_acceptance) == (4, 0, None)
