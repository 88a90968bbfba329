"""``outrider generate``: text from a prompt, or from a file of prompts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.completions import Finished, open_output
from outrider.cli.shared.jsonl import PromptFile, PromptLine, open_prompts
from outrider.cli.shared.options import (
    EndOptions,
    JsonOption,
    NumDraftTokensOption,
    PairOptions,
    SamplingOptions,
    check_batch_size,
    flat,
    single_k,
)
from outrider.cli.shared.output import (
    check_json_target,
    check_outputs,
    console_for,
    json_text,
    options_json,
    progress_bar,
    write_json,
)
from outrider.errors import FileError, OptionError, OutriderError, PromptError
from outrider.options import NumDraftTokens, Sampling
from outrider.records import Chunk, Origin, Stats, Timing, TokenLogprob

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.api import Decoder

ORIGIN_STYLES = {"accepted": "green", "correction": "bold red", "bonus": "bold blue"}
_NOTHING = Stats()


@flat
def generate(
    pair: PairOptions,
    sampling: SamplingOptions,
    end: EndOptions,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue. Without it: standard input.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts: plain lines; or JSON lines with a 'prompt', and perhaps its own options."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --prompts: write JSON lines here. An interrupted run is continued.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="With --prompts: rows generated at once.")] = 1,
    num_draft_tokens: NumDraftTokensOption = None,
    seed: Annotated[int | None, typer.Option(help="Prompt i uses seed + i. Default: random.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probability of each token, and of the N most probable, into the JSON.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message: use the model's chat template.")
    ] = False,
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="Colour the text: accepted, correction, bonus.")
    ] = False,
    json_target: JsonOption = None,
) -> None:
    """Continue a text, printing it as it comes; or continue every prompt of a file.

    Exit code 1: some prompts of the file failed. Their lines say why; the others have their text."""
    draft, k = pair.single_draft, single_k(num_draft_tokens, pair, sampling, seed)
    check_batch_size(batch_size)
    if prompts is None and (output is not None or batch_size > 1):
        raise OptionError("--prompts", None, "--output and --batch-size are for a file of prompts")
    if prompts is not None and (prompt is not None or show_origin):
        raise OptionError("--prompts", str(prompts), "it goes without a PROMPT and without --show-origin")
    check_json_target(json_target)
    with ExitStack() as files:
        lines = None if prompts is None else files.enter_context(open_prompts(prompts))
        check_outputs({"--output": output, "--json": json_target}, [prompts, pair.models])
        text = _read_prompt(prompt) if lines is None else ""
        num_seeds = 1 if lines is None else len(lines)
        options = sampling.to_options(seed=seed, num_seeds=num_seeds, logprobs=logprobs, **end.to_options())
        setup = _Setup(pair, draft, k, options, chat)
        totals = _Totals(None if json_target is None or output is not None else [])
        if lines is None:
            decoder = setup.load(end.max_new_tokens)
            console = console_for(json_target, has_colours=show_origin or None)
            _show(setup, decoder, text, console, show_origin, totals)
        else:
            _check_options(options, lines)
            finished = Finished(bytearray(len(lines)))
            write: Callable[[str], None] = partial(_print, sys.stderr if json_target == "-" else sys.stdout)
            if output is not None:
                file = files.enter_context(open_output(output))
                finished, write = file.read_finished(lines, setup.settings), file.write
            decoder = setup.load(sum(setup.max_new_tokens(lines[index]) for index in finished.missing()))
            _check(setup, decoder, lines, finished)
            totals.num_failed = finished.num_failed
            _continue_all(setup, decoder, lines, finished, seed, batch_size, write, totals)
    print(totals.summary(decoder), file=sys.stderr)
    write_json(json_target, "generate", setup.settings(), totals.to_json(), decoder.target)
    if totals.is_interrupted:
        raise typer.Exit(130)
    if totals.num_failed:
        raise typer.Exit(1)


def _read_prompt(argument: str | None) -> str:
    if argument is not None:
        text = argument
    elif sys.stdin.isatty():
        raise PromptError("there is no prompt: give one as an argument, pipe it in, or use --prompts FILE")
    else:
        try:
            text = sys.stdin.buffer.read().decode("utf-8").rstrip("\n")
        except UnicodeDecodeError as error:
            raise FileError(f"standard input is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise PromptError("the prompt is empty: give at least one token of text to start from")
    return text


@dataclass(frozen=True)
class _Setup:
    """Which models continue the prompts, and how.

    Attributes:
        options: fields of ``Sampling``, which those of a prompt's own override.
    """

    pair: PairOptions
    draft: str
    k: NumDraftTokens
    options: dict[str, Any]
    chat: bool

    def settings(self, line: PromptLine | None = None) -> dict[str, Any]:
        """All that the text of a prompt depends on."""
        options = self.options if line is None else self.options | line.options
        return options_json(self.pair, options, draft=self.draft, num_draft_tokens=self.k, chat=self.chat)

    def max_new_tokens(self, line: PromptLine) -> int:
        number: int = (self.options | line.options)["max_new_tokens"]
        return number

    def load(self, num_tokens: int) -> Decoder:
        decoder = self.pair.load(num_tokens)
        return replace(decoder, drafter=self.pair.load_draft(decoder, self.draft), num_draft_tokens=self.k)

    def encode(self, decoder: Decoder, text: str) -> list[int]:
        return decoder.encode([{"role": "user", "content": text}] if self.chat else text)


def _check_options(options: dict[str, Any], lines: PromptFile) -> None:
    """Find out before the work what no target can take.

    Raises:
        FileError: an option of a prompt is not possible.
    """
    for line in lines:
        try:
            Sampling(**options | line.options)
        except OptionError as error:
            raise FileError(f"{lines.path}, line {line.number}: {error}") from None


def _check(setup: _Setup, decoder: Decoder, lines: PromptFile, finished: Finished) -> None:
    """Find out before the work what this target cannot take.

    Raises:
        FileError: with the line.
    """
    decoder.check_bias(setup.options["logit_bias"] or {})
    for index in finished.missing():
        line = lines[index]
        try:
            setup.encode(decoder, line.text)
            decoder.check_bias(line.options.get("logit_bias", {}))
        except (OptionError, PromptError) as error:
            raise FileError(f"{lines.path}, line {line.number}: {error}") from None


def _continue_all(
    setup: _Setup,
    decoder: Decoder,
    lines: PromptFile,
    finished: Finished,
    first_seed: int | None,
    num_slots: int,
    write: Callable[[str], None],
    totals: _Totals,
) -> None:
    """Write a line of JSON for each prompt that is not finished, as soon as it is. Nothing of it is kept but sums."""
    waiting: dict[int, tuple[int, PromptLine, list[int], int | None]] = {}

    def prompts() -> Iterator[tuple[list[int], Mapping[str, Any]]]:
        for place, index in enumerate(finished.missing()):
            line = lines[index]
            ids = setup.encode(decoder, line.text)
            seed = line.options.get("seed", None if first_seed is None else first_seed + index)
            waiting[place] = (index, line, ids, seed)
            yield ids, {**line.options, "seed": seed}

    options = {name: value for name, value in setup.options.items() if name != "seed"}
    start = time.perf_counter()
    try:
        with progress_bar("prompts", len(lines), finished.num_rows) as advance:
            for place, done in decoder.complete(prompts(), num_slots=num_slots, **options):
                index, line, ids, seed = waiting.pop(place)
                if isinstance(done, OutriderError):
                    made = _made(finish_reason="error") | {"error": str(done)}
                else:
                    made = _made(done.text, done.token_ids, done.origins, done.finish_reason, done.stats, done.logprobs)
                    totals.stats += done.stats
                    seed = done.seed
                row = _row(index, line, ids, seed, made)
                write(json_text(row | {"settings": setup.settings(line)}))
                totals.keep(row)
                advance(1)
    except KeyboardInterrupt:
        totals.is_interrupted = True
    # Rows come and go in the same rounds: how the time divides among drafting and the rest is not told.
    totals.time_s = dict.fromkeys(Timing().to_json()) | {"total": time.perf_counter() - start}


def _show(setup: _Setup, decoder: Decoder, prompt: str, console: Console, has_colours: bool, totals: _Totals) -> None:
    """Print the text of a prompt as it comes."""
    ids = setup.encode(decoder, prompt)
    chunks: list[Chunk] = []
    stream = decoder.stream(ids, **setup.options)
    try:
        if console.file.isatty():
            console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
        for chunk in stream:
            chunks.append(chunk)
            with _writing_to(console.file):
                for text, origin in chunk.pieces:
                    if has_colours:
                        console.print(text, style=ORIGIN_STYLES[origin], end="", markup=False, soft_wrap=True)
                    else:
                        console.file.write(text)
                console.file.flush()
    except KeyboardInterrupt:
        totals.is_interrupted = True
    finally:
        with _writing_to(console.file):
            console.file.write("\n")
            console.file.flush()
    if has_colours:
        legend = "  ".join(f"[{style}]{origin}[/]" for origin, style in ORIGIN_STYLES.items())
        console.print(legend)
    totals.stats = sum((chunk.stats for chunk in chunks), Stats())
    totals.time_s = {**sum((chunk.timing for chunk in chunks), Timing()).to_json()}
    made = _made(
        "".join(chunk.text for chunk in chunks),
        [i for chunk in chunks for i in chunk.token_ids],
        [origin for chunk in chunks for origin in chunk.origins],
        chunks[-1].finish_reason if chunks else None,
        totals.stats,
        None if setup.options["logprobs"] is None else [item for chunk in chunks for item in chunk.logprobs or ()],
    )
    seed = chunks[0].seed if chunks else setup.options["seed"]
    totals.keep(_row(0, PromptLine(1, prompt), ids, seed, made))


def _print(stream: IO[str], text: str) -> None:
    with _writing_to(stream):
        stream.write(text)
        stream.flush()


@contextmanager
def _writing_to(stream: IO[str]) -> Iterator[None]:
    """Tell in one line if it cannot be written to. (Where a reader has enough, as in ``| head``, Typer ends us.)"""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):  # or what is in the buffer would fail once more, at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        name = "standard error" if stream is sys.stderr else "standard output"
        raise FileError(f"cannot write to {name}: {error.strerror}") from None


def _made(
    text: str = "",
    token_ids: Sequence[int] = (),
    origins: Sequence[Origin] = (),
    finish_reason: str | None = None,
    stats: Stats = _NOTHING,
    logprobs: Sequence[TokenLogprob] | None = None,
) -> dict[str, Any]:
    """The keys of a row that generation fills."""
    made: dict[str, Any] = {
        "text": text,
        "token_ids": list(token_ids),
        "origins": list(origins),
        "finish_reason": finish_reason,
        "stats": stats.to_json(),
    }
    if logprobs is not None:
        made["logprobs"] = [asdict(item) for item in logprobs]
    return made


def _row(index: int, line: PromptLine, prompt_ids: list[int], seed: int | None, made: dict[str, Any]) -> dict[str, Any]:
    """The index comes first: by that a half-written line is known."""
    row = {"index": index, "prompt": line.text, "prompt_ids": prompt_ids, **made, "seed": seed}
    return row if line.category is None else row | {"category": line.category}


@dataclass
class _Totals:
    """The summary of a run, which may be interrupted at any time.

    Attributes:
        rows: None if they are not to be kept.
        num_failed: prompts that ended in an error, those of earlier runs included.
    """

    rows: list[dict[str, Any]] | None
    stats: Stats = _NOTHING
    time_s: dict[str, float | None] = field(default_factory=dict)
    num_failed: int = 0
    is_interrupted: bool = False

    def keep(self, row: dict[str, Any]) -> None:
        self.num_failed += row["finish_reason"] == "error"
        if self.rows is not None:
            self.rows.append(row)

    @property
    def tokens_per_s(self) -> float:
        total_s = self.time_s.get("total")
        return self.stats.num_generated_tokens / total_s if total_s else 0.0

    def summary(self, decoder: Decoder) -> str:
        target, draft = decoder.target.name, decoder.drafter.name
        how = f"{target} with {draft}, K = {decoder.num_draft_tokens}, {decoder.acceptance}"
        if draft == "none":
            how = f"{target}, plain"
        tau = self.stats.mean_acceptance_length
        return (
            f"{self.stats.num_generated_tokens} tokens, {self.tokens_per_s:.1f} tokens/s, "
            f"mean acceptance length {1.0 if tau is None else tau:.2f} ({how})"
            + (f", {self.num_failed} failed" if self.num_failed else "")
            + (", interrupted" if self.is_interrupted else "")
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "completions": self.rows,
            "num_failed": self.num_failed,
            "tokens_per_s": self.tokens_per_s,
            "stats": self.stats.to_json(),
            "time_s": self.time_s,
            "is_interrupted": self.is_interrupted,
        }
