"""What is made of costs and counts: worked out by hand."""

from dataclasses import replace

import pytest

from outrider.drafters.lookups import ngram_drafter
from outrider.measure.round_costs import NUM_STEPS, Costs, RoundCost, choices, measure_costs
from outrider.options import Sampling
from outrider.records import Stats
from outrider.sampling.rules import RULES
from toys import table_pair

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


def test_choices() -> None:
    """Texts of nine tokens, by hand. A round of "cheap" with two drafted tokens was not timed: it lies between."""
    cut = Stats(9, (2.0, 3.0), (0.0, 5.0), num_truncated_rounds=1.0)
    short = Stats(9, (1.0, 0.0, 1.0, 1.0), (1.0, 0.0, 1.0, 1.0))
    whole = Stats(9, (0.0, 4.5), (0.0, 4.5))
    first, second, third = choices(
        COSTS, {("cheap", 1): [cut] * 2, ("cheap", 3): [short] * 2, ("dear", 1): [whole] * 2}
    )
    assert [(one.draft, one.k) for one in (first, second, third)] == [("cheap", 3), ("cheap", 1), ("dear", 1)]
    seconds = 0.010 + (0.012 + 0.020) / 2 + 0.020  # none drafted, two, three
    assert first.speed_up.value == pytest.approx(0.090 / seconds) and first.tau.value == pytest.approx(3.0)
    assert first.tokens_per_s == pytest.approx(2 * 9 / seconds)
    assert first.if_free == pytest.approx(0.090 / (seconds - (0.001 + 0.004) / 2 - 0.004))
    assert first.if_agreeing == pytest.approx(0.090 / (3 * 0.020))  # four tokens a round: three rounds
    assert second.tau.value == pytest.approx(9 / 6) and second.speed_up.value == pytest.approx(0.090 / (6 * 0.012))
    assert third.speed_up.value == pytest.approx(0.5)
    assert first.speed_up.low == pytest.approx(first.speed_up.value)  # the texts are alike


def test_speed_up_is_compared_text_by_text() -> None:
    """As measured arms are: the geometric mean, in which twice as fast and half as fast are even."""
    fast = Stats(12, (0.0, 5.0), (0.0, 5.0))
    slow = Stats(6, (10.0,), (0.0, 10.0))
    (one,) = choices(COSTS, {("cheap", 1): [fast, slow]})
    assert one.speed_up.value == pytest.approx((0.12 / 0.06 * 0.06 / 0.12) ** 0.5)
    assert one.tokens_per_s == pytest.approx(2 * 18 / 0.18)


def test_a_look_up_takes_its_time_when_it_finds_nothing() -> None:
    """Ten rounds without a draft: the plain round, and the looking."""
    costs = replace(COSTS, rounds={("ngram", 4): RoundCost(0.013, 0.002, 0.010)}, lookup_s={"ngram": 0.002})
    idle = Stats(10, (10.0,), (10.0,))
    (one,) = choices(costs, {("ngram", 4): [idle]})
    assert one.speed_up.value == pytest.approx(0.010 / 0.012) and one.if_free == pytest.approx(1.0)


def test_measured_costs() -> None:
    target, drafter = table_pair(7)
    steps: list[int] = []
    costs = measure_costs(
        target,
        {"draft": drafter, "ngram": ngram_drafter()},
        {"draft": [1, 2], "ngram": [1]},
        RULES["block"],
        Sampling(temperature=0.5),
        num_rows=3,
        context=20,
        on_pass=lambda: steps.append(1),
    )
    assert len(steps) == NUM_STEPS and (costs.num_rows, costs.context) == (3, 20)
    assert set(costs.rounds) == {("draft", 1), ("draft", 2), ("ngram", 1)}
    cost = costs.rounds["draft", 2]
    assert costs.draft_step_s("draft") == cost.draft_s / 2
    assert 0 < cost.draft_s < cost.round_s and 0 < cost.verify_s < cost.round_s and costs.prefill_s > 0
    assert set(costs.target_s()) == {1, 2, 3}
    assert list(costs.lookup_s) == ["ngram"] and costs.lookup_s["ngram"] == costs.rounds["ngram", 1].draft_s > 0
