"""Plots of results.

matplotlib is an extra (``plot``), imported only for drawing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import FileError, MissingExtra
from outrider.pages.figures import bars
from outrider.stats.intervals import Interval
from outrider.system.files import check_writable
from outrider.system.ranks import current_ranks

if TYPE_CHECKING:
    from outrider.bench.report import ArmSummary
    from outrider.records import Stats
    from outrider.scoring.alpha import Alpha

PLOT_FORMATS = (".png", ".svg", ".pdf")


def check_plot_file(path: Path, formats: Sequence[str] = PLOT_FORMATS) -> None:
    """Check before the measurement that a plot, or a page with plots, can be written.

    Raises:
        FileError: the name or the folder is invalid.
        MissingExtra: matplotlib is not installed.
    """
    if path.suffix not in formats:
        raise FileError(f"cannot plot to {path}: the name must end in {', '.join(formats)}")
    if not path.parent.is_dir():
        raise FileError(f"cannot write {path}: there is no folder {path.parent}")
    check_writable(path)
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot")


def plot_speed_up(summaries: Sequence[ArmSummary], path: Path, title: str) -> None:
    """Plot speed-up against K, a line with 95% bars for each draft."""
    figure, axes = _speed_up_axes(title, "speed-up over plain decoding (95% interval)")
    for draft, points in _measured_points(summaries).items():
        bars(axes, [k for k, _ in points], [interval for _, interval in points], draft, marker="o")
    _save(figure, axes, path)


def _measured_points(summaries: Sequence[ArmSummary]) -> dict[str, list[tuple[int, Interval]]]:
    """K and speed-up of the arms, by draft."""
    by_draft: dict[str, list[tuple[int, Interval]]] = {}
    for summary in summaries:
        k = summary.arm.num_draft_tokens
        if summary.arm.draft and isinstance(k, int) and summary.speed_up:  # "auto" has no place on the axis
            by_draft.setdefault(summary.arm.draft, []).append((k, summary.speed_up))
    return by_draft


def plot_prediction(points: Sequence[tuple[int, float]], path: Path, title: str) -> None:
    """Plot predicted speed-up against K."""
    figure, axes = _speed_up_axes(title, "predicted speed-up over plain decoding")
    axes.plot([k for k, _ in points], [value for _, value in points], marker="o")
    _save(figure, axes, path)


def plot_tau(lines: Mapping[str, Sequence[tuple[int, Interval | None]]], path: Path, title: str) -> None:
    """Plot tokens per round against K, a line with 95% bars for each draft."""
    figure, axes = _speed_up_axes(title, "expected tokens per round, tau (95% interval)")
    for draft, points in lines.items():
        there = [(k, interval) for k, interval in points if interval is not None]
        bars(axes, [k for k, _ in there], [interval for _, interval in there], draft, marker="o")
    _save(figure, axes, path)


def plot_rounds(arms: Mapping[str, Stats], path: Path, title: str) -> None:
    """Plot side by side the number of accepted tokens in a round, and the acceptance of each position."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from outrider.stats.counts import positions_of

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    histogram, positions = figure.subplots(1, 2)
    for place, (label, stats) in enumerate(arms.items()):
        colour = f"C{place % 10}"
        shares = [count / (stats.num_rounds or 1) for count in stats.acceptance_histogram]
        width = 0.8 / len(arms)
        lefts = [i - 0.4 + (place + 0.5) * width for i in range(len(shares))]
        histogram.bar(lefts, shares, width=width, color=colour, label=label)
        found = positions_of(stats)
        places = [one.position for one in found]
        conditional = [math.nan if one.conditional is None else one.conditional for one in found]
        unconditional = [math.nan if one.unconditional is None else one.unconditional for one in found]
        positions.plot(places, conditional, color=colour, marker="o")
        positions.plot(places, unconditional, color=colour, marker="s", ls="--")
    histogram.set(xlabel="accepted tokens in a round", ylabel="share of rounds", title=title)
    positions.set(xlabel="position in the round", ylabel="share accepted", ylim=(0, 1.05))
    positions.set_title("solid: of those verified; dashed: of those drafted")
    for axes in (histogram, positions):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=min(3, len(arms)), fontsize="small")
    figure.savefig(current_ranks().own_path(path), format=path.suffix[1:], dpi=150)


def plot_plan(
    lines: Mapping[str, Sequence[tuple[int, float]]], measured: Sequence[ArmSummary], path: Path, title: str
) -> None:
    """Plot predicted speed-up against K, a line for each draft, with the measurements on top."""
    figure, axes = _speed_up_axes(title, "speed-up over plain decoding")
    colours = {}
    for label, points in lines.items():
        (line,) = axes.plot([k for k, _ in points], [value for _, value in points], label=f"{label}, predicted")
        colours[label] = line.get_color()
    for draft, found in _measured_points(measured).items():
        at, values = [k for k, _ in found], [interval for _, interval in found]
        bars(axes, at, values, f"{draft}, measured (95%)", fmt="o", color=colours.get(draft))
    _save(figure, axes, path)


def plot_alpha(results: Mapping[str, Sequence[Alpha]], path: Path, title: str) -> None:
    """Plot alpha against temperature, a line with 95% bars for each draft and top-p."""
    figure, axes = _axes(title, "temperature", "alpha (95% interval)")
    for draft, alphas in results.items():
        greedy = [one for one in alphas if one.sampling.temperature == 0]
        top_ps = sorted({one.sampling.top_p for one in alphas if one not in greedy}) or [1.0]
        for top_p in top_ps:
            points = greedy + [one for one in alphas if one not in greedy and one.sampling.top_p == top_p]
            label = draft if top_ps == [1.0] else f"{draft}, top-p {top_p:g}"
            values = [one.alpha for one in points]
            bars(axes, [one.sampling.temperature for one in points], values, label, marker="o")
    _save(figure, axes, path)


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
    axes.set_ylim(bottom=0)  # after the points: a limit stops autoscaling
    axes.legend(loc="best")  # explicit: matplotlib warns about the default on slow machines
    figure.savefig(current_ranks().own_path(path), format=path.suffix[1:], dpi=150)
