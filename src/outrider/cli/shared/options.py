"""Options shared by several commands, each defined once, in groups (flat.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.output import console_for, make_document, print_report, say, write_document
from outrider.cli.shared.progress import progress
from outrider.errors import FileError, OptionError
from outrider.options import MAX_NUM_DRAFT_TOKENS, NumDraftTokens, Sampling
from outrider.system.files import read_text, short_name
from outrider.system.resources import gc_paused

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.decoder import Decoder
    from outrider.runtime.lm import LM

MODELS_PANEL, SAMPLING_PANEL, MACHINE_PANEL = "Models", "Sampling", "Machine"
DEFAULT_MAX_NEW_TOKENS = 128

_K_NAMES = "-k", "--num-draft-tokens"
OPTION = "option"  # metadata of a field: how Typer reads it from the command line (flat.py)


def option_of(panel: str | None, help: str, *names: str, **more: Any) -> Any:
    """An option of the command line. ``panel``: of the help. ``more``: see ``typer.Option``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def field_of(panel: str | None, default: Any, help: str, *names: str, **more: Any) -> Any:
    """Field of an option group; see ``option_of``."""
    return field(default=default, metadata={OPTION: option_of(panel, help, *names, **more)})


_sampling = partial(field_of, SAMPLING_PANEL)

JsonOption = Annotated[
    str | None, option_of(None, "Write a JSON document. '-' is standard output.", "--json", metavar="FILE")
]


@dataclass(frozen=True)
class ReportOptions:
    """The document of a command, which its report on the terminal shows."""

    json_target: JsonOption = None

    def console(self) -> Console:
        return console_for(self.json_target)

    def finish(
        self, command: str, options: dict[str, Any], body: dict[str, Any], ran: Decoder | LM | None = None
    ) -> dict[str, Any]:
        """Print the report of a document, and write the document, if requested. See ``make_document``."""
        document = make_document(command, options, body, ran, origin=None if self.json_target or ran else {})
        print_report(self.console(), document)
        write_document(self.json_target, document)
        return document


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options; names and meanings as in ``outrider.Sampling``."""

    temperature: float = _sampling(1.0, "Sampling temperature; 0 is greedy.", "-t", "--temperature")
    top_k: int = _sampling(0, "0 keeps all tokens.")
    top_p: float = _sampling(1.0, "1.0 keeps all tokens.")
    min_p: float = _sampling(0.0, "0.0 keeps all tokens.")
    repetition_penalty: float = _sampling(1.0, "1.0 is off.")
    presence_penalty: float = _sampling(0.0, "Subtracted from the logits of tokens generated so far; -2 to 2.")
    frequency_penalty: float = _sampling(0.0, "Subtracted once per occurrence of the token; -2 to 2.")
    logit_bias: list[str] | None = _sampling(None, "Bias added to a token's logit. Repeatable.", metavar="ID=BIAS")
    min_tokens: int = _sampling(0, "Minimum tokens; stop strings are ignored until then.")

    def to_options(self, *, seed: int | None, num_seeds: int, **more: Any) -> dict[str, Any]:
        """Keyword arguments for a decoder, including ``more``, checked before anything is loaded. Raises OptionError.
        ``num_seeds``: number of consecutive seeds to be used."""
        options = {one.name: getattr(self, one.name) for one in fields(self)} | more
        options["logit_bias"] = _parse_biases(self.logit_bias)
        Sampling(**options, seed=seed)
        if seed is not None:
            Sampling(seed=seed + num_seeds - 1)
        return options | {"seed": seed}


@dataclass(frozen=True)
class EndOptions:
    """Options that end the output."""

    max_new_tokens: int | None = _sampling(
        None,
        "Maximum tokens to generate. Default: 128, or 1024 of a chat's answer.",
        *("-n", "--max-new-tokens"),
        min=1,
        metavar="N",
    )
    stop: list[str] | None = _sampling(None, "Stop string. Repeatable.", metavar="TEXT")
    stop_token_ids: list[int] | None = _sampling(None, "Stop token. Repeatable.", "--stop-token-id", metavar="ID")
    ignore_eos: bool = _sampling(False, "Continue after an end-of-sequence token.", "--ignore-eos")

    def to_options(self, default: int = DEFAULT_MAX_NEW_TOKENS) -> dict[str, Any]:
        """Keyword arguments for a decoder. ``default``: tokens, unless the command line says how many."""
        lists = {"stop": tuple(self.stop or ()), "stop_token_ids": tuple(self.stop_token_ids or ())}
        return {"max_new_tokens": self.max_new_tokens or default, **lists, "ignore_eos": self.ignore_eos}


@dataclass(frozen=True)
class StructureOptions:
    """Constraints on the output (schemas, expressions and grammars: extra ``structured``)."""

    json_schema: Path | None = _sampling(None, "Constrain the output to a JSON schema.", metavar="FILE")
    regex: str | None = _sampling(None, "Constrain the output to a regular expression.")
    grammar: Path | None = _sampling(None, "Constrain the output to a Lark or GBNF grammar.", metavar="FILE")
    thinking_budget: int | None = _sampling(
        None, "Maximum tokens of thoughts; then their end marker is forced.", min=0, metavar="N"
    )
    bad_words: list[str] | None = _sampling(None, "Text not to generate. Repeatable.", "--bad-word", metavar="TEXT")

    def to_options(self) -> dict[str, Any]:
        """Keyword arguments for a decoder. Raises FileError."""
        schema = None
        if self.json_schema is not None:
            try:
                schema = json.loads(read_text(self.json_schema))
            except json.JSONDecodeError as error:
                raise FileError(f"{self.json_schema} is not JSON ({error.msg} in line {error.lineno})") from None
        grammar = None if self.grammar is None else read_text(self.grammar)
        words = {"bad_words": self.bad_words} if self.bad_words else {}
        budget = {"thinking_budget": self.thinking_budget}
        return {"json_schema": schema, "regex": self.regex, "grammar": grammar, **budget, **words}


def check_constraint(sampling: Sampling) -> None:
    """Detect an invalid constraint before the work. Raises OptionError, MissingExtra."""
    if sampling.is_constrained:
        from outrider.text.structure import check_structure

        check_structure(sampling)


_K_HELP = "Tokens drafted per round, or auto. auto adapts K. Default: auto; 4 with a seed, for reproducible output."
NumDraftTokensOption = Annotated[str | None, option_of(MODELS_PANEL, _K_HELP, *_K_NAMES)]
_KS_HELP = "One or several K: 4, 1-8, 1,2,4, auto."
NumDraftTokensListOption = Annotated[str, option_of(MODELS_PANEL, _KS_HELP, *_K_NAMES)]
_FILE_HELP = "File of prompts. JSON lines with a 'prompt' or 'messages', or plain lines. Default: 15 built-in prompts."
PromptsOption = Annotated[Path | None, option_of(None, _FILE_HELP)]
NumTokensOption = Annotated[int, option_of(None, "Tokens to generate per prompt.", "-n", "--max-new-tokens")]
BatchSizeOption = Annotated[int, option_of(MACHINE_PANEL, "Prompts generated concurrently.", min=1, metavar="N")]
SeedOption = Annotated[int, option_of(SAMPLING_PANEL, "Prompt or run i gets this seed + i.", min=0, metavar="N")]
ModelsOption = Annotated[Path | None, option_of(None, "TOML file with more model names.", "--models")]
_CONFIG_HELP = (
    "auto takes sampling options that are not given from the target's checkpoint, if it states any; none does not."
)
GenerationConfigOption = Annotated[str, option_of(SAMPLING_PANEL, _CONFIG_HELP, metavar="auto|none")]


def over_checkpoint(
    sampling: SamplingOptions, context: typer.Context, choice: str, target: str, models: Path | None
) -> SamplingOptions:
    """The options of a command line, over those that the target's checkpoint states. Says which it takes. Raises
    OptionError, ModelNotFound, FileError. ``context``: knows which options were given."""
    from outrider.models.registry import resolve
    from outrider.models.sampling_defaults import stated_sampling

    spec = resolve(target, models)
    with progress(f"reading {short_name(target)}"), gc_paused():  # of a GGUF file: imports PyTorch
        stated = stated_sampling(spec, choice)
    taken = not_given(context, stated.defaults)
    if line := stated.text(short_name(spec.name), taken):
        say(line)
    return replace(sampling, **taken)


def not_given(context: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    sources = {name: getattr(context.get_parameter_source(name), "name", "DEFAULT") for name in values}
    return {name: value for name, value in values.items() if sources[name] == "DEFAULT"}


def is_given(context: typer.Context, name: str) -> bool:
    return not not_given(context, {name: None})


def check_alone(context: typer.Context, kept: Collection[str], remedy: str) -> None:
    """Check that no option was given but those kept. Raises OptionError: another option was given; the message ends
    with the remedy."""
    for param in context.command.params:
        name = param.name or ""
        if name not in kept and is_given(context, name):
            raise OptionError(max(param.opts, key=len), context.params[name], remedy)


def _parse_biases(texts: list[str] | None) -> dict[int, float] | None:
    biases = {}
    for text in texts or ():
        token_id, _, bias = text.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise OptionError("--logit-bias", text, "write TOKEN_ID=BIAS, like 42=-5 or 42=-inf") from None
    return biases or None


def parse_numbers(option: str, text: str, remedy: str, *, most: int | None = None) -> list[int]:
    """Parse "1,4": unique whole numbers from 1 to ``most``. Raises OptionError: with the remedy."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1 or (most is not None and numbers[-1] > most):
        raise OptionError(option, text, remedy)
    return numbers


def parse_k(text: str, remedy: str = "") -> list[NumDraftTokens]:
    """Parse "4", "1-8", "1,2,4" or "1-4,8,auto": each K once, "auto" last. Raises OptionError. ``remedy``: of a command
    that takes one K."""
    ks: set[int] = set()
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        match = re.fullmatch(r"(\d+)\s*(?:-\s*(\d+))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if part != "auto" and not 1 <= low <= high <= MAX_NUM_DRAFT_TOKENS:
            numbers = f"whole numbers from 1 to {MAX_NUM_DRAFT_TOKENS}, like 4, 1-8 or 1,2,4, or auto"
            raise OptionError("-k/--num-draft-tokens", text, f"{numbers} (plain decoding: --draft none)")
        ks |= {*range(low, high + 1)} - {0}
    found: list[NumDraftTokens] = [*sorted(ks)]
    if "auto" in parts:
        found.append("auto")
    if remedy and len(found) > 1:
        raise OptionError("-k/--num-draft-tokens", text, remedy)
    return found


def parse_constant_k(text: str) -> list[int]:
    """Parse as ``parse_k``, without "auto". Raises OptionError."""
    ks = [k for k in parse_k(text) if isinstance(k, int)]
    if "auto" in text:
        raise OptionError("-k/--num-draft-tokens", text, "numbers, like 1-8 or 1,2,4")
    return ks
