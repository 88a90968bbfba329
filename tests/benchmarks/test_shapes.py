"""What shapes cost, and which are worth training."""

import json
import sys
from collections.abc import Sequence
from itertools import product

import pytest

from outrider.distill.student import Shape, new_draft
from outrider.measure.round_costs import CostArm
from outrider.measure.tau import predict
from outrider.records import Timing
from scripts import script
from toys import as_lm, tiny_llama

bench = script("benchmarks/shapes.py")


def test_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm's rounds are counted as what they were, in one group or in several. The times are made up: a draft takes
    a millisecond for a layer and token, all else 7.3, and one more for each drafted token."""
    asked: list[int] = []

    def time_rounds(arms: Sequence[CostArm], *_: object, **__: object) -> list[list[Timing]]:
        asked.append(len(arms))
        times = []
        for arm in arms:
            layers = arm.drafter.lm.model.config.num_hidden_layers if arm.drafter.lm is not None else 0
            draft_s, rest_s = 1e-3 * layers * arm.k, 1e-3 * (7.3 + arm.k)
            times.append([Timing(1.0, draft_s, rest_s, 1.0 + draft_s + rest_s)])
        return times

    monkeypatch.setattr(bench, "time_rounds", time_rounds)
    lm = as_lm(tiny_llama())
    shapes = [Shape(layers, 8) for layers in (1, 2, 3, 4, 5, 6, 7)] + [Shape(2, 32)]
    costs = bench.measure_shapes(lm, shapes)
    assert asked == [6 + len(lm.execution.favoured_k), 2]
    assert [cost.shape for cost in costs] == shapes
    assert [cost.draft_s for cost in costs] == pytest.approx([1e-3 * shape.num_layers for shape in shapes])
    parameters = new_draft(lm.model.config, shapes[0], 0).parameters()
    assert costs[0].num_params == sum(parameter.numel() for parameter in parameters)
    others = {k: 1e-3 * (7.3 + k) for k in lm.execution.favoured_k if k > 0}
    wanted = [bench.break_even(cost.draft_s, others, 7.3e-3) for cost in costs]
    assert [cost.break_even is None for cost in costs] == [alpha is None for alpha in wanted]
    assert None in wanted and wanted[0] is not None
    assert [cost.break_even or 0 for cost in costs] == pytest.approx([alpha or 0 for alpha in wanted], abs=1e-6)


def test_break_even_is_where_the_closed_form_is_one() -> None:
    """v = 1.2, c = 0.1: the best K of the closed form gains nothing below this alpha, and something above it."""
    others = {k: 0.0120 for k in (1, 2, 3, 4)}
    alpha = bench.break_even(0.001, others, 0.010)
    assert alpha is not None
    for nudge, is_faster in ((-0.01, False), (0.01, True)):
        predictions = predict([1, 2, 3, 4], alpha=alpha + nudge, c=0.1, v=1.2, c_ops=0.1)
        assert (max(one.speed_up for one in predictions) > 1) == is_faster
    assert bench.break_even(0.010, others, 0.010) is None
    assert bench.break_even(0.0, {1: 0.009}, 0.010) == pytest.approx(0.0, abs=1e-6)


def test_the_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = bench.default_shapes(as_lm(tiny_llama(num_layers=5)))
    assert {(one.num_layers, one.hidden_size) for one in shapes} == set(product((1, 2), (8, 16, 24, 32)))
    monkeypatch.setattr(sys, "argv", ["shapes.py", "--shape", "1x64", "--shape", "2x64", "--context", "8"])
    bench.main()
    *table, last = capsys.readouterr().out.splitlines()
    small, deep = json.loads(last)["shapes"]
    assert small["draft_s"] > 0 and (small["is_worth_training"] or deep["is_worth_training"])
    assert deep["shape"] == {"num_layers": 2, "hidden_size": 64}
    assert any(line.split()[:3] == ["2", "x", "64"] for line in table)
