"""``outrider record``: records a target's outputs, to evaluate drafts by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.context_limit import report_context_limit
from outrider.cli.shared.generation_config import GenerationConfigOption, over_checkpoint
from outrider.cli.shared.options import BatchSizeOption, EndOptions, SamplingOptions, SeedOption, check_batch_size, flat
from outrider.cli.shared.output import check_outputs, json_text, origin_of, progress_bar
from outrider.cli.shared.pair_options import MachineOptions, TargetOption
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.cli.shared.wrapping import say
from outrider.errors import FileError, NumericsError, OptionError
from outrider.offline.prompt_row import PromptLine
from outrider.system.files import check_writable, write_text
from outrider.system.ranks import current_ranks
from outrider.text.chat import Chat

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.replay.log_format import Header
    from outrider.replay.log_writer import LogWriter


@flat
def record(
    command: typer.Context,
    machine: MachineOptions,
    sampling: SamplingOptions,
    end: EndOptions,
    template: TemplateOptions,
    prompts: Annotated[
        Path,
        typer.Option(help="File of prompts. JSON lines with a 'prompt' (or 'turns') or 'messages', or plain lines."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the log. An interrupted run resumes.")],
    target: TargetOption = "fable",
    probs: Annotated[
        int | None,
        typer.Option(
            help="Keep the probabilities of each token and of the N most probable. Replay needs them for sampled logs."
        ),
    ] = None,
    batch_size: BatchSizeOption = 8,
    seed: SeedOption = 0,
    generation_config: GenerationConfigOption = "auto",
    tensors: Annotated[
        Path | None,
        typer.Option(
            help="Also write the token ids as printed tensors at the end (decoding-speculative-decoding). Greedy "
            "decoding only."
        ),
    ] = None,
) -> None:
    """Record the target's output, with probabilities. 'outrider replay', plan and export read the log."""
    check_batch_size(batch_size)
    if probs is not None and probs < 1:
        raise OptionError("--probs", probs, "a whole number >= 1")
    sampling = over_checkpoint(sampling, command, generation_config, target, machine.models)
    lines = template.read(prompts)
    options = sampling.to_options(seed=seed, num_seeds=len(lines), **end.to_options())
    del options["seed"]
    if output.exists() and not output.is_dir():
        raise FileError(f"cannot write {output}: it is not a folder")
    if tensors is not None:
        plain = SamplingOptions(temperature=0.0)
        greedy = replace(sampling, top_k=plain.top_k, top_p=plain.top_p, min_p=plain.min_p)  # no effect at 0
        if greedy != plain or any(isinstance(line.prompt, Chat) for line in lines):
            raise OptionError(
                "--tensors",
                str(tensors),
                "this format has no sampling options and is read as greedy: record with -t 0, and "
                "without penalties, --logit-bias, --min-tokens and --chat",
            )
        check_outputs({"--tensors": tensors}, [prompts, output])
        check_writable(tensors)

    decoder = machine.load(target)

    from outrider.replay.log import Log
    from outrider.replay.log_writer import LogWriter
    from outrider.replay.other_formats import tensor_text

    prompt_ids = encode_lines(decoder, lines, prompts)
    decoder = decoder.of_one_kind(prompt_ids)
    report_context_limit(decoder.target.name, decoder.target.context_len, prompt_ids, end.max_new_tokens)
    header = _header(decoder, options, probs, template)
    labels = [(index, line.text, line.category, seed + index) for index, line in enumerate(lines)]
    writer = LogWriter(output, header, [label[1:] for label in labels], batch_size)
    is_interrupted = _write(decoder, writer, lines, prompt_ids, labels, options, probs, batch_size)
    log = current_ranks().of_first(lambda: Log.open(output))
    num_tokens = sum(line.num_tokens for line in log.lines)
    say(
        f"{len(log)} of {len(lines)} prompts, {num_tokens} tokens ({decoder.target.name}): {output}"
        + (", interrupted" if is_interrupted else "")
    )
    if is_interrupted:
        raise typer.Exit(130)
    if tensors is not None:
        write_text(tensors, tensor_text(one.token_ids for one in log))


def _header(decoder: Decoder, options: dict[str, Any], num_probs: int | None, template: TemplateOptions) -> Header:
    from outrider.replay.record import header_of

    origin = origin_of(decoder)
    settings = {**template.to_json(), "dtype": origin["dtype"]}
    return header_of(decoder, options, num_probs, settings=settings, provenance=json.loads(json_text(origin)))


def _write(
    decoder: Decoder,
    writer: LogWriter,
    lines: list[PromptLine],
    prompt_ids: list[list[int]],
    labels: list[tuple[int, str, str | None, int]],
    options: dict[str, Any],
    num_probs: int | None,
    batch_size: int,
) -> bool:
    """Record the unfinished prompts, a few batches at a time. Complete records are always kept.

    Returns:
        Whether it was interrupted.
    """
    from outrider.replay.record import record_batch

    try:
        with progress_bar("prompts", len(lines), writer.num_finished) as advance:
            at_once = 4 * batch_size  # more than slots, so that slots are refilled
            for start in range(writer.num_finished, len(lines), at_once):
                part = slice(start, min(start + at_once, len(lines)))
                try:
                    records, is_interrupted = record_batch(
                        decoder,
                        prompt_ids[part],
                        labels[part],
                        options,
                        num_probs=num_probs,
                        num_slots=batch_size,
                        on_done=advance,
                    )
                except NumericsError as error:
                    where = f"{lines[part.start].place} to {lines[part.stop - 1].place}"
                    raise NumericsError(f"{where}: {error}") from None
                writer.append(records)
                if is_interrupted:
                    return True
    except KeyboardInterrupt:  # while computing probabilities: only this batch is lost
        return True
    finally:
        writer.flush()
    return False
