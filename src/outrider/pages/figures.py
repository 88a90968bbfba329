"""Figures of pages, as SVG elements. Matplotlib draws them.

They are for light and dark pages: ink takes the page's text colour; the colours contrast with both pages and can be
told apart by the colour-blind; marker shapes differ as well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from outrider.records import Interval

_INK, _BLUE, _ORANGE = "#010203", "#2b8cd6", "#d55e00"
_LINES = (  # colour and marker of each
    (_BLUE, "o"),
    (_ORANGE, "s"),
    ("#1d9a6c", "^"),
    ("#c0579c", "D"),
    ("#8a7f1c", "v"),
    ("#7a6fd0", "P"),
)
_PAGE_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text remains text
    "svg.hashsalt": "outrider",  # reproducible ids
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def svg_of_lines(
    name: str,
    lines: Mapping[str, Sequence[tuple[float, Interval]]],
    across: str,
    up: str,
    *,
    level: float | None = None,
    most: float | None = None,
) -> str:
    """SVG of lines with the bars of their intervals.

    Args:
        level: of a dashed line across, which is the baseline.
        most: upper end of the axis.
    """
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Any) -> None:
        if level is not None:
            axes.axhline(level, color=_INK, lw=1, ls="--")
        for (label, points), (colour, marker) in zip(lines.items(), cycle(_LINES), strict=False):
            at, values = [x for x, _ in points], [value for _, value in points]
            bars(axes, at, values, label, color=colour, marker=marker)
        axes.set_ylim(0, most)
        if all(float(x).is_integer() for points in lines.values() for x, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(axes, 2)

    return _svg(name, across, up, draw)


def svg_of_parts(name: str, rows: Mapping[str, Mapping[str, float]], across: str) -> str:
    """SVG of horizontal bars, one for each row from the top, each made of parts."""

    def draw(axes: Any) -> None:
        lefts = dict.fromkeys(rows, 0.0)
        for part, (colour, _) in zip(next(iter(rows.values())), _LINES, strict=False):
            widths = [row[part] for row in rows.values()]
            axes.barh(list(rows), widths, left=list(lefts.values()), color=colour, label=part, height=0.7)
            lefts = {label: lefts[label] + row[part] for label, row in rows.items()}
        axes.invert_yaxis()
        _legend(axes, 4)

    return _svg(name, across, "", draw, height=1.2 + 0.3 * len(rows))


def _legend(axes: Any, num_columns: int) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=num_columns, fontsize="small")


def _svg(name: str, across: str, up: str, draw: Callable[[Any], None], height: float = 3.2) -> str:
    """Draw a figure as an SVG element of a page.

    Args:
        name: unique in the page; all ids in the element begin with it.
        height: inches; the width is 5.2.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_PAGE_STYLE):
        figure = Figure(figsize=(5.2, height), layout="constrained")
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


def bars(axes: Any, at: Sequence[float], values: Sequence[Interval], label: str, **style: Any) -> None:
    """Draw values with the bars of their intervals."""
    ends = [
        [one.value - (one.value if one.low is None else one.low) for one in values],
        [(one.value if one.high is None else one.high) - one.value for one in values],
    ]
    axes.errorbar(at, [one.value for one in values], yerr=ends, capsize=3, label=label, **style)
