"""``outrider costs``: the stored round costs behind ``-k auto``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import JsonOption
from outrider.cli.shared.output import check_json_target, console_for, print_table, write_json
from outrider.errors import FileError, OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.decoding.cost_cache import KeptCosts


def costs(
    target: Annotated[str | None, typer.Option(help="Only this target, by its name in the list.")] = None,
    draft: Annotated[str | None, typer.Option(help="Only this draft, by its name in the list.")] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete the listed costs; the next run measures again.")
    ] = False,
    json_target: JsonOption = None,
) -> None:
    """Show or delete the stored costs that -k auto starts with.

    They are measured before the first run of a pair and kept for 30 days; for only an hour if implausible or noisy."""
    from outrider.decoding.cost_cache import kept_costs
    from outrider.system.files import cache_folder

    check_json_target(json_target)
    found, unreadable = kept_costs()
    for name, wanted in (("target", target), ("draft", draft)):
        if wanted is not None:
            found, unreadable = [one for one in found if one.of[name] == wanted], []
            if not found:
                raise OptionError(f"--{name}", wanted, "no costs are stored for it: run 'outrider costs' for the list")
    console = console_for(json_target)
    if found:
        print_table(console, _list(found))
        console.print("±: interquartile range over median; load: load average of the system.", style="dim")
    count = f"{len(found)} {'file' if len(found) == 1 else 'files'} in {cache_folder('costs')}"
    if unreadable:
        count += f", and {len(unreadable)} unreadable (damaged, or of another version)"
    console.print(count, soft_wrap=not console.is_terminal, markup=False)
    if clear:
        _delete([*(one.path for one in found), *unreadable])
        console.print("Deleted." if found or unreadable else "Nothing to delete.")
    options = {"target": target, "draft": draft, "clear": clear}
    body = {"costs": [_json(one) for one in found], "num_unreadable": len(unreadable)}
    write_json(json_target, "costs", options, body)


def _delete(paths: Sequence[Path]) -> None:
    """Delete files, as many as possible. Raises FileError if some are left."""
    failures = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            failures.append(f"cannot delete {path}: {error.strerror}")
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise FileError(failures[0] + more)


def _list(found: list[KeptCosts]) -> Table:
    from rich.text import Text

    from outrider.bench.tables import new_table

    table = new_table("Milliseconds per round, by K", "pair", "rows", "ms per round", "load")
    table.columns[2].justify = "left"
    for one in found:
        of, measured = one.of, one.measured
        threads = "thread" if of["num_threads"] == 1 else "threads"
        pair = [
            f"{of['target']} with {of['draft']}",
            f"{of['device']}, {of['dtype']}, {of['execution']}, {of['num_threads']} {threads}, {of['acceptance']}",
            f"{one.measured_at:%Y-%m-%d %H:%M}" + ("" if one.is_used else ", no longer used"),
            *([measured.doubt] if measured.doubt else []),
        ]
        by_k = (f"K={k} {1e3 * s:.3g} ±{measured.spread[k]:.0%}" for k, s in measured.seconds.items())
        load = "" if measured.load is None else f"{measured.load:.1f}"
        texts = "\n".join(pair), str(of["num_rows"]), "\n".join(by_k), load
        table.add_row(*map(Text, texts))  # names may contain brackets
        table.add_section()
    return table


def _json(one: KeptCosts) -> dict[str, Any]:
    measured = one.measured
    by_k = [
        {"k": k, "round_ms": 1e3 * seconds, "spread": measured.spread[k], "num_rounds": measured.num_rounds[k]}
        for k, seconds in measured.seconds.items()
    ]
    return {
        **one.of,
        "measured_at": one.measured_at.isoformat(timespec="seconds"),
        "is_used": one.is_used,
        "doubt": measured.doubt,
        "load": measured.load,
        "by_k": by_k,
        "file": str(one.path),
    }
