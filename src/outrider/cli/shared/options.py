"""Options shared by several commands, each defined once.

A command takes a group as one parameter, ``pair: PairOptions``; ``flat`` expands the groups into the signature that
Typer reads.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from outrider.errors import FileError, OptionError
from outrider.options import (
    MAX_NUM_DRAFT_TOKENS,
    NumDraftTokens,
    Sampling,
)
from outrider.system.files import read_text

MODELS_PANEL, SAMPLING_PANEL, MACHINE_PANEL = "Models", "Sampling", "Machine"
DEFAULT_SIGNIFICANCE = 1e-3

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write a JSON document. '-' is standard output.")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the result as one HTML page with figures."),
]


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options; names and meanings as in ``outrider.Sampling``."""

    temperature: Annotated[
        float,
        typer.Option("-t", "--temperature", help="Sampling temperature; 0 is greedy.", rich_help_panel=SAMPLING_PANEL),
    ] = 1.0
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.", rich_help_panel=SAMPLING_PANEL)] = 0
    top_p: Annotated[float, typer.Option(help="1.0 keeps all tokens.", rich_help_panel=SAMPLING_PANEL)] = 1.0
    min_p: Annotated[float, typer.Option(help="0.0 keeps all tokens.", rich_help_panel=SAMPLING_PANEL)] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="1.0 is off.", rich_help_panel=SAMPLING_PANEL)] = 1.0
    presence_penalty: Annotated[
        float,
        typer.Option(
            help="Subtracted from the logits of tokens generated so far; -2 to 2.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option(help="Subtracted once per occurrence of the token; -2 to 2.", rich_help_panel=SAMPLING_PANEL),
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS", help="Bias added to a token's logit. Repeatable.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = None
    min_tokens: Annotated[
        int,
        typer.Option(help="Minimum tokens; stop strings are ignored until then.", rich_help_panel=SAMPLING_PANEL),
    ] = 0

    def to_options(self, *, seed: int | None, num_seeds: int, **more: Any) -> dict[str, Any]:
        """Keyword arguments for a decoder, including ``more``, checked before anything is loaded.

        Args:
            num_seeds: number of consecutive seeds to be used.

        Raises:
            OptionError
        """
        options = {field.name: getattr(self, field.name) for field in fields(self)} | more
        options["logit_bias"] = _parse_biases(self.logit_bias)
        Sampling(**options, seed=seed)
        if seed is not None:
            Sampling(seed=seed + num_seeds - 1)
        return options | {"seed": seed}


@dataclass(frozen=True)
class EndOptions:
    """Options that end the output."""

    max_new_tokens: Annotated[
        int,
        typer.Option("-n", "--max-new-tokens", help="Maximum tokens to generate.", rich_help_panel=SAMPLING_PANEL),
    ] = 128
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop string. Repeatable.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id",
            metavar="ID",
            help="Stop token. Repeatable.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Continue after an end-of-sequence token.", rich_help_panel=SAMPLING_PANEL),
    ] = False

    def to_options(self) -> dict[str, Any]:
        """Keyword arguments for a decoder."""
        lists = {"stop": tuple(self.stop or ()), "stop_token_ids": tuple(self.stop_token_ids or ())}
        return {"max_new_tokens": self.max_new_tokens, **lists, "ignore_eos": self.ignore_eos}


def _of_end(name: str) -> Any:
    """Declaration of an option of ``EndOptions``."""
    return get_type_hints(EndOptions, include_extras=True)[name].__metadata__[0]


@dataclass(frozen=True)
class AnswerOptions:
    """Options that end an answer of a chat; see ``EndOptions``."""

    max_new_tokens: Annotated[int | None, _of_end("max_new_tokens")] = None
    stop: Annotated[list[str] | None, _of_end("stop")] = None
    stop_token_ids: Annotated[list[int] | None, _of_end("stop_token_ids")] = None

    def to_options(self, default: int) -> dict[str, Any]:
        """Keyword arguments for a decoder.

        Args:
            default: of ``max_new_tokens``.
        """
        most = default if self.max_new_tokens is None else self.max_new_tokens
        return EndOptions(most, self.stop, self.stop_token_ids).to_options()


@dataclass(frozen=True)
class StructureOptions:
    """Constraints on the output (all but ``bad_words``: extra ``structured``)."""

    json_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Constrain the output to a JSON schema.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Constrain the output to a regular expression.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Constrain the output to a Lark or GBNF grammar.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        typer.Option(
            "--bad-word", metavar="TEXT", help="Text not to generate. Repeatable.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = None

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
        return {"json_schema": schema, "regex": self.regex, "grammar": grammar, **words}


def check_constraint(sampling: Sampling) -> None:
    """Detect an invalid constraint before the work. Raises OptionError, MissingExtra."""
    if sampling.is_constrained:
        from outrider.text.structure import check_structure

        check_structure(sampling)


NumDraftTokensOption = Annotated[
    str | None,
    typer.Option(
        "-k",
        "--num-draft-tokens",
        help="Tokens drafted per round, or auto. auto adapts K. Default: auto; 4 with a seed, for reproducible output.",
        rich_help_panel=MODELS_PANEL,
    ),
]
NumDraftTokensListOption = Annotated[
    str,
    typer.Option(
        "-k", "--num-draft-tokens", help="One or several K: 4, 1-8, 1,2,4, auto.", rich_help_panel=MODELS_PANEL
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="File of prompts. JSON lines with a 'prompt' or 'messages', or plain lines. Default: 15 built-in prompts."
    ),
]
BatchSizeOption = Annotated[int, typer.Option(help="Prompts generated concurrently.", rich_help_panel=MACHINE_PANEL)]
SignificanceOption = Annotated[
    float,
    typer.Option(help="Probability that a correct rule fails the statistical tests.", rich_help_panel="Statistics"),
]
SeedOption = Annotated[int, typer.Option(help="Prompt or run i gets this seed + i.", rich_help_panel=SAMPLING_PANEL)]


ProbsOption = Annotated[
    int | None,
    typer.Option(
        help="Keep the probabilities of each token and of the N most probable. Replays of sampled outputs need them."
    ),
]


def check_probs(probs: int | None) -> int | None:
    """Raises OptionError."""
    if probs is not None and probs < 1:
        raise OptionError("--probs", probs, "a whole number >= 1")
    return probs


def check_batch_size(batch_size: int) -> None:
    """Raises OptionError."""
    if batch_size < 1:
        raise OptionError("--batch-size", batch_size, "a whole number >= 1")


def check_alone(context: typer.Context, kept: Collection[str], remedy: str) -> None:
    """Check that no option was given but those kept.

    Raises:
        OptionError: another option was given; the message ends with the remedy.
    """
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if source is not None and source.name == "COMMANDLINE" and param.name not in kept:
            raise OptionError(max(param.opts, key=len), context.params[param.name or ""], remedy)


def check_significance(level: float) -> None:
    """Raises OptionError."""
    if not 0 < level < 1:
        raise OptionError("--significance", level, "a number between 0 and 1, like 1e-3")


def check_detect_tv(distance: float | None) -> None:
    """Raises OptionError."""
    if distance is not None and not 0 < distance < 1:
        raise OptionError("--detect-tv", distance, "a number between 0 and 1, like 0.01")


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise OptionError("--logit-bias", text, "write TOKEN_ID=BIAS, like 42=-5 or 42=-inf") from None


def _parse_biases(texts: list[str] | None) -> dict[int, float] | None:
    return dict(_parse_bias(text) for text in texts) if texts else None


def parse_k(text: str) -> list[NumDraftTokens]:
    """Parse "4", "1-8", "1,2,4" or "1-4,8,auto": each K once, "auto" last.

    Raises:
        OptionError
    """
    ks: list[int] = []
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part == "auto":
            continue
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= MAX_NUM_DRAFT_TOKENS:
            remedy = (
                f"whole numbers from 1 to {MAX_NUM_DRAFT_TOKENS}, like 4, 1-8 or 1,2,4, or auto "
                "(plain decoding: --draft none)"
            )
            raise OptionError("-k/--num-draft-tokens", text, remedy)
        ks += range(low, high + 1)
    autos: list[NumDraftTokens] = ["auto"] if "auto" in parts else []
    return [*sorted(set(ks)), *autos]


def parse_constant_k(text: str) -> list[int]:
    """Parse as ``parse_k``, without "auto". Raises OptionError."""
    given = parse_k(text)
    ks = [k for k in given if isinstance(k, int)]
    if len(ks) < len(given):
        raise OptionError("-k/--num-draft-tokens", text, "numbers, like 1-8 or 1,2,4")
    return ks


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each option group in a command's signature by the group's fields, for Typer."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group = groups[parameter.name]
        field_hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            assert field.default is not MISSING
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=field_hints[field.name],
                )
            )

    @functools.wraps(command)
    def flattened(**values: Any) -> None:
        arguments = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**arguments, **values)

    flattened.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flattened.__annotations__ = {p.name: p.annotation for p in parameters}
    del flattened.__wrapped__  # else inspect finds the command's own signature
    return flattened
