#!/usr/bin/env python3
"""Make the pages that only the site has: commands from their help, JSON documents from examples, names from docstrings.

Usage: python .ci/reference.py FOLDER, a copy of docs/, as .ci/site.py makes it.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import json_page
import typer
from api_page import api

from outrider.cli.app import EXAMPLES, app, command_of

FEW = 3  # commands with the same row of options: it is written once
HEAD = """# Commands

Made from the commands' own help, which `outrider COMMAND --help` shows. `--json FILE` writes a [document](json.md).
[Exit codes](../guides/troubleshooting.md#errors). "Shared" options are explained [at the end](#shared-options).

"""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _name(param: Any) -> str:
    return (param.metavar or param.name.upper()) if param.param_type_name == "argument" else max(param.opts, key=len)


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return _name(param)
    names = ", ".join(sorted(param.opts, key=len)) + "".join(f" / {name}" for name in param.secondary_opts)
    return names if param.is_flag else f"{names} {param.metavar or param.name.rsplit('_')[-1].upper()}"


def _row(param: Any) -> str:
    """A line of a table: names, help, default (if the help does not name it)."""
    default, about = param.default, param.help or ""
    if getattr(param, "is_flag", False):
        default = param.opts[0] if default and param.secondary_opts else None
    is_shown = default is not None and default != "" and not callable(default) and "Default" not in about
    return f"| `{_cell(_names(param))}` | {_cell(about)} | {f'`{_cell(str(default))}`' if is_shown else ''} |\n"


def _leaves(commands: dict[str, Any], above: str = "") -> dict[str, Any]:
    """All commands, those of a group after it, by their whole names."""
    found = {}
    for name, command in commands.items():
        found[above + name] = command
        found |= _leaves(getattr(command, "commands", {}), f"{above}{name} ")
    return found


def _rows(command: Any) -> list[tuple[str, str, str]]:
    """Panel, first name and row of each option."""
    params = command.params if not hasattr(command, "commands") else []
    made = []
    for param in params:
        if param.name != "help":
            panel = getattr(param, "rich_help_panel", None) or "Options"
            made.append((panel, _name(param), _row(param)))
    return made


def _tables(rows: list[tuple[str, str, str]]) -> str:
    panels: dict[str, list[str]] = {}
    for panel, _, row in rows:
        panels.setdefault(panel, []).append(row)
    heads = {panel: f"**{panel}**\n\n" if len(panels) > 1 else "" for panel in panels}
    return "".join(
        f"{heads[panel]}| | | default |\n|---|---|---|\n{''.join(below)}\n" for panel, below in panels.items()
    )


def _paragraphs(text: str) -> str:
    """The help, a line for each paragraph."""
    found = [" ".join(paragraph.replace("\b", "").split()) for paragraph in re.split(r"\n\s*\n", text)]
    return "".join(f"{paragraph}\n\n" for paragraph in found if paragraph)


def _examples(name: str) -> str:
    lines = "".join(f"outrider {words}\n" for words in EXAMPLES.get(name, ()))
    return f"<!-- not run: names of the reader -->\n```bash\n{lines}```\n\n" if lines else ""


def commands() -> str:
    """The page of all commands, in the order of ``outrider --help``. Rows of several commands are written once."""
    found = _leaves({name: command_of(name) for name in typer.main.get_command(app).commands})
    rows = {name: _rows(command) for name, command in found.items()}
    counts = Counter(row for below in rows.values() for row in below)
    shared = [row for row in counts if counts[row] >= FEW]
    text = HEAD
    for name, command in found.items():
        own = [row for row in rows[name] if row not in shared]
        others = ", ".join(f"`{row[1]}`" for row in rows[name] if row in shared)
        text += f"## {name}\n\n{_paragraphs(command.help or '')}{_examples(name)}{_tables(own)}"
        text += f"Shared: {others}.\n\n" if others else ""
    return text + f"## Shared options\n\n{_tables(shared)}".rstrip() + "\n"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in {"commands": commands, "json": json_page.page, "api": api}.items():
        (folder / f"{name}.md").write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "reference")
