"""Output of commands: messages, consoles, JSON documents, files."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import FileError, OptionError
from outrider.system.files import check_writable, short_name, write_text

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console

    from outrider.decoder import Decoder
    from outrider.pages.reports import Table
    from outrider.runtime.lm import LM


CLEAR_LINE = "\r\x1b[K"
_Json = dict[str, Any]
FILE_WIDTH = 120  # of tables in files and pipes, unless COLUMNS tells another
_OUTPUTS = {"output": "--output", "html": "--html", "json_target": "--json"}  # parameters that name files to write


def say(message: str) -> None:
    """Print a message on standard error; on a terminal in place of the line of progress, if there is one, and in lines
    that end between words."""
    if sys.stderr.isatty():
        how: dict[str, Any] = {"replace_whitespace": False, "break_long_words": False, "break_on_hyphens": False}
        message = CLEAR_LINE + "\n".join(textwrap.fill(line, stderr_width(), **how) for line in message.splitlines())
    print(message, file=sys.stderr)


def stderr_width() -> int:
    """Columns of standard error: ``COLUMNS``, or those of its own terminal. (``shutil`` reads standard output's.)"""
    with suppress(KeyError, ValueError):
        if (columns := int(os.environ["COLUMNS"])) > 0:
            return columns
    with suppress(OSError, ValueError):  # no terminal
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


def clear_line() -> None:
    """Remove the line of progress from a terminal, to print in its place."""
    if sys.stderr.isatty():
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


class OnStderr(logging.Handler):
    """Logs to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record))
        except Exception:  # as the handlers of the standard library: a log stops nothing
            self.handleError(record)


def log_to_stderr(name: str = "outrider") -> None:
    logger = logging.getLogger(name)
    if not (logger.handlers or logging.getLogger("outrider").handlers):
        logger.addHandler(OnStderr())
    logger.setLevel(logging.INFO)


def console_for(json_target: str | None, *, has_colours: bool | None = None) -> Console:
    """Console for human-readable output: standard error with ``--json -``, so that standard output holds only the
    document. ``has_colours``: True for files and pipes too (``less -R``); None only for terminals."""
    from rich.console import Console

    console = Console(stderr=json_target == "-", highlight=False, emoji=False, force_terminal=has_colours)
    if not (console.file.isatty() or os.environ.get("COLUMNS", "").isdigit()):
        console.width = FILE_WIDTH
    return console


def print_table(console: Console, table: rich.table.Table) -> None:
    """Print a table. A terminal of less than 80 columns wraps lines instead of cutting numbers off."""
    from rich.measure import Measurement

    if console.width < 80:
        table.width = Measurement.get(console, console.options.update(max_width=80), table).maximum
    console.print(table, crop=False)


def report_context_limit(model: str, context_len: int, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Warn on standard error if the target's context ends outputs before ``-n``. ``prompts``: token ids of each."""
    longest = max(map(len, prompts))
    if longest + max_new_tokens > context_len:
        prompt = "prompt" if len(prompts) == 1 else "longest prompt"
        limit = f"with {longest} in the {prompt}, at most {context_len - longest} are generated"
        say(f"-n {max_new_tokens} exceeds the context of {short_name(model)}, {context_len} tokens: {limit}")


def check_files(values: Mapping[str, Any]) -> None:
    """Check before the work that outputs can be written, and that none overwrites an input or another output. Raises
    OptionError, FileError. ``values``: the command's parameters. Paths that are no outputs are inputs."""
    taken: set[Path] = set()
    for name, value in values.items():
        for one in () if name in _OUTPUTS else value if isinstance(value, list) else [value]:
            with suppress(OSError):  # a prompt, too long for a name
                if isinstance(one, Path) or (isinstance(one, str) and one and Path(one).exists()):
                    taken.add(Path(one).resolve())
    for name, option in _OUTPUTS.items():
        value = values.get(name)
        if value in (None, "-"):
            continue
        path = Path(value)
        whole = path.resolve()
        is_taken = whole in taken or any(one.is_dir() for one in taken.intersection(whole.parents))
        if is_taken and (path.is_file() or not path.exists()):  # nothing overwrites a device or a pipe
            raise OptionError(option, str(value), "another option reads or writes this file: choose another file")
        taken.add(whole)
        if option == "--html" and path.suffix != ".html":
            raise FileError(f"cannot write a page to {path}: the name must end in .html")
        if name != "output":  # opened by the command itself, or a folder
            check_writable(path)


def title_of(name: str) -> str:
    """Title of a document, like outrider/compare/1. From version 1.0 on, the number changes when a key is removed, or
    changes its type or meaning; until then the changelog tells."""
    return f"outrider/{name}/1"


def print_report(console: Console, document: Mapping[str, Any]) -> None:
    from outrider.pages.reports import report_of

    tables, lines = report_of(document)
    for table in tables:
        show_table(console, table)
    for line in lines:
        console.print(line, markup=False)


def show_table(console: Console, table: Table) -> None:
    from rich.markup import escape

    from outrider.measure.tables import new_table

    shown = new_table(table.title, *table.columns, num_texts=table.num_texts)
    for row in table.rows[: table.most_rows]:
        shown.add_row(*map(escape, row))
    print_table(console, shown)
    if table.most_rows is not None and len(table.rows) > table.most_rows:
        console.print(f"The first {table.most_rows} of {len(table.rows)}; --json has all.", style="dim")
    if table.note:
        console.print(table.note, style="dim", markup=False)


def make_document(
    command: str, options: _Json, body: _Json, ran: Decoder | LM | None = None, *, origin: _Json | None = None
) -> _Json:
    """Document of a command, as it reads back from JSON. ``ran``: the decoder or model that ran, if any; device, dtype
    and end tokens go into the provenance. ``origin``: the provenance, if the model ran in another process."""
    origin = origin_of(ran) if origin is None else origin
    return as_read({"schema": title_of(command), "options": options, **body, "provenance": origin})


def write_json(json_target: str | None, *document: Any) -> None:
    """Write a command's document, if requested. ``document``: see ``make_document``."""
    if json_target is not None:
        write_document(json_target, make_document(*document))


def origin_of(ran: Decoder | LM | None) -> dict[str, Any]:
    """Provenance of a document. ``ran``: see ``make_document``."""
    from outrider.decoder import Decoder
    from outrider.system.provenance import provenance

    lm = ran.target if isinstance(ran, Decoder) else ran
    origin = provenance("cpu" if lm is None else str(lm.device))
    if lm is not None:
        origin["dtype"] = str(lm.dtype).removeprefix("torch.")
        origin |= {"execution": lm.execution.name, "same_bytes": lm.same_bytes}
    if isinstance(ran, Decoder):
        origin["end_ids"] = {"texts": sorted(ran.eos_ids), "chats": sorted(ran.eos_ids | ran.turn_ids)}
    return origin


def write_document(json_target: str | None, document: dict[str, Any]) -> None:
    """Write a document to a file, or to standard output ("-"); None: nowhere."""
    if json_target == "-":
        sys.stdout.write(json_text(document, indent=2))
        sys.stdout.flush()  # a full disk fails here, not at exit
    elif json_target is not None:
        write_text(Path(json_target), json_text(document, indent=2))


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON with a newline; NaN and infinities become null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {str(key): plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def as_read(value: dict[str, Any]) -> dict[str, Any]:
    """Value as it reads back from JSON."""
    back: dict[str, Any] = json.loads(json_text(value))
    return back
