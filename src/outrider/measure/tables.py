"""Tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.records import Interval

if TYPE_CHECKING:
    from rich.table import Table


def new_table(title: str, *columns: str, num_texts: int = 1) -> Table:
    """Empty table for 80 columns: the first columns are texts and shrink, the others are numbers."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    out = Table(title=escape(title), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        is_text = place < num_texts
        out.add_column(
            name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold", min_width=8 * is_text
        )
    return out


def interval_text(interval: Interval | None, digits: int = 2) -> str:
    """Format like 1.31 [1.25, 1.38], with the bracket escaped for rich."""
    if interval is None:
        return "-"
    ends = "" if interval.low is None else f" \\[{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
    return f"{interval.value:.{digits}f}{ends}"
