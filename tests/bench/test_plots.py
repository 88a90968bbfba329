"""Pictures of results: that every point is in them."""

import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from outrider.bench.plots import check_plot_file, plot_alpha, plot_plan, plot_prediction, plot_speed_up
from outrider.bench.report import ArmSummary
from outrider.bench.run import Arm
from outrider.errors import MissingExtra
from outrider.options import Sampling
from outrider.records import Stats, Timing
from outrider.scoring.alpha import Alpha
from outrider.stats.intervals import Interval
from pairs import embedded


def summary(draft: str | None, k: int | None, value: float | None) -> ArmSummary:
    speed_up = None if value is None else Interval(value, value - 0.1, value + 0.1)
    pair, empty = (1.0, 0.1), Stats()
    name = f"{draft} {k}"
    return ArmSummary(Arm(name, embedded(), draft, k), 2, pair, pair, pair, 1.0, speed_up, speed_up, empty, Timing())


def summaries() -> list[ArmSummary]:
    return [
        summary(None, None, None),
        summary("small", None, 3.0),  # the draft alone: no speed-up of a pair
        summary("small", 1, 1.2),
        summary("small", 2, 1.4),
        summary("ngram", 1, 0.9),
        summary("ngram", 2, 1.1),
    ]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Those that are saved."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: found.append(self))
    return found


def test_plots_have_a_line_for_each_draft(tmp_path: Path, figures: list[Figure]) -> None:
    """With a point for each K, and none for what has no K: a draft alone is not a pair."""
    plot_speed_up(summaries(), tmp_path / "plot.svg", "title")
    handles, labels = figures[0].axes[0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    points = {name: by_label.pop(name)[0].get_xydata().tolist() for name in ("small", "ngram")}
    assert len(by_label) <= 1  # plain decoding
    assert points == {"small": [[1, 1.2], [2, 1.4]], "ngram": [[1, 0.9], [2, 1.1]]}


def alpha(temperature: float, top_p: float, value: float) -> Alpha:
    return Alpha(Sampling(temperature=temperature, top_p=top_p), Interval(value, value - 0.1, value + 0.1), 9)


PLOTS = {
    "measured": (lambda path: plot_speed_up(summaries(), path, "title"), 1.4),
    "predicted": (lambda path: plot_prediction([(1, 0.8), (2, 3.5)], path, "title"), 3.5),
    "plan": (lambda path: plot_plan({"small": [(1, 1.3), (2, 1.5)]}, summaries(), path, "title"), 1.5),
    "alpha": (lambda path: plot_alpha({"small": [alpha(0, 1, 0.4), alpha(1, 0.9, 0.6)]}, path, "title"), 0.6),
}


@pytest.mark.parametrize("name", PLOTS)
def test_all_points_are_in_the_picture(name: str, tmp_path: Path, figures: list[Figure]) -> None:
    draw, largest = PLOTS[name]
    draw(tmp_path / "plot.svg")
    (axes,) = figures[0].axes
    low, high = axes.get_ylim()
    heights = [y for line in axes.lines for y in line.get_ydata()]
    assert len(heights) > 2 and low == 0 and largest in heights and max(heights) < high


def test_a_plan_has_predictions_and_measurements(tmp_path: Path, figures: list[Figure]) -> None:
    """In the same colour for the same draft."""
    plot_plan({"small": [(1, 1.3)], "ngram": [(1, 0.8)]}, summaries(), tmp_path / "plot.svg", "title")
    handles, labels = figures[0].axes[0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    assert {f"{name}, {what}" for name in ("small", "ngram") for what in ("predicted", "measured (95%)")} < set(labels)
    for name in ("small", "ngram"):
        assert by_label[f"{name}, predicted"].get_color() == by_label[f"{name}, measured (95%)"][0].get_color()


def test_alpha_has_a_line_for_each_top_p(tmp_path: Path, figures: list[Figure]) -> None:
    """At temperature 0 they begin together. Single runs have no bars."""
    single = Alpha(Sampling(temperature=1.5), Interval(0.5, None, None), 9)
    alphas = [alpha(0, 0.9, 0.4), alpha(1, 0.9, 0.5), alpha(1, 1.0, 0.6), single]
    plot_alpha({"small": alphas}, tmp_path / "plot.svg", "title")
    handles, labels = figures[0].axes[0].get_legend_handles_labels()
    points = {label: handle[0].get_ydata().tolist() for label, handle in zip(labels, handles, strict=True)}
    assert points == {"small, top-p 0.9": [0.4, 0.5], "small, top-p 1": [0.4, 0.6, 0.5]}


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and folders of plots: tests/cli/test_all_commands.py."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"this needs matplotlib: pip install '\.\[plot\]'"):
        check_plot_file(tmp_path / "plot.pdf")
