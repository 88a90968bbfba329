"""Output of commands: consoles, JSON documents, files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.errors import OptionError
from outrider.system.files import check_writable, write_text
from outrider.system.titles import title_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from outrider.bench.run import Measurement
    from outrider.cli.shared.pair_options import PairOptions
    from outrider.decoder import Decoder
    from outrider.runtime.lm import LM


_Item = TypeVar("_Item")
FILE_WIDTH = 120  # of tables in files and pipes, which have no width


def console_for(json_target: str | None, *, has_colours: bool | None = None) -> Console:
    """Console for human-readable output: standard error with ``--json -``, so that standard output holds only the
    document.

    Args:
        has_colours: True for files and pipes too (``less -R``); None only for terminals.
    """
    from rich.console import Console

    console = Console(stderr=json_target == "-", highlight=False, emoji=False, force_terminal=has_colours)
    if not console.file.isatty():
        console.width = FILE_WIDTH
    return console


def print_table(console: Console, table: Table, width: int = 80) -> None:
    """Print a table. A narrower terminal wraps lines instead of cutting numbers off.

    Args:
        width: columns that the table needs.
    """
    from rich.measure import Measurement

    if console.width < width:
        table.width = Measurement.get(console, console.options.update(max_width=width), table).maximum
    console.print(table, crop=False)


@contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Progress bar on standard error, if that is a terminal. Yields a function that takes the number of new steps."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda steps: progress.advance(task, steps)


def count_items(items: Iterable[_Item], advance: Callable[[int], None]) -> Iterator[_Item]:
    """Yield items and advance a progress bar after each."""
    for item in items:
        yield item
        advance(1)


def gather(measurements: Iterator[Measurement], total: int, what: str) -> tuple[list[Measurement], bool]:
    """Collect measurements to the end or Ctrl-C, with a progress bar. Returns them, and whether it was interrupted."""
    done: list[Measurement] = []
    with progress_bar(what, total) as advance:
        try:
            for measurement in measurements:
                done.append(measurement)
                advance(1)
        except KeyboardInterrupt:
            return done, True
    return done, False


def check_json_target(json_target: str | None) -> None:
    """Raises FileError if the document could not be written later."""
    if json_target not in (None, "-"):
        check_writable(Path(str(json_target)))


def check_outputs(outputs: Mapping[str, Path | str | None], inputs: Iterable[Path | None]) -> None:
    """Check before the work that no output overwrites another output or an input.

    Args:
        outputs: by option; None and "-" are ignored.
        inputs: files, and folders whose files must not be overwritten.

    Raises:
        OptionError
    """
    taken = [path.resolve() for path in inputs if path is not None]
    for option, output in outputs.items():
        if output is None or output == "-":
            continue
        path = Path(output).resolve()
        if path.exists() and not path.is_file() and not path.is_dir():
            continue  # a device or a pipe, where nothing is overwritten
        if any(path == other or other in path.parents for other in taken):
            raise OptionError(option, str(output), "another option reads or writes this file: choose another file")
        taken.append(path)


def write_json(
    json_target: str | None,
    command: str,
    options: dict[str, Any],
    body: dict[str, Any],
    ran: Decoder | LM | None = None,
    html: Path | None = None,
) -> None:
    """Write a command's document, if requested. See ``make_document``.

    Args:
        html: file for the document as a page, see outrider.pages.reports.
    """
    if json_target is not None or html is not None:
        from outrider.pages.reports import render_report

        write_outputs(make_document(command, options, body, ran), json_target, html, render_report)


def write_outputs(
    document: dict[str, Any],
    json_target: str | None,
    html: Path | None,
    render: Callable[[Mapping[str, Any]], str],
) -> None:
    """Write a document and its page, if requested."""
    if json_target is not None:
        write_document(json_target, document)
    if html is not None:
        write_text(html, render(document))


def check_figure_files(plot: Path | None, html: Path | None = None) -> None:
    """Check before the measurement that a plot, and a page with figures, can be written.

    Raises:
        FileError, MissingExtra
    """
    from outrider.bench.plots import PLOT_FORMATS, check_plot_file

    for path, formats in ((plot, PLOT_FORMATS), (html, (".html",))):
        if path is not None:
            check_plot_file(path, formats)


def make_document(
    command: str,
    options: dict[str, Any],
    body: dict[str, Any],
    ran: Decoder | LM | None = None,
    *,
    origin: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Document of a command, as it reads back from JSON.

    Args:
        ran: the decoder or model that ran, if any; device, dtype and end tokens go into the provenance.
        origin: the provenance, if the model ran in another process.
    """
    origin = origin_of(ran) if origin is None else origin
    return _as_read({"schema": title_of(command), "options": options, **body, "provenance": origin})


def origin_of(ran: Decoder | LM | None) -> dict[str, Any]:
    """Provenance of a document.

    Args:
        ran: see ``make_document``.
    """
    from outrider.decoder import Decoder
    from outrider.system.provenance import provenance

    lm = ran.target if isinstance(ran, Decoder) else ran
    origin = provenance("cpu" if lm is None else str(lm.device))
    if lm is not None:
        origin["dtype"] = str(lm.dtype).removeprefix("torch.")
    if isinstance(ran, Decoder):
        origin["end_ids"] = {"texts": sorted(ran.eos_ids), "chats": sorted(ran.eos_ids | ran.turn_ids)}
    return origin


def write_document(json_target: str, document: dict[str, Any]) -> None:
    """Write a document to a file, or to standard output ("-")."""
    text = json_text(document, indent=2)
    if json_target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()  # a full disk fails here, not at exit
    else:
        write_text(Path(json_target), text)


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON with a newline; NaN and infinities become null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {str(key): plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def options_json(pair: PairOptions, sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Options of a command, as they read back from its document."""
    options = {**asdict(pair), "draft": pair.draft_names, **sampling, **more}
    for name in ("corpus", "allow_pickle"):  # older files, which a run may continue, do not name them
        if not options[name]:
            del options[name]
    if sampling.get("logit_bias") is not None:
        options["logit_bias"] = [f"{token_id}={float(bias)!r}" for token_id, bias in sampling["logit_bias"].items()]
    return _as_read(options)


def _as_read(value: dict[str, Any]) -> dict[str, Any]:
    """Value as it reads back from JSON."""
    back: dict[str, Any] = json.loads(json_text(value))
    return back
