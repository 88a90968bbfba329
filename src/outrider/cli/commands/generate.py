"""``outrider generate``: generates from a prompt, or from a file of prompts."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from outrider.cli.shared.context_limit import report_context_limit, report_num_limited
from outrider.cli.shared.generation_config import GenerationConfigOption, over_checkpoint
from outrider.cli.shared.options import (
    EndOptions,
    JsonOption,
    NumDraftTokensOption,
    SamplingOptions,
    StructureOptions,
    check_batch_size,
    check_constraint,
    flat,
)
from outrider.cli.shared.output import (
    check_json_target,
    check_outputs,
    console_for,
    json_text,
    make_document,
    progress_bar,
    write_document,
)
from outrider.cli.shared.pair_options import PairOptions, single_k
from outrider.cli.shared.ray_workers import RayOptions, open_ray_workers
from outrider.cli.shared.template_options import TemplateOptions, hint_at_chat
from outrider.cli.shared.workers import LocalWorker, Setup, Workers
from outrider.cli.shared.wrapping import say
from outrider.errors import FileError, OptionError, OutriderError, PromptError
from outrider.offline.invalid_rows import InvalidRows
from outrider.offline.output_file import FinishedPrompts, open_output
from outrider.offline.output_rows import Totals, row_of, stats_of
from outrider.offline.prompt_file import open_prompts
from outrider.offline.prompt_order import Shard, by_length
from outrider.offline.prompt_row import PromptLine
from outrider.options import Sampling
from outrider.records import Chunk, Completion, Timing
from outrider.system.ranks import current_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.decoder import Decoder

ORIGIN_STYLES = {"accepted": "green", "correction": "bold red", "bonus": "bold blue"}


@flat
def generate(
    command: typer.Context,
    pair: PairOptions,
    sampling: SamplingOptions,
    end: EndOptions,
    structure: StructureOptions,
    template: TemplateOptions,
    cluster: RayOptions,
    prompt: Annotated[str | None, typer.Argument(help="Prompt. Default: standard input.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts. Plain lines; JSON lines (or an array) with 'prompt' or 'messages' and optional "
            "sampling options; or requests in OpenAI's batch format."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --prompts: write JSON lines. An interrupted run resumes.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="With --prompts: so many at once.")] = 1,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="With --prompts: run part I of N. Each with its own --output file."),
    ] = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="With --prompts: skip invalid rows. They are reported.")
    ] = False,
    num_draft_tokens: NumDraftTokensOption = None,
    seed: Annotated[int | None, typer.Option(help="Prompt i gets this seed + i. Default: random.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Add log-probabilities to the JSON. Of each token, and of the N most probable.")
    ] = None,
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="Colour tokens by origin. Accepted, correction or bonus.")
    ] = False,
    generation_config: GenerationConfigOption = "auto",
    json_target: JsonOption = None,
) -> None:
    """Generate text from a prompt, or from a file of prompts.

    Exit code 1: some prompts of the file failed or were skipped; the others have output."""
    sampling = over_checkpoint(sampling, command, generation_config, pair.target, pair.models)
    draft, k = pair.single_draft, single_k(num_draft_tokens, pair, sampling, seed)
    check_batch_size(batch_size)
    if prompts is None:
        for option, value, default in (
            ("--output", None if output is None else str(output), None),
            ("--batch-size", batch_size, 1),
            ("--shard", shard, None),
            ("--skip-invalid", skip_invalid, False),
            ("--ray", cluster.ray, None),
        ):
            if value != default:
                raise OptionError(option, value, "this option needs a file of prompts: add --prompts FILE")
    elif prompt is not None or show_origin:
        raise OptionError("--prompts", str(prompts), "leave out the PROMPT and --show-origin")
    part = Shard() if shard is None else Shard.parse(shard)
    cluster.check(pair)
    check_json_target(json_target)
    with ExitStack() as files:
        lines = None if prompts is None else files.enter_context(open_prompts(prompts))
        inputs = [prompts, pair.models, structure.json_schema, structure.grammar, *(pair.corpus or ())]
        check_outputs({"--output": output, "--json": json_target}, inputs)
        text = _read_prompt(prompt) if lines is None else ""
        num_seeds = 1 if lines is None else len(lines)
        more = {"logprobs": logprobs, **end.to_options(), **structure.to_options()}
        options = sampling.to_options(seed=seed, num_seeds=num_seeds, **more)
        check_constraint(Sampling(**options))
        setup = Setup(pair, draft, k, options, template)
        totals = Totals(None if json_target is None or output is not None else [])
        workers: Workers
        if lines is None:
            workers = worker = LocalWorker(setup, 1)
            console = console_for(json_target, has_colours=show_origin or None)
            _show(setup, worker.decoder, text, console, show_origin, totals)
        else:
            invalid = InvalidRows(lines, skip_invalid)
            invalid.check(part.indices(len(lines)), partial(_check_own, setup))
            finished = FinishedPrompts(part.indices(len(lines)), bytearray(len(lines)))
            write: Callable[[str], None] = partial(_print, sys.stderr if json_target == "-" else sys.stdout)
            if output is not None:
                file = files.enter_context(open_output(output))
                finished = current_ranks().of_first(
                    partial(file.read_finished, lines, finished.indices, setup.settings)
                )
                write = file.write
            finished.leave_out(invalid.reasons)
            totals.num_failed = finished.num_failed
            if cluster.ray is None:
                workers = LocalWorker(setup, batch_size)
            else:
                many = open_ray_workers(cluster, setup, batch_size, finished.num_missing)
                workers = files.enter_context(many)
            _continue_all(setup, workers, invalid, finished, batch_size, write, totals)
        summary, origin = totals.summary(workers.pair()), None if json_target is None else workers.origin()
    say(summary)
    if json_target is not None:
        settings = setup.settings() | {"shard": shard}
        write_document(json_target, make_document("generate", settings, totals.to_json(), origin=origin))
    if totals.is_interrupted:
        raise typer.Exit(130)
    if totals.num_failed or totals.skipped:
        raise typer.Exit(1)


def _read_prompt(argument: str | None) -> str:
    if argument is not None:
        text = argument
    elif sys.stdin.isatty():
        raise PromptError("no prompt: give one as an argument, pipe it in, or use --prompts FILE")
    else:
        try:
            text = current_ranks().of_first(sys.stdin.buffer.read).decode("utf-8").rstrip("\n")
        except UnicodeDecodeError as error:
            raise FileError(f"standard input is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise PromptError.empty()
    return text


def _check_own(setup: Setup, line: PromptLine) -> None:
    """Detect options that no target supports, before the work. Raises OptionError."""
    target = setup.pair.target
    if line.model not in (None, target):
        raise OptionError("model", line.model, f"the target is {target!r}: choose it with --target, or leave it out")
    check_constraint(Sampling(**setup.options | line.options))


def _lengths(workers: Workers, target: str, finished: FinishedPrompts, invalid: InvalidRows) -> Sequence[int]:
    """Check the unfinished prompts against the target before the work, and compute their maximum lengths.

    Raises:
        FileError: with the line, unless it is skipped.
    """
    lines, num_cut = invalid.lines, 0
    lengths = array("Q", bytes(8 * len(lines)))
    for index, length in workers.lengths((index, lines[index]) for index in finished.missing()):
        if isinstance(length, OutriderError):
            invalid.add(index, length)
        else:
            lengths[index] = length.num_tokens
            num_cut += length.is_cut
    finished.leave_out(invalid.reasons)
    report_num_limited(target, num_cut)
    return lengths


def _continue_all(
    setup: Setup,
    workers: Workers,
    invalid: InvalidRows,
    finished: FinishedPrompts,
    num_slots: int,
    write: Callable[[str], None],
    totals: Totals,
) -> None:
    """Write a JSON line for each unfinished prompt as workers yield them. Keeps totals only."""
    lines, lengths = invalid.lines, _lengths(workers, setup.pair.target, finished, invalid)
    invalid.report()
    totals.skipped = invalid.to_json()
    order = by_length(finished.missing(), lengths, num_slots)
    num_prompts = finished.num_rows + finished.num_missing
    start = time.perf_counter()
    try:
        with progress_bar("prompts", num_prompts, finished.num_rows) as advance:
            for index, (row, stats) in workers.rows((index, lines[index]) for index in order):
                write(json_text(row | {"settings": setup.settings(lines[index])}))
                totals.add(row, stats)
                advance(1)
    except KeyboardInterrupt:
        totals.is_interrupted = True
    # Rows join and leave within rounds, so the time per phase is not reported.
    totals.time_s = dict.fromkeys(Timing().to_json()) | {"total": time.perf_counter() - start}


def _show(setup: Setup, decoder: Decoder, prompt: str, console: Console, has_colours: bool, totals: Totals) -> None:
    """Print the text of a prompt as it is generated."""
    hint_at_chat(decoder, [setup.template.prompt(prompt)])
    ids = setup.encode(decoder, prompt)
    report_context_limit(decoder.target.name, decoder.target.context_len, [ids], setup.options["max_new_tokens"])
    chunks: list[Chunk] = []
    stream = decoder.stream(ids, **setup.options)
    try:
        if console.file.isatty():
            console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
        for chunk in stream:
            chunks.append(chunk)
            for text, origin in chunk.pieces:
                if has_colours:
                    console.print(text, style=ORIGIN_STYLES[origin], end="", markup=False, soft_wrap=True)
                else:
                    console.file.write(text)
            console.file.flush()
            if not console.file.writable():  # nobody reads it
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        totals.is_interrupted = True
    finally:
        console.file.write("\n")
        console.file.flush()
    if has_colours:
        legend = "  ".join(f"[{style}]{origin}[/]" for origin, style in ORIGIN_STYLES.items())
        console.print(legend)
    totals.time_s = {**sum((chunk.timing for chunk in chunks), Timing()).to_json()}
    done = Completion.of(chunks, len(ids)) if chunks else None
    row = row_of(0, PromptLine("line 1", prompt), ids, setup.options["seed"], done)
    totals.seed = _drawn_seed(setup, decoder, row["seed"])
    totals.add(row, stats_of(done))


def _drawn_seed(setup: Setup, decoder: Decoder, seed: int | None) -> str:
    """Hint for the summary: the drawn seed of a sampled output, to repeat it; empty for others."""
    temperature = setup.options["temperature"]
    if seed is None or setup.options["seed"] is not None or temperature == 0:
        return ""
    # A row with a given seed has its own K if its output depends on K.
    depends_on_k = decoder.request([0], {"seed": seed, "temperature": temperature}).request.num_draft_tokens is not None
    return f"seed {seed}" + (
        " (K adapted to the load: to repeat an output, give -k 4 with the seed)" if depends_on_k else ""
    )


def _print(stream: IO[str], text: str) -> None:
    stream.write(text)
    stream.flush()
    if not stream.writable():  # nobody reads it
        raise KeyboardInterrupt
