"""Pictures of results, for people who would rather look than read.

matplotlib is an extra (``plot``), imported only where something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import FileError, MissingExtra
from outrider.files import check_writable
from outrider.intervals import Interval

if TYPE_CHECKING:
    from outrider.bench.report import ArmSummary
    from outrider.distill.shapes import ShapeCost
    from outrider.lab.alpha import Alpha
    from outrider.lab.counts import RoundCounts

PLOT_FORMATS = (".png", ".svg", ".pdf")


def check_plot_file(path: Path) -> None:
    """Find out before the measurement, not after it, that a plot cannot be made.

    Raises:
        FileError: the name or the folder is not possible.
        MissingExtra: matplotlib is not installed.
    """
    if path.suffix not in PLOT_FORMATS:
        raise FileError(f"cannot plot to {path}: the name must end in {', '.join(PLOT_FORMATS)}")
    if not path.parent.is_dir():
        raise FileError(f"cannot write {path}: there is no folder {path.parent}")
    check_writable(path)
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot")


def plot_speed_up(summaries: Sequence[ArmSummary], path: Path, title: str) -> None:
    """Speed-up against K, a line with 95% bars for each draft."""
    figure, axes = _speed_up_axes(title, "speed-up over plain decoding (95% interval)")
    for draft, points in _measured_points(summaries).items():
        _bars(axes, [k for k, _ in points], [interval for _, interval in points], draft, marker="o")
    _save(figure, axes, path)


def _measured_points(summaries: Sequence[ArmSummary]) -> dict[str, list[tuple[int, Interval]]]:
    """K and speed-up of the arms of each draft."""
    by_draft: dict[str, list[tuple[int, Interval]]] = {}
    for summary in summaries:
        k = summary.arm.num_draft_tokens
        if summary.arm.draft and isinstance(k, int) and summary.speed_up:  # "auto" has no place on the axis
            by_draft.setdefault(summary.arm.draft, []).append((k, summary.speed_up))
    return by_draft


def plot_prediction(points: Sequence[tuple[int, float]], path: Path, title: str) -> None:
    """Predicted speed-up against K."""
    figure, axes = _speed_up_axes(title, "predicted speed-up over plain decoding")
    axes.plot([k for k, _ in points], [value for _, value in points], marker="o")
    _save(figure, axes, path)


def plot_tau(lines: Mapping[str, Sequence[tuple[int, Interval | None]]], path: Path, title: str) -> None:
    """Tokens per round against K, a line with 95% bars for each draft."""
    figure, axes = _speed_up_axes(title, "expected tokens per round, tau (95% interval)")
    for draft, points in lines.items():
        there = [(k, interval) for k, interval in points if interval is not None]
        _bars(axes, [k for k, _ in there], [interval for _, interval in there], draft, marker="o")
    _save(figure, axes, path)


def plot_rounds(arms: Mapping[str, RoundCounts], path: Path, title: str) -> None:
    """Beside each other how many drafted tokens stand in a round, and how often each position does."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    histogram, positions = figure.subplots(1, 2)
    for place, (label, counts) in enumerate(arms.items()):
        colour = f"C{place % 10}"
        shares = [count / (counts.num_rounds or 1) for count in counts.accepted]
        width = 0.8 / len(arms)
        lefts = [i - 0.4 + (place + 0.5) * width for i in range(len(shares))]
        histogram.bar(lefts, shares, width=width, color=colour, label=label)
        places = [one.position for one in counts.positions]
        rates = [(one.conditional, one.unconditional) for one in counts.positions]
        conditional = [math.nan if a is None else a for a, _ in rates]
        unconditional = [math.nan if b is None else b for _, b in rates]
        positions.plot(places, conditional, color=colour, marker="o")
        positions.plot(places, unconditional, color=colour, marker="s", ls="--")
    histogram.set(xlabel="accepted tokens in a round", ylabel="share of rounds", title=title)
    positions.set(xlabel="position in the round", ylabel="share that stands", ylim=(0, 1.05))
    positions.set_title("solid: if those before it stand; dashed: of those drafted")
    for axes in (histogram, positions):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=min(3, len(arms)), fontsize="small")
    figure.savefig(path, dpi=150)


def plot_plan(
    lines: Mapping[str, Sequence[tuple[int, float]]], measured: Sequence[ArmSummary], path: Path, title: str
) -> None:
    """Predicted speed-up against K, a line for each draft, with what was measured laid over it."""
    figure, axes = _speed_up_axes(title, "speed-up over plain decoding")
    colours = {}
    for label, points in lines.items():
        (line,) = axes.plot([k for k, _ in points], [value for _, value in points], label=f"{label}, predicted")
        colours[label] = line.get_color()
    for draft, found in _measured_points(measured).items():
        at, values = [k for k, _ in found], [interval for _, interval in found]
        _bars(axes, at, values, f"{draft}, measured (95%)", fmt="o", color=colours.get(draft))
    _save(figure, axes, path)


def plot_alpha(results: Mapping[str, Sequence[Alpha]], path: Path, title: str) -> None:
    """alpha against temperature, a line with 95% bars for each draft and top-p."""
    figure, axes = _axes(title, "temperature", "alpha (95% interval)")
    for draft, alphas in results.items():
        greedy = [one for one in alphas if one.sampling.temperature == 0]
        top_ps = sorted({one.sampling.top_p for one in alphas if one not in greedy}) or [1.0]
        for top_p in top_ps:
            points = greedy + [one for one in alphas if one not in greedy and one.sampling.top_p == top_p]
            label = draft if top_ps == [1.0] else f"{draft}, top-p {top_p:g}"
            values = [one.alpha for one in points]
            _bars(axes, [one.sampling.temperature for one in points], values, label, marker="o")
    _save(figure, axes, path)


def plot_shapes(costs: Sequence[ShapeCost], path: Path, title: str) -> None:
    """Milliseconds for a drafted token against parameters, a line for each number of layers; widths at the points."""
    figure, axes = _axes(title, "parameters, millions", "ms for a drafted token")
    for num_layers in sorted({one.shape.num_layers for one in costs}):
        row = sorted((one for one in costs if one.shape.num_layers == num_layers), key=lambda one: one.num_params)
        at, values = [one.num_params / 1e6 for one in row], [1e3 * one.draft_s for one in row]
        axes.plot(at, values, marker="o", label=f"{num_layers} layer{'s' * (num_layers > 1)}")
        for one, x, y in zip(row, at, values, strict=True):
            axes.annotate(str(one.shape.hidden_size), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    _save(figure, axes, path)


def _bars(axes: Any, at: Sequence[float], values: Sequence[Interval], label: str, **style: Any) -> None:
    ends = [
        [one.value - (one.value if one.low is None else one.low) for one in values],
        [(one.value if one.high is None else one.high) - one.value for one in values],
    ]
    axes.errorbar(at, [one.value for one in values], yerr=ends, capsize=3, label=label, **style)


def _axes(title: str, across: str, up: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(title)
    return figure, axes


def _speed_up_axes(title: str, what: str) -> tuple[Any, Any]:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes(title, "drafted tokens per round, K", what)
    axes.axhline(1.0, color="grey", linestyle="--", linewidth=1, label="plain decoding")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.set_ylim(bottom=0)  # now that the points are in: a scale with a limit no longer follows them
    axes.legend()
    figure.savefig(path, dpi=150)
