"""Typer commands with a tidier ``--help`` (no "<bool>" beside flags, no blank lines at the top). They accept option
names of other programs, or name the option that is meant.

``Command`` and ``Group`` share their changes in ``_Help``.
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from copy import copy
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from outrider.cli.shared.other_names import ALIASES, PROMPT_OPTIONS, check_names, hint_at_threads
from outrider.errors import OptionError

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

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        params = {param.name or "": param for param in self.get_params(ctx) if isinstance(param, TyperOption)}
        for name, aliases in ALIASES.items():
            if name in params:
                alias = copy(params[name])
                alias.opts, alias.secondary_opts = list(aliases), []
                alias.add_to_parser(parser, ctx)
        if self._takes_prompt:
            self._add_prompt_option(parser)
        return parser

    @property
    def _takes_prompt(self) -> bool:
        return any(isinstance(param, TyperArgument) and param.name == "prompt" for param in self.params)

    def _add_prompt_option(self, parser: Any) -> None:
        """Accept the prompt as an option, too."""
        parser.add_option(self, PROMPT_OPTIONS, "prompt_option")
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            found, *others = parse(args)
            if (prompt := found.pop("prompt_option", None)) is not None:
                if isinstance(found.get("prompt"), str):
                    raise OptionError(PROMPT_OPTIONS[0], prompt, f"there is a prompt already: {found['prompt']!r}")
                found["prompt"] = prompt
            return found, *others

        parser.parse_args = parse_args

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        words = list(args)
        params = [param for param in self.get_params(ctx) if isinstance(param, TyperOption)]
        options: dict[str, tuple[str, ...]] = {
            name: (*reversed(param.opts), *param.secondary_opts, *ALIASES.get(name, ()))
            for param in params
            if (name := param.name)
        }
        if self._takes_prompt:
            options["prompt"] = PROMPT_OPTIONS
        try:
            rest = super().parse_args(ctx, args)
        except Exception:  # Typer's own
            check_names(words, options)
            raise
        if "threads" in options:
            hint_at_threads(words)
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with redirect_stdout(_Copy(sys.stdout.isatty())) as written:
            super().format_help(ctx, formatter)
        print(_BLANK_LINES.sub("", written.getvalue()), end="")


class Command(_Help, TyperCommand):
    pass


class Group(_Help, TyperGroup):
    pass


class _Copy(io.StringIO):
    """Captures output; claims to be a terminal if the real stream is one, for colours."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal
