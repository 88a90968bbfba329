"""Tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def new_table(title: str, *columns: str, num_texts: int = 1) -> Table:
    """Empty table for 80 columns: the first columns are texts and shrink, the others are numbers."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    out = Table(title=escape(title), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in columns[:num_texts]:
        out.add_column(name, overflow="fold", min_width=8)
    for name in columns[num_texts:]:
        out.add_column(name, justify="right", no_wrap=True, overflow="fold", min_width=0)
    return out
