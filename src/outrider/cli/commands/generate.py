"""``outrider generate``: text from a prompt, or from a file of prompts."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from outrider.cli.shared.jsonl import PromptLine, read_finished, read_prompts
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
    console_for,
    json_text,
    options_json,
    progress_bar,
    write_json,
)
from outrider.errors import FileError, NumericsError, OptionError, PromptError
from outrider.system.files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.api import Decoder
    from outrider.records import Chunk, Stats, Timing

ORIGIN_STYLES = {"accepted": "green", "correction": "bold red", "bonus": "bold blue"}


@flat
def generate(
    pair: PairOptions,
    sampling: SamplingOptions,
    end: EndOptions,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue. Without it: standard input.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts: JSON lines with a 'prompt', or plain lines.")
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
    """Continue a text, printing it as it comes; or continue every prompt of a file."""
    draft, k = pair.single_draft, single_k(num_draft_tokens, pair, sampling, seed)
    check_batch_size(batch_size)
    if prompts is None and (output is not None or batch_size > 1):
        raise OptionError("--prompts", None, "--output and --batch-size are for a file of prompts")
    if prompts is not None and (prompt is not None or show_origin):
        raise OptionError("--prompts", str(prompts), "it goes without a PROMPT and without --show-origin")
    check_json_target(json_target)
    if output is not None and json_target not in (None, "-") and output.resolve() == Path(str(json_target)).resolve():
        raise OptionError("--json", json_target, "it would write over the --output file: choose another name")
    lines = read_prompts(prompts) if prompts is not None else [PromptLine(1, _read_prompt(prompt))]
    texts = [line.text for line in lines]
    options = sampling.to_options(seed=seed, num_seeds=len(texts), logprobs=logprobs, **end.to_options())
    settings = options_json(pair, options, draft=draft, num_draft_tokens=k, chat=chat)
    num_finished = 0
    if output is not None:
        check_writable(output)
        num_finished = read_finished(output, texts, settings)

    decoder = pair.load((len(texts) - num_finished) * end.max_new_tokens)
    decoder = replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k)
    inputs: list[Any] = [[{"role": "user", "content": text}] if chat else text for text in texts]
    for line, item in zip(lines, inputs, strict=True):
        try:
            decoder.encode(item)
        except PromptError as error:
            raise PromptError(f"{prompts}, line {line.number}: {error}" if prompts else str(error)) from None

    first_seed = secrets.randbits(62) if seed is None else seed
    run = _Run(decoder, inputs, lines, options, first_seed)
    if prompts is None:
        run.show(console_for(json_target, has_colours=show_origin or None), show_origin)
    else:
        stream = sys.stderr if json_target == "-" else sys.stdout
        run.write(output or stream, settings, num_finished, batch_size)
    print(run.summary(), file=sys.stderr)
    write_json(json_target, "generate", settings, run.to_json(), decoder.target)
    if run.is_interrupted:
        raise typer.Exit(130)


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


class _Run:
    """Generation over the prompts, which may be interrupted at any time; what was made until then is kept."""

    def __init__(
        self, decoder: Decoder, inputs: Sequence[Any], lines: Sequence[PromptLine], options: dict[str, Any], seed: int
    ) -> None:
        from outrider.records import Stats, Timing

        self.decoder, self.inputs, self.lines, self.options, self.seed = decoder, inputs, lines, options, seed
        self.rows: list[dict[str, Any]] = []
        self.stats: Stats = Stats()
        self.timing: Timing = Timing()
        self.is_interrupted = False

    def show(self, console: Console, has_colours: bool) -> None:
        """Print the text of the first prompt as it comes."""
        chunks: list[Chunk] = []
        stream = self.decoder.stream(self.inputs[0], **self.options | {"seed": self.seed})
        try:
            if console.file.isatty():
                console.print(self.lines[0].text, style="dim", end="", markup=False, soft_wrap=True)
            for chunk in stream:
                chunks.append(chunk)
                for text, origin in chunk.pieces:
                    if has_colours:
                        console.print(text, style=ORIGIN_STYLES[origin], end="", markup=False, soft_wrap=True)
                    else:
                        console.file.write(text)
                console.file.flush()
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            console.file.write("\n")
        if has_colours:
            legend = "  ".join(f"[{style}]{origin}[/]" for origin, style in ORIGIN_STYLES.items())
            console.print(legend)
        self._keep(0, chunks)

    def write(
        self,
        output: Path | TextIO,
        settings: dict[str, Any],
        begin: int,
        batch_size: int,
    ) -> None:
        """Write a line of JSON for each prompt from ``begin`` on, in order, a batch at a time."""
        num_prompts = len(self.inputs)
        with progress_bar("prompts", num_prompts, begin) as advance:
            for start in range(begin, num_prompts, batch_size):
                end = min(start + batch_size, num_prompts)
                try:
                    begin_kept = len(self.rows)
                    self._generate(start, end, advance)
                except NumericsError as error:
                    where = f"lines {self.lines[start].number} to {self.lines[end - 1].number}"
                    if end == start + 1:
                        where = f"line {self.lines[start].number}"
                    raise NumericsError(f"{where}: {error}") from None
                text = "".join(json_text(row | {"settings": settings}) for row in self.rows[begin_kept:])
                if isinstance(output, Path):
                    with output.open("a", encoding="utf-8") as stream:
                        stream.write(text)
                else:
                    output.write(text)
                    output.flush()
                if self.is_interrupted:
                    return

    def _generate(self, start: int, end: int, advance: Callable[[int], None]) -> None:
        """Generate for the prompts start <= index < end, as one batch. Interrupted, keep the rows that are finished, up
        to the first that is not: what is written is in order, so that the run can be continued."""
        chunks: list[list[Chunk]] = [[] for _ in range(start, end)]
        seeds = [self.seed + index for index in range(start, end)]
        try:
            for chunk in self.decoder.stream_many(self.inputs[start:end], **self.options | {"seed": seeds}):
                chunks[chunk.row].append(chunk)
                if chunk.finish_reason is not None:
                    advance(1)
        except KeyboardInterrupt:
            self.is_interrupted = True
        for i, row_chunks in enumerate(chunks):
            if not row_chunks or row_chunks[-1].finish_reason is None:
                break
            self._keep(start + i, row_chunks)

    def _keep(self, index: int, chunks: Sequence[Chunk]) -> None:
        self.rows.append(self._row(index, chunks))
        for chunk in chunks:
            self.stats, self.timing = self.stats + chunk.stats, self.timing + chunk.timing

    def _row(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        from outrider.records import Stats

        row: dict[str, Any] = {
            "index": index,
            "prompt": self.lines[index].text,
            "prompt_ids": self.decoder.encode(self.inputs[index]),
            "text": "".join(chunk.text for chunk in chunks),
            "token_ids": [i for chunk in chunks for i in chunk.token_ids],
            "origins": [origin for chunk in chunks for origin in chunk.origins],
            "finish_reason": chunks[-1].finish_reason if chunks else None,
            "seed": self.seed + index,
            "stats": sum((chunk.stats for chunk in chunks), Stats()).to_json(),
        }
        if self.lines[index].category is not None:
            row["category"] = self.lines[index].category
        if self.options["logprobs"] is not None:
            row["logprobs"] = [asdict(item) for chunk in chunks for item in chunk.logprobs or ()]
        return row

    def summary(self) -> str:
        num_tokens, rate = self.stats.num_generated_tokens, self._tokens_per_s()
        tau = self.stats.mean_acceptance_length
        return (
            f"{num_tokens} tokens, {rate:.1f} tokens/s, mean acceptance length {1.0 if tau is None else tau:.2f} "
            f"({self._how()})" + (", interrupted" if self.is_interrupted else "")
        )

    def _how(self) -> str:
        target, draft = self.decoder.target.name, self.decoder.drafter.name
        if draft == "none":
            return f"{target}, plain"
        return f"{target} with {draft}, K = {self.decoder.num_draft_tokens}, {self.decoder.acceptance}"

    def _tokens_per_s(self) -> float:
        return self.stats.num_generated_tokens / self.timing.total_s if self.timing.total_s else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "completions": self.rows,
            "tokens_per_s": self._tokens_per_s(),
            "stats": self.stats.to_json(),
            "time_s": self.timing.to_json(),
            "is_interrupted": self.is_interrupted,
        }
