"""Typer commands whose ``--help`` fits on one screen: common options, with the first sentence of their help, and
examples. ``--help-all`` shows all of it. They accept option names of other programs, or name the option that is meant.

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

from outrider.cli.shared.examples import EXAMPLES
from outrider.cli.shared.options import MACHINE_PANEL, MODELS_PANEL
from outrider.cli.shared.other_names import ALIASES, PROMPT_OPTIONS, check_names, hint_at_threads
from outrider.errors import OptionError, UsageError

if TYPE_CHECKING:
    _Base = TyperCommand
else:
    _Base = object

# ``--help`` shows the options without a panel, which are the command's own, and these of the panels.
_COMMON = frozenset(
    {
        *("target", "draft", "num_draft_tokens", "acceptance"),
        *("temperature", "top_k", "top_p", "max_new_tokens", "seed"),
        *("device", "dtype", "quantize", "execution", "threads"),
        *("slots", "context", "host", "port", "api_key"),
        *("kind", "layers", "init", "steps", "minutes", "loss"),
        *("budget", "detect_tv"),
    }
)
_GONE = {  # commands of earlier versions
    "analyze": "run outrider replay FILE --per-prompt",
    "compile": "nothing is compiled any more, and models start at once",
    "costs": "no costs are stored any more, and ~/.cache/outrider/costs is of no use",
    "divergence": "run outrider certify -t 0, which tells rounding from a bug",
    "eval harness": "run python -m outrider.evals.harness --model outrider --tasks TASKS",
    "eval perplexity": "run python -m outrider.evals.harness --model outrider --tasks wikitext",
    "shapes": "run python benchmarks/shapes.py in a clone of Outrider",
}
_PLACES = {MODELS_PANEL: 0, MACHINE_PANEL: 2}  # of the panels; others in between
_FIRST_SENTENCE = re.compile(r".*?[.?](?= |$)", re.DOTALL)
_BLANK_LINES = re.compile(r"\A(?:(?: |\x1b\[[\d;]*m)*\r?\n)+")


class _Help(_Base):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.short_help = _first_sentence(self.help or "")  # in the list of commands

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
            super(_Help, self._shown(ctx)).format_help(ctx, formatter)
        print(_BLANK_LINES.sub("", written.getvalue()), end="")
        if examples := EXAMPLES.get(ctx.command_path.partition(" ")[2]):
            print("\n".join((" Examples:", *(f"   outrider {words}" for words in examples))))

    def _shown(self, ctx: Any) -> Any:
        """The command with the parameters that its help shows."""
        return self


class Command(_Help, TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for param in params:
            if param.name == "help":
                everything = copy(param)
                everything.name, everything.opts = "help_all", ["--help-all"]
                everything.help, everything.callback = "Show all options and exit.", _show_all
                return [*params, everything]
        return params

    def _shown(self, ctx: Any) -> Any:
        shown = copy(self)
        shown.params = sorted(self.params, key=_place)
        if not ctx.meta.get(_ALL):
            shown.params = [_shortened(param) for param in shown.params if _is_common(param)]
            shown.help = (self.help or "").partition("\n\n")[0]
        return shown


class Group(_Help, TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = f"{ctx.command_path.partition(' ')[2]} {args[0]}".strip()
        if words in _GONE:
            raise UsageError(f"outrider {words} is gone: {_GONE[words]}")
        return super().resolve_command(ctx, args)


_ALL = "outrider.help_all"


def _show_all(ctx: Any, param: Any, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        print(ctx.get_help(), end="")
        ctx.exit()


def _place(param: Any) -> int:
    return _PLACES.get(str(getattr(param, "rich_help_panel", None)), 1)


def _is_common(param: Any) -> bool:
    return getattr(param, "rich_help_panel", None) is None or param.required or param.name in _COMMON


def _shortened(param: Any) -> Any:
    """An option with the first sentence of its help and its default, without the spelling that negates it."""
    short = copy(param)
    default = "" if not param.show_default or param.default in (None, False) else f" ({param.default})"
    short.help, short.secondary_opts = _first_sentence(param.help or "") + default, []
    short.show_default = False
    return short


def _first_sentence(text: str) -> str:
    found = _FIRST_SENTENCE.match(text)
    return found[0] if found else text


class _Copy(io.StringIO):
    """Captures output; claims to be a terminal if the real stream is one, for colours."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal
