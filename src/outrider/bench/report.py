"""What is said of measurements: a summary of each arm, as JSON, as a table, as a plot.

The JSON documents of all commands are described in docs/json.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.run import Arm, Measurement
from outrider.errors import FileError, MissingExtra
from outrider.files import check_writable
from outrider.flow import Stats, Timing
from outrider.intervals import Interval, mean_std, paired_ratio
from outrider.lab.counts import RoundCounts

if TYPE_CHECKING:
    from rich.table import Table

PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over all cases.

    Attributes:
        ms_per_token: of decoding, mean and standard deviation over the cases.
        total_ms_per_token: the same with the prefill counted in.
        prefill_ms: of one prompt.
        speed_up: of decoding, over the baseline arm on the same cases; None for the baseline itself.
        total_speed_up: the same with the prefill counted in.
    """

    arm: Arm
    num_cases: int
    ms_per_token: tuple[float, float | None]
    total_ms_per_token: tuple[float, float | None]
    prefill_ms: tuple[float, float | None]
    tokens_per_s: float
    speed_up: Interval | None
    total_speed_up: Interval | None
    stats: Stats
    timing: Timing

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.arm.name,
            "draft": self.arm.draft,
            "k": self.arm.num_draft_tokens,
            "num_cases": self.num_cases,
            "ms_per_token": {"mean": self.ms_per_token[0], "std": self.ms_per_token[1]},
            "total_ms_per_token": {"mean": self.total_ms_per_token[0], "std": self.total_ms_per_token[1]},
            "prefill_ms": {"mean": self.prefill_ms[0], "std": self.prefill_ms[1]},
            "tokens_per_s": self.tokens_per_s,
            "speed_up": self.speed_up.to_json() if self.speed_up else None,
            "total_speed_up": self.total_speed_up.to_json() if self.total_speed_up else None,
            "stats": self.stats.to_json(),
            "time_s": self.timing.to_json(),
        }


def summarise(measurements: Sequence[Measurement], arms: Sequence[Arm]) -> list[ArmSummary]:
    """A summary of each arm; the first is the baseline of the others.

    Cases that an arm has not done (the measurement was interrupted) are left out; if none is left there is no summary.
    """
    groups = [[m for m in measurements if m.arm == arm] for arm in arms]
    done = set.intersection(*({m.case.index for m in group} for group in groups))
    groups = [sorted((m for m in group if m.case.index in done), key=lambda m: m.case.index) for group in groups]
    if not done:
        return []
    return [_summary(group, groups[0], is_baseline=place == 0) for place, group in enumerate(groups)]


def _summary(group: Sequence[Measurement], base: Sequence[Measurement], *, is_baseline: bool) -> ArmSummary:
    timing = sum((m.timing for m in group), Timing())
    stats = sum((m.stats for m in group), Stats())

    def ratio(times: list[float], base_times: list[float]) -> Interval | None:
        return None if is_baseline else paired_ratio(base_times, times)

    return ArmSummary(
        arm=group[0].arm,
        num_cases=len(group),
        ms_per_token=mean_std([1e3 * m.decode_s_per_token for m in group]),
        total_ms_per_token=mean_std([1e3 * m.total_s_per_token for m in group]),
        prefill_ms=mean_std([1e3 * m.timing.prefill_s for m in group]),
        tokens_per_s=stats.num_generated_tokens / timing.decode_s,
        speed_up=ratio([m.decode_s_per_token for m in group], [m.decode_s_per_token for m in base]),
        total_speed_up=ratio([m.total_s_per_token for m in group], [m.total_s_per_token for m in base]),
        stats=stats,
        timing=timing,
    )


def interval_text(interval: Interval | None) -> str:
    """Like 1.31 [1.25, 1.38]; for a console, so the bracket is escaped."""
    if interval is None:
        return "-"
    ends = "" if interval.low is None else f" \\[{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.value:.2f}{ends}"


def pm_text(pair: tuple[float, float | None], digits: int) -> str:
    """Like 5.31 ±0.12."""
    return f"{pair[0]:.{digits}f}" + ("" if pair[1] is None else f" ±{pair[1]:.{digits}f}")


def new_table(title: str, *columns: str) -> Table:
    """An empty table that fits 80 columns: the first column is text and gives way, the others are numbers."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        is_text = place == 0
        out.add_column(
            name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold", min_width=8 * is_text
        )
    return out


def table(summaries: Sequence[ArmSummary], title: str) -> Table:
    """A table for people."""
    out = new_table(title, "arm", "K", "ms/token", "tok/s", "speed-up, 95%", "tau", "prefill ms")
    for summary in summaries:
        arm = summary.arm
        out.add_row(
            arm.label,
            str(arm.num_draft_tokens or "alone"),
            pm_text(summary.ms_per_token, 2),
            f"{summary.tokens_per_s:.0f}",
            interval_text(summary.speed_up),
            f"{summary.stats.mean_acceptance_length or 1:.2f}",
            pm_text(summary.prefill_ms, 1),
        )
    return out


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
    by_draft: dict[str, list[tuple[int, Interval]]] = {}
    for summary in summaries:
        k = summary.arm.num_draft_tokens
        if summary.arm.draft and isinstance(k, int) and summary.speed_up:  # "auto" has no place on the axis
            by_draft.setdefault(summary.arm.draft, []).append((k, summary.speed_up))
    for draft, points in by_draft.items():
        _bars(axes, [k for k, _ in points], [interval for _, interval in points], draft)
    _save(figure, axes, path)


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
        _bars(axes, [k for k, _ in there], [interval for _, interval in there], draft)
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


def _bars(axes: Any, ks: Sequence[int], intervals: Sequence[Interval], label: str) -> None:
    """A line with the intervals as bars."""
    values = [interval.value for interval in intervals]
    bars = [
        [interval.value - (interval.low or interval.value) for interval in intervals],
        [(interval.high or interval.value) - interval.value for interval in intervals],
    ]
    axes.errorbar(ks, values, yerr=bars, marker="o", capsize=3, label=label)


def _speed_up_axes(title: str, what: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="grey", linestyle="--", linewidth=1, label="plain decoding")
    axes.set_xlabel("drafted tokens per round, K")
    axes.set_ylabel(what)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.set_ylim(bottom=0)  # now that the points are in: a scale with a limit no longer follows them
    axes.legend()
    figure.savefig(path, dpi=150)
