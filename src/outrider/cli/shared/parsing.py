"""Typer commands that accept option names of other programs, or name the option that is meant.

``Command`` and ``Group`` share their changes in ``_Parsing``.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from outrider.cli.shared.other_names import ALIASES, PROMPT_OPTIONS, check_names, hint_at_threads
from outrider.errors import OptionError, UsageError

if TYPE_CHECKING:
    _Base = TyperCommand
else:
    _Base = object

_GONE = {  # commands of earlier versions
    "analyze": "run outrider replay FILE --per-prompt",
    "compile": "nothing is compiled any more, and models start at once",
    "costs": "no costs are stored any more, and ~/.cache/outrider/costs is of no use",
    "divergence": "run outrider certify -t 0, which tells rounding from a bug",
    "eval harness": "run python -m outrider.evals.harness --model outrider --tasks TASKS",
    "eval perplexity": "run python -m outrider.evals.harness --model outrider --tasks wikitext",
    "schema": "docs/reference/json.md shows an example of each document",
    "shapes": "run python benchmarks/shapes.py in a clone of Outrider",
}


class _Parsing(_Base):
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


class Command(_Parsing, TyperCommand):
    pass


class Group(_Parsing, TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = f"{ctx.command_path.partition(' ')[2]} {args[0]}".strip()
        if words in _GONE:
            raise UsageError(f"outrider {words} is gone: {_GONE[words]}")
        return super().resolve_command(ctx, args)
