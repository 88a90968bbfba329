"""Typer's ``--help``, less a few blemishes: "<bool>" beside flags, as if they took a value, and blank lines at the top.

Its commands and groups are two classes, which have what is changed in common.
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    _Base = TyperCommand
else:
    _Base = object

_BLANK_LINES = re.compile(r"\A(?:(?: |\x1b\[[\d;]*m)*\r?\n)+")


class _Help(_Base):
    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for param in params:
            if isinstance(param, TyperOption) and param.is_flag:
                param.metavar = ""
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with redirect_stdout(_Copy(sys.stdout.isatty())) as copy:
            super().format_help(ctx, formatter)
        print(_BLANK_LINES.sub("", copy.getvalue()), end="")


class Command(_Help, TyperCommand):
    pass


class Group(_Help, TyperGroup):
    pass


class _Copy(io.StringIO):
    """Takes what is written; says that it is a terminal where the real stream is, since colours depend on that."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal
