"""Rounds of the loop, timed."""

import pytest

from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.measure import round_costs
from outrider.measure.round_costs import CostArm, measure_round_costs, time_rounds
from outrider.records import Round, Timing
from outrider.sampling.rules import RULES
from toys import random_table, table_lm, table_pair


def test_costs_are_those_of_rounds() -> None:
    target, drafter = table_pair(5)
    # A look-up finds nothing in random text; its rounds are measured all the same.
    for one in (drafter, ngram_drafter()):
        costs = measure_round_costs(target, one, RULES["rejection"])
        assert list(costs) == list(target.execution.favoured_k) and min(costs.values()) > 0


def test_the_round_after_a_prefill_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is the only one. What the prefill took is kept all the same. (The times are made up.)"""
    timings = [Timing(8.0, 0.5, 0.5, 9.5), *[Timing(0.0, 0.25, 0.5, 1.0)] * 9]
    arm = CostArm(*table_pair(5), 2)
    for num_rounds, wanted in ((10, [Timing(8.0, 0.25, 0.5, 9.0), *timings[2:5]]), (1, timings[:1])):
        rounds = [Round((), timing) for timing in timings[:num_rounds]]
        monkeypatch.setattr(round_costs, "decode", lambda *_, rounds=rounds, **__: iter(rounds))
        assert time_rounds([arm], RULES["rejection"], num_rows=1, length=4, num_passes=1) == [wanted]


def test_costs_of_a_model_with_hardly_any_context() -> None:
    """Every text ends in its first round or two."""
    model = table_lm(random_table(5, 0), context_len=4)
    costs = measure_round_costs(model, model_drafter(model), RULES["rejection"])
    assert min(costs.values()) > 0
