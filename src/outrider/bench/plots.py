"""Plots of results.

matplotlib is an extra (``plot``), imported only for drawing.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import FileError, MissingExtra
from outrider.stats.intervals import Interval
from outrider.system.files import check_writable
from outrider.system.ranks import current_ranks

if TYPE_CHECKING:
    from outrider.bench.report import ArmSummary
    from outrider.distill.shapes import ShapeCost
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
        _bars(axes, [k for k, _ in points], [interval for _, interval in points], draft, marker="o")
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
        _bars(axes, [k for k, _ in there], [interval for _, interval in there], draft, marker="o")
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
        _bars(axes, at, values, f"{draft}, measured (95%)", fmt="o", color=colours.get(draft))
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
            _bars(axes, [one.sampling.temperature for one in points], values, label, marker="o")
    _save(figure, axes, path)


def plot_shapes(costs: Sequence[ShapeCost], path: Path, title: str) -> None:
    """Plot milliseconds per drafted token against parameters, a line for each number of layers, labelled by width."""
    figure, axes = _axes(title, "parameters, millions", "ms per drafted token")
    for num_layers in sorted({one.shape.num_layers for one in costs}):
        row = sorted((one for one in costs if one.shape.num_layers == num_layers), key=lambda one: one.num_params)
        at, values = [one.num_params / 1e6 for one in row], [1e3 * one.draft_s for one in row]
        axes.plot(at, values, marker="o", label=f"{num_layers} layer{'s' * (num_layers > 1)}")
        for one, x, y in zip(row, at, values, strict=True):
            axes.annotate(str(one.shape.hidden_size), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    _save(figure, axes, path)


# Figures for light and dark pages. Ink takes the page's text colour. Blue and orange contrast with both pages and are
# safe for the colour-blind; marker shapes differ as well.
_INK, _BLUE, _ORANGE = "#010203", "#2b8cd6", "#d55e00"
_BAND: dict[str, Any] = {"color": "#808080", "alpha": 0.25, "lw": 0}
_PAGE_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text remains text
    "svg.hashsalt": "outrider",  # reproducible ids
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def svg_of_bins(counts: Sequence[int], band: tuple[int, int]) -> str:
    """SVG histogram over [0, 1], with the band that its bars should end in."""

    def draw(axes: Any) -> None:
        width = 1 / len(counts)
        axes.axhspan(*band, **_BAND)
        axes.bar([(i + 0.5) * width for i in range(len(counts))], counts, width=0.8 * width, color=_BLUE)
        axes.axhline(sum(counts) * width, color=_INK, lw=1)
        axes.set(xlim=(0, 1))

    return _svg("bins", "probability integral transform", "tokens", draw)


def svg_of_excess(excess: Sequence[float], distance: float) -> str:
    """SVG of an empirical distribution less the uniform one, at equal steps from 0 to 1, with its band."""

    def draw(axes: Any) -> None:
        axes.axhspan(-distance, distance, **_BAND)
        axes.axhline(0, color=_INK, lw=1)
        axes.plot([i / (len(excess) - 1) for i in range(len(excess))], excess, color=_BLUE)
        axes.set(xlim=(0, 1))

    return _svg("excess", "u, tokens ordered by q − p", "share at or below u, less u", draw)


def svg_of_acceptance(conditional: Sequence[Interval | None], unconditional: Sequence[Interval]) -> str:
    """SVG of the acceptance rate by place in the round: given that those before are accepted, and of all rounds."""
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Any) -> None:
        there = [(i + 0.95, one) for i, one in enumerate(conditional) if one is not None]
        _bars(axes, [at for at, _ in there], [one for _, one in there], "if those before it are", fmt="o", color=_BLUE)
        at = [i + 1.05 for i in range(len(unconditional))]
        _bars(axes, at, unconditional, "of all rounds", fmt="s", color=_ORANGE)
        axes.set(xlim=(0.5, len(unconditional) + 0.5), ylim=(-0.04, 1.04))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    return _svg("acceptance", "drafted token of the round", "share accepted", draw)


def svg_of_z(zs: Sequence[float], limit: float) -> str:
    """SVG of z-scores by place in the round, with their band."""
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Any) -> None:
        at = range(1, len(zs) + 1)
        axes.axhspan(-limit, limit, **_BAND)
        axes.axhline(0, color=_INK, lw=1)
        axes.vlines(at, 0, zs, color=_BLUE)
        axes.plot(at, zs, "o", color=_BLUE)
        axes.set(xlim=(0.5, len(zs) + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _svg("z", "token of the round", "z of the score", draw)


def _svg(name: str, across: str, up: str, draw: Callable[[Any], None]) -> str:
    """Draw a figure as an SVG element of a page.

    Args:
        name: unique in the page; all ids in the element begin with it.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_PAGE_STYLE):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel=across, ylabel=up)
        draw(axes)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    document = file.getvalue()
    element = document[document.index("<svg") :]
    element = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", element)
    return element.replace(_INK, "currentColor")


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
    axes.set_ylim(bottom=0)  # after the points: a limit stops autoscaling
    axes.legend(loc="best")  # explicit: matplotlib warns about the default on slow machines
    figure.savefig(current_ranks().own_path(path), format=path.suffix[1:], dpi=150)
