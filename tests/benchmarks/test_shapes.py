"""What shapes cost, and which are worth training."""

import json
import sys
from itertools import product

import pytest

from outrider.measure.tau import predict
from scripts import script
from toys import as_lm, tiny_llama

bench = script("benchmarks/shapes.py")


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
