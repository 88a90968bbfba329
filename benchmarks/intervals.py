"""Intervals in the tables of benchmarks."""

from __future__ import annotations

from outrider.records import Interval


def interval_text(interval: Interval | None, digits: int = 2) -> str:
    """Format like 1.31 [1.25, 1.38], with the bracket escaped for rich."""
    if interval is None:
        return "-"
    ends = "" if interval.low is None else f" \\[{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
    return f"{interval.value:.{digits}f}{ends}"
