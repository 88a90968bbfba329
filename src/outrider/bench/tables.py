"""Tables on a terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table


class NameCell:
    """Name in a table. Where it does not fit, it breaks after a slash, a hyphen or a space."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(max(map(len, self._parts)), len(self._name)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        lines = [""]
        for part in self._parts:
            if lines[-1] and len((lines[-1] + part).rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")

    @property
    def _parts(self) -> list[str]:
        return re.findall(r"[^/\- ]*[/\- ]|[^/\- ]+", self._name) or [""]


def new_table(title: str, *columns: str) -> Table:
    """Empty table for 80 columns: the first column is text and shrinks, the others are numbers."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        is_text = place == 0
        out.add_column(
            name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold", min_width=8 * is_text
        )
    return out
