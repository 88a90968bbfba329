"""Lines on a terminal break between words, and commands so that they can be copied. Files and pipes get whole lines."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")  # of a shell


def say(message: str) -> None:
    """Print a message on standard error."""
    print(wrap(message, sys.stderr), file=sys.stderr)


def wrap(text: str, stream: TextIO, indent: str = "") -> str:
    """Break the lines of a text for a stream.

    Args:
        indent: before the lines that follow a break.
    """
    if not stream.isatty():
        return text
    return "\n".join(_fill(line, shutil.get_terminal_size().columns, indent) for line in text.split("\n"))


def print_command(console: Console, command: str, style: str = "bold") -> None:
    """Print a command line, indented. On a terminal a long one goes on in further lines, as shells read it."""
    lines = [" "]
    for word in _WORD.findall(command):
        if console.is_terminal and lines[-1].strip() and len(lines[-1]) + len(word) + 3 > console.width:
            lines[-1] += " \\"
            lines.append("     ")
        lines[-1] += f" {word}"
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)


def _fill(line: str, width: int, indent: str) -> str:
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
