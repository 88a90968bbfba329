#!/usr/bin/env python3
"""Make pages: docs/reference/commands.md from the commands' help, json.md from examples, api.md from docstrings,
llms.txt from the navigation.

With ``--check`` nothing is written; the exit code is 1 if a file is not current. llms.txt follows https://llmstxt.org.
"""

import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import json_page
import typer
from api_page import api

from outrider.cli.app import EXAMPLES, app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FEW = 3  # commands with the same row of options: it is written once
HEAD = """# Commands

Made from the commands' own help, which `outrider COMMAND --help` shows. Common to all:

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | done, with a finding or rows that failed, where the command says so |
| 2 | [an error](errors.md), in one line on standard error |
| 3 | a certificate is inconclusive |
| 130 | Ctrl-C |

`--json FILE` writes a [document](json.md); `-` is standard output. "Shared" options are explained
[at the end](#shared-options).

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
    found = _leaves(typer.main.get_command(app).commands)
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


def _entries(nav: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(title, path) for entry in nav for title, path in entry.items() if isinstance(path, str)]


def _lines(entries: list[tuple[str, str]]) -> str:
    text = ""
    for title, path in entries:
        page = (DOCS / path).read_text(encoding="utf-8")
        about = next(heading for heading in re.findall(r"^# (.+)$", page, re.MULTILINE))
        text += f"- [{title}]({path})" + (f": {about}\n" if about != title else "\n")
    return text + "\n"


def llms() -> str:
    """The pages by section, for programs that read the documentation."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    text = f"# {project['site_name']}\n\n> {project['site_description']}\n\n"
    text += "## Pages\n\n" + _lines(_entries(project["nav"]))
    for entry in project["nav"]:
        for title, below in entry.items():
            if isinstance(below, list):
                name = "Optional" if title == "Internals" else title
                text += f"## {name}\n\n" + _lines(_entries(below))
    return text.rstrip() + "\n"


def main() -> None:
    stale = []
    made = {
        "reference/commands.md": commands,
        "reference/json.md": json_page.page,
        "reference/api.md": api,
        "llms.txt": llms,  # last: it has the titles of the others
    }
    for name, make in made.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.exit(f"not current: {', '.join(stale)}: run python .ci/reference.py")


if __name__ == "__main__":
    main()
