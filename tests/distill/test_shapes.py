"""What shapes cost, and which are worth training."""

import pytest

from outrider.distill.shapes import ShapeCost, break_even, default_shapes, measure_shapes, worth_training
from outrider.distill.student import Shape, new_draft
from outrider.speedup import predict
from toys import as_lm, tiny_llama


def test_default_shapes() -> None:
    lm = as_lm(tiny_llama(num_layers=3))
    shapes = default_shapes(lm)
    assert {shape.num_layers for shape in shapes} == {1, 2, 3}
    assert {shape.hidden_size for shape in shapes} == {8, 16, 24, 32}
    assert len(shapes) == 12


def test_measured() -> None:
    steps: list[int] = []
    lm = as_lm(tiny_llama())
    shapes = [Shape(1, 8), Shape(6, 32, 40)]
    small, deep = measure_shapes(lm, shapes, length=8, on_pass=lambda: steps.append(1))
    assert len(steps) == 5 and [small.shape, deep.shape] == shapes
    assert 0 < 1.5 * small.draft_s < deep.draft_s  # six layers against one
    parameters = new_draft(lm.model.config, shapes[0], 0).parameters()
    assert deep.num_params > small.num_params == sum(parameter.numel() for parameter in parameters)


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
