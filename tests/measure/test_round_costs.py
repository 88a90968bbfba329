"""Rounds of the loop, timed; and predictions from counts and made-up costs, by hand."""

from dataclasses import replace

import pytest

from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.measure import round_costs
from outrider.measure.round_costs import (
    NUM_STEPS,
    CostArm,
    Costs,
    RoundCost,
    choices,
    measure_costs,
    measure_round_costs,
    time_rounds,
)
from outrider.options import Sampling
from outrider.records import Round, Stats, Timing
from outrider.sampling.rules import RULES
from toys import random_table, table_lm, table_pair


def test_every_k_has_a_cost_with_hardly_any_context() -> None:
    short = table_lm(random_table(5, 0), context_len=4)
    costs = measure_round_costs(short, model_drafter(short), RULES["rejection"])
    assert list(costs) == list(short.execution.favoured_k) and min(costs.values()) > 0


def test_the_round_after_a_prefill_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is the only one. What the prefill took is kept all the same. (The times are made up.)"""
    timings = [Timing(8.0, 0.5, 0.5, 9.5), *[Timing(0.0, 0.25, 0.5, 1.0)] * 9]
    arm = CostArm(*table_pair(5), 2)
    for num_rounds, wanted in ((10, [Timing(8.0, 0.25, 0.5, 9.0), *timings[2:5]]), (1, timings[:1])):
        rounds = [Round((), timing) for timing in timings[:num_rounds]]
        monkeypatch.setattr(round_costs, "decode", lambda *_, rounds=rounds, **__: iter(rounds))
        assert time_rounds([arm], RULES["rejection"], num_rows=1, length=4, num_passes=1) == [wanted]


def test_costs_of_every_draft_and_k() -> None:
    target, drafter = table_pair(7)
    steps: list[int] = []
    drafters, ks = {"draft": drafter, "ngram": ngram_drafter()}, {"draft": [1, 2], "ngram": [1]}
    how = RULES["block"], Sampling(temperature=0.5)
    costs = measure_costs(target, drafters, ks, *how, num_rows=3, context=20, on_pass=lambda: steps.append(1))
    assert len(steps) == NUM_STEPS and (costs.num_rows, costs.context) == (3, 20)
    assert set(costs.rounds) == {("draft", 1), ("draft", 2), ("ngram", 1)}
    cost = costs.rounds["draft", 2]
    assert 0 < cost.draft_s < cost.round_s and 0 < cost.verify_s < cost.round_s and costs.prefill_s > 0
    assert list(costs.lookup_s) == ["ngram"] and costs.lookup_s["ngram"] == costs.rounds["ngram", 1].draft_s > 0


COSTS = Costs(
    num_rows=2,
    context=64,
    prefill_s=0.1,
    plain=RoundCost(0.010, 0.0, 0.009),
    rounds={
        ("cheap", 1): RoundCost(0.012, 0.001, 0.010),
        ("cheap", 3): RoundCost(0.020, 0.004, 0.015),
        ("dear", 1): RoundCost(0.040, 0.028, 0.010),
    },
)


def test_choices_by_hand() -> None:
    """Texts of nine tokens. A round of "cheap" with two drafted tokens was not timed: it lies between."""
    cut = Stats(9, (2.0, 3.0), (0.0, 5.0), num_truncated_rounds=1.0)
    short = Stats(9, (1.0, 0.0, 1.0, 1.0), (1.0, 0.0, 1.0, 1.0))
    whole = Stats(9, (0.0, 4.5), (0.0, 4.5))
    first, second, third = choices(
        COSTS, {("cheap", 1): [cut] * 2, ("cheap", 3): [short] * 2, ("dear", 1): [whole] * 2}
    )
    assert [(one.draft, one.k) for one in (first, second, third)] == [("cheap", 3), ("cheap", 1), ("dear", 1)]
    seconds = 0.010 + (0.012 + 0.020) / 2 + 0.020  # none drafted, two, three
    assert first.speed_up.value == pytest.approx(0.090 / seconds) and first.tau.value == pytest.approx(3.0)
    assert first.tokens_per_s == pytest.approx(2 * 9 / seconds) and first.round_ms == pytest.approx(20.0)
    assert first.if_free == pytest.approx(0.090 / (seconds - (0.001 + 0.004) / 2 - 0.004))
    assert first.if_agreeing == pytest.approx(0.090 / (3 * 0.020))  # four tokens a round: three rounds
    assert second.tau.value == pytest.approx(9 / 6) and second.speed_up.value == pytest.approx(0.090 / (6 * 0.012))
    assert third.speed_up.value == pytest.approx(0.5)
    # A look-up that finds nothing in ten rounds: the plain round, and the looking.
    costs = replace(COSTS, rounds={("ngram", 4): RoundCost(0.013, 0.002, 0.010)}, lookup_s={"ngram": 0.002})
    (one,) = choices(costs, {("ngram", 4): [Stats(10, (10.0,), (10.0,))]})
    assert one.speed_up.value == pytest.approx(0.010 / 0.012) and one.if_free == pytest.approx(1.0)
