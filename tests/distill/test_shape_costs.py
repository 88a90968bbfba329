"""What shapes cost, and which are worth training."""

from collections.abc import Sequence

import pytest

from outrider.decoding.measured_costs import CostArm
from outrider.distill.shapes import (
    ShapeCost,
    break_even,
    default_shapes,
    measure_shapes,
    num_passes,
    worth_training,
)
from outrider.distill.student import Shape, new_draft
from outrider.drafters.model import ModelDrafter
from outrider.records import Timing
from outrider.stats.speedup import predict
from toys import as_lm, tiny_llama


def test_default_shapes() -> None:
    shapes = default_shapes(as_lm(tiny_llama(num_layers=5)))
    assert {shape.num_layers for shape in shapes} == {1, 2}
    assert {shape.hidden_size for shape in shapes} == {8, 16, 24, 32}
    assert len(shapes) == 8


def test_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm's rounds are counted as what they were, in one group or in several. The times are made up: a draft takes
    a millisecond for a layer and token, all else 7.3, and one more for each drafted token."""
    asked: list[int] = []

    def time_rounds(arms: Sequence[CostArm], *_: object, on_pass: object, **__: object) -> list[list[Timing]]:
        asked.append(len(arms))
        times = []
        for arm in arms:
            layers = arm.drafter.lm.model.config.num_hidden_layers if isinstance(arm.drafter, ModelDrafter) else 0
            draft_s, rest_s = 1e-3 * layers * arm.k, 1e-3 * (7.3 + arm.k)
            times.append([Timing(1.0, draft_s, rest_s, 1.0 + draft_s + rest_s)])
        return times

    monkeypatch.setattr("outrider.distill.shapes.time_rounds", time_rounds)
    lm = as_lm(tiny_llama())
    shapes = [Shape(layers, 8) for layers in (1, 2, 3, 4, 5, 6, 7)] + [Shape(2, 32, 40)]
    costs = measure_shapes(lm, shapes)
    assert asked == [6 + len(lm.execution.favoured_k), 2]
    assert [cost.shape for cost in costs] == shapes
    assert [cost.draft_s for cost in costs] == pytest.approx([1e-3 * shape.num_layers for shape in shapes])
    parameters = new_draft(lm.model.config, shapes[0], 0).parameters()
    assert costs[0].num_params == sum(parameter.numel() for parameter in parameters)
    others = {k: 1e-3 * (7.3 + k) for k in lm.execution.favoured_k if k > 0}
    wanted = [break_even(cost.draft_s, others, 7.3e-3) for cost in costs]
    assert [cost.break_even is None for cost in costs] == [alpha is None for alpha in wanted]
    assert None in wanted and wanted[0] is not None
    assert [cost.break_even or 0 for cost in costs] == pytest.approx([alpha or 0 for alpha in wanted], abs=1e-6)


def test_really_measured() -> None:
    steps: list[int] = []
    (cost,) = measure_shapes(as_lm(tiny_llama()), [Shape(1, 8)], length=8, on_pass=lambda: steps.append(1))
    assert len(steps) == num_passes(1) and cost.draft_s > 0


def test_break_even_is_where_the_closed_form_is_one() -> None:
    """v = 1.2, c = 0.1: the best K of the closed form gains nothing below this alpha, and something above it."""
    others = {k: 0.0120 for k in (1, 2, 3, 4)}
    alpha = break_even(0.001, others, 0.010)
    assert alpha is not None
    for nudge, is_faster in ((-0.01, False), (0.01, True)):
        predictions = predict([1, 2, 3, 4], alpha=alpha + nudge, c=0.1, v=1.2, c_ops=0.1)
        assert (max(one.speed_up for one in predictions) > 1) == is_faster
    assert break_even(0.010, others, 0.010) is None
    assert break_even(0.0, {1: 0.009}, 0.010) == pytest.approx(0.0, abs=1e-6)


def test_worth_training() -> None:
    costs = [
        ShapeCost(Shape(1, 64), 100, 1.0, 0.5),
        ShapeCost(Shape(1, 128), 300, 1.1, 0.5),
        ShapeCost(Shape(2, 64), 200, 2.0, 0.5),  # slower than the one before, and smaller
        ShapeCost(Shape(2, 128), 500, 2.2, 0.5),
    ]
    assert [one.num_params for one in worth_training(costs)] == [100, 300, 500]
    assert [one.num_params for one in worth_training(costs, 1.5)] == [100, 300]
    assert worth_training(costs, 0.5) == []
