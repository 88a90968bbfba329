"""Options that several commands share, each defined once.

A command takes a group of them as one parameter, ``pair: PairOptions``; ``flat`` spreads the fields of such groups into
the signature that Typer reads.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outrider.errors import CompileError, OptionError
from outrider.options import (
    DEFAULT_ACCEPTANCE,
    DEFAULT_NUM_DRAFT_TOKENS,
    MAX_NUM_DRAFT_TOKENS,
    NumDraftTokens,
    Sampling,
)

if TYPE_CHECKING:
    from outrider.api import Decoder
    from outrider.drafters.base import Drafter
    from outrider.models.placement import Placement

_MODELS, _SAMPLING, _MACHINE = "Models", "Sampling", "Machine"
DEFAULT_SIGNIFICANCE = 1e-3
_LONG_WORK = 50_000  # tokens; compiling saves a few milliseconds on each, and costs minutes

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write one JSON document; '-' is standard output.")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write it as a page to read: one HTML file with figures."),
]


def set_threads(threads: int | None) -> None:
    """CPU threads; None leaves torch's own choice.

    Raises:
        OptionError
    """
    if threads is not None:
        if threads < 1:
            raise OptionError("--threads", threads, "a whole number >= 1")
        import torch

        torch.set_num_threads(threads)


@dataclass(frozen=True)
class PairOptions:
    """Target, drafts and machine."""

    target: Annotated[str, typer.Option(help="Known name, folder or hub id.", rich_help_panel=_MODELS)] = "fable"
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Known name, folder, hub id, 'ngram' or 'none'; NAME:greedy drafts the likeliest tokens. Repeat it to "
            "compare several. "
            "Default: fable-draft for fable, else ngram.",
            rich_help_panel=_MODELS,
        ),
    ] = None
    acceptance: Annotated[
        str, typer.Option(help="Acceptance rule: block, rejection or gumbel.", rich_help_panel=_MODELS)
    ] = DEFAULT_ACCEPTANCE
    models: Annotated[Path | None, typer.Option(help="TOML file with more model names.", rich_help_panel=_MODELS)] = (
        None
    )
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.", rich_help_panel=_MACHINE)] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, float64, float32, bfloat16, float16. auto is float32 on the CPU, else the checkpoint's own.",
            rich_help_panel=_MACHINE,
        ),
    ] = "auto"
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Weights of the target in fewer bits: int8, int4, fp8 (torchao), 8bit, nf4 (bitsandbytes), none. The "
            "same as a name that ends in :int8.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Spread the target's layers over devices: auto, balanced, none, or a JSON file from modules to "
            "devices.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="The most that its device map may put on each device: 0=20GiB,1=20GiB,cpu=60GiB.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    draft_device: Annotated[
        str | None, typer.Option(help="The draft's device. Default: the target's.", rich_help_panel=_MACHINE)
    ] = None
    draft_dtype: Annotated[
        str | None, typer.Option(help="The draft's type. Default: the target's.", rich_help_panel=_MACHINE)
    ] = None
    draft_quantize: Annotated[
        str | None, typer.Option(help="The same as --quantize, for the draft.", rich_help_panel=_MACHINE)
    ] = None
    draft_device_map: Annotated[
        str | None, typer.Option(help="The same as --device-map, for the draft.", rich_help_panel=_MACHINE)
    ] = None
    draft_max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="The same as --max-memory, for the draft.", rich_help_panel=_MACHINE),
    ] = None
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: torch's own choice.", rich_help_panel=_MACHINE)
    ] = None
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the models: minutes the first time, seconds later. On a CUDA device: capture "
            "them as graphs. Default: for long work on the CPU.",
            rich_help_panel=_MACHINE,
        ),
    ] = None

    @property
    def draft_names(self) -> list[str]:
        return list(dict.fromkeys(self.draft or ["fable-draft" if self.target == "fable" else "ngram"]))

    @property
    def single_draft(self) -> str:
        """For commands that use one.

        Raises:
            OptionError: several were given.
        """
        if len(self.draft_names) > 1:
            raise OptionError("--draft", ", ".join(self.draft_names), "this command takes one draft")
        return self.draft_names[0]

    @property
    def compared_draft(self) -> str:
        """The same for commands that hold it against plain decoding.

        Raises:
            OptionError: several were given, or none.
        """
        if self.single_draft == "none":
            raise OptionError("--draft", "none", "there would be nothing to compare: choose a model or ngram")
        return self.single_draft

    def load(self, num_tokens: int = 0) -> Decoder:
        """The target, without a draft.

        Args:
            num_tokens: about how many are to be generated, by which it is decided whether compiling pays.
        """
        from outrider.api import load

        set_threads(self.threads)
        decoder = load(
            self.target,
            **asdict(self.placement),
            acceptance=self.acceptance,
            models_file=self.models,
        )
        target = decoder.target
        is_long = num_tokens >= _LONG_WORK and target.device.type == "cpu" and target.num_shares == 1
        if not (is_long if self.compile is None else self.compile):
            return decoder
        # Compiling is silent for half a minute at a time; say what is going on.
        logger = logging.getLogger("outrider.runtime.compiled")
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
        compiled = decoder.compiled()
        if self.compile is None:
            try:
                compiled.generate([[0]], max_new_tokens=1)
            except CompileError as error:  # nobody asked for it, so go on without
                logger.warning("%s", error)
                return decoder
        return compiled

    @property
    def placement(self) -> Placement:
        """The target's."""
        from outrider.models.placement import Placement

        return Placement(self.device, self.dtype, self.quantize, self.device_map, self.max_memory)

    @property
    def draft_placement(self) -> Placement:
        """The drafts'."""
        from outrider.models.placement import Placement

        return Placement(
            device=self.draft_device or self.device,
            dtype=self.draft_dtype or self.dtype,
            quantization=self.draft_quantize,
            device_map=self.draft_device_map,
            max_memory=self.draft_max_memory,
        )

    def load_draft(self, decoder: Decoder, name: str) -> Drafter:
        """A draft for the target, compiled if that is."""
        from outrider.api import load_drafter
        from outrider.runtime.lm import LM

        drafter = load_drafter(decoder, name, placement=self.draft_placement, models_file=self.models)
        return drafter.with_models(LM.compiled) if decoder.target.execution.is_prepared else drafter


def _of_pair(name: str) -> Any:
    """The declaration of an option of ``PairOptions``, for groups that have some of them."""
    return get_type_hints(PairOptions, include_extras=True)[name].__metadata__[0]


@dataclass(frozen=True)
class MachineOptions:
    """Where a target runs, for commands that take no draft; what the options mean is said in ``PairOptions``."""

    models: Annotated[Path | None, _of_pair("models")] = None
    device: Annotated[str, _of_pair("device")] = "auto"
    dtype: Annotated[str, _of_pair("dtype")] = "auto"
    quantize: Annotated[str | None, _of_pair("quantize")] = None
    device_map: Annotated[str | None, _of_pair("device_map")] = None
    max_memory: Annotated[str | None, _of_pair("max_memory")] = None
    threads: Annotated[int | None, _of_pair("threads")] = None
    compile: Annotated[bool | None, _of_pair("compile")] = None

    def load(self, target: str, num_tokens: int = 0) -> Decoder:
        """See ``PairOptions.load``."""
        return PairOptions(target=target, **asdict(self)).load(num_tokens)


@dataclass(frozen=True)
class DraftOptions:
    """Drafts without their target, and machine; what the options mean is said in ``PairOptions``."""

    draft: Annotated[list[str] | None, _of_pair("draft")] = None
    acceptance: Annotated[str, _of_pair("acceptance")] = DEFAULT_ACCEPTANCE
    models: Annotated[Path | None, _of_pair("models")] = None
    device: Annotated[str, _of_pair("device")] = "auto"
    dtype: Annotated[str, _of_pair("dtype")] = "auto"
    threads: Annotated[int | None, _of_pair("threads")] = None

    def names(self, target: str) -> list[str]:
        """Of the drafts, each once."""
        return PairOptions(target=target, draft=self.draft).draft_names


@dataclass(frozen=True)
class SamplingOptions:
    """How the text is sampled; the names and meanings of ``outrider.Sampling``."""

    temperature: Annotated[
        float, typer.Option("-t", "--temperature", help="0 is greedy.", rich_help_panel=_SAMPLING)
    ] = 1.0
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.", rich_help_panel=_SAMPLING)] = 0
    top_p: Annotated[float, typer.Option(help="1.0 keeps all tokens.", rich_help_panel=_SAMPLING)] = 1.0
    min_p: Annotated[float, typer.Option(help="0.0 keeps all tokens.", rich_help_panel=_SAMPLING)] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="1.0 is none.", rich_help_panel=_SAMPLING)] = 1.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(help="TOKEN_ID=BIAS, added to the logit. Repeatable.", rich_help_panel=_SAMPLING),
    ] = None

    def to_options(self, *, seed: int | None, num_seeds: int, **more: Any) -> dict[str, Any]:
        """Keyword arguments for a decoder, with ``more`` of them, checked before anything is loaded.

        Args:
            num_seeds: seed, seed + 1, ... so many of them will be used.

        Raises:
            OptionError
        """
        options = {field.name: getattr(self, field.name) for field in fields(self)} | more
        options["logit_bias"] = _parse_biases(self.logit_bias)
        Sampling(**options, seed=seed)
        if seed is not None:
            Sampling(seed=seed + num_seeds - 1)
        return options | {"seed": seed}


def _of_sampling(name: str) -> Any:
    """The declaration of an option of ``SamplingOptions``."""
    return get_type_hints(SamplingOptions, include_extras=True)[name].__metadata__[0]


@dataclass(frozen=True)
class TaskSamplingOptions:
    """Sampling where a task has its own: what is given takes the place of what the task says."""

    temperature: Annotated[float | None, _of_sampling("temperature")] = None
    top_k: Annotated[int | None, _of_sampling("top_k")] = None
    top_p: Annotated[float | None, _of_sampling("top_p")] = None
    min_p: Annotated[float | None, _of_sampling("min_p")] = None
    repetition_penalty: Annotated[float | None, _of_sampling("repetition_penalty")] = None
    logit_bias: Annotated[list[str] | None, _of_sampling("logit_bias")] = None

    def to_options(self, **more: Any) -> dict[str, Any]:
        """The fields of ``outrider.Sampling`` that were given, with those of ``more`` that are not None, checked.

        Raises:
            OptionError
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)} | more
        given["logit_bias"] = _parse_biases(self.logit_bias)
        options = {name: value for name, value in given.items() if value is not None}
        Sampling(**options)
        return options


@dataclass(frozen=True)
class EndOptions:
    """What ends a text."""

    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", help="Most tokens to generate.", rich_help_panel=_SAMPLING)
    ] = 128
    stop: Annotated[
        list[str] | None, typer.Option(help="String that ends the text. Repeatable.", rich_help_panel=_SAMPLING)
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end token.", rich_help_panel=_SAMPLING)
    ] = False

    def to_options(self) -> dict[str, Any]:
        """Keyword arguments for a decoder."""
        return {"max_new_tokens": self.max_new_tokens, "stop": tuple(self.stop or ()), "ignore_eos": self.ignore_eos}


TargetOption = Annotated[str, _of_pair("target")]
NumDraftTokensOption = Annotated[
    str | None,
    typer.Option(
        "-k",
        "--num-draft-tokens",
        help="K, tokens drafted per round; auto chooses it as it goes. Default: auto, but 4 where a seed is to give "
        "the same text again.",
        rich_help_panel=_MODELS,
    ),
]
NumDraftTokensListOption = Annotated[
    str,
    typer.Option("-k", "--num-draft-tokens", help="One or several K: 4, 1-8, 1,2,4, auto.", rich_help_panel=_MODELS),
]
PromptsOption = Annotated[
    Path | None, typer.Option(help="File of prompts: JSON lines with a 'prompt', or plain lines. Default: 15.")
]
BatchSizeOption = Annotated[int, typer.Option(help="Prompts at once.", rich_help_panel=_MACHINE)]
SignificanceOption = Annotated[
    float,
    typer.Option(help="Probability that a right rule fails the statistical tests.", rich_help_panel="Statistics"),
]
SeedOption = Annotated[int, typer.Option(help="Prompt or run i uses seed + i.", rich_help_panel=_SAMPLING)]


def check_batch_size(batch_size: int) -> None:
    """Raises OptionError."""
    if batch_size < 1:
        raise OptionError("--batch-size", batch_size, "a whole number >= 1")


def check_significance(level: float) -> None:
    """Raises OptionError."""
    if not 0 < level < 1:
        raise OptionError("--significance", level, "a number between 0 and 1, like 1e-3")


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise OptionError("--logit-bias", text, "write TOKEN_ID=BIAS, like 42=-5 or 42=-inf") from None


def _parse_biases(texts: list[str] | None) -> dict[int, float] | None:
    return dict(_parse_bias(text) for text in texts) if texts else None


def parse_k(text: str) -> list[NumDraftTokens]:
    """ "4", "1-8", "1,2,4" or "1-4,8,auto", each once, "auto" last.

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


def single_k(
    text: str | None, pair: PairOptions, sampling: SamplingOptions | TaskSamplingOptions, seed: int | None
) -> NumDraftTokens:
    """For commands that use one K. Without one it is "auto", but not where a seed is to give the same text again, which
    under most rules takes the same K.

    Raises:
        OptionError
    """
    if text is None:
        is_free = seed is None or sampling.temperature == 0 or pair.acceptance == "gumbel"
        return "auto" if is_free else DEFAULT_NUM_DRAFT_TOKENS
    ks = parse_k(text)
    if len(ks) > 1:
        raise OptionError("-k/--num-draft-tokens", text, "this command takes one number")
    return ks[0]


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Give Typer a signature in which each parameter that is an option group is replaced by the group's fields."""
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
    del flattened.__wrapped__  # or the signature of the command itself would be found
    return flattened
