"""``outrider record``: records a target's outputs, to evaluate drafts by."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import (
    BatchSizeOption,
    EndOptions,
    GenerationConfigOption,
    ProbsOption,
    SamplingOptions,
    SeedOption,
    over_checkpoint,
)
from outrider.cli.shared.output import say
from outrider.cli.shared.pair_options import MachineOptions, PairOptions, TargetOption
from outrider.cli.shared.prompt_job import LocalWorker, Setup, run_job
from outrider.cli.shared.template_options import TemplateOptions
from outrider.errors import OptionError
from outrider.offline.output_file import Totals
from outrider.offline.prompt_file import Shard, check_without_options, open_prompts
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS
from outrider.system.files import write_text
from outrider.text.chat import Chat


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
    output: Annotated[Path, typer.Option(help="Write JSON lines. An interrupted run resumes.")],
    target: TargetOption = "fable",
    probs: ProbsOption = False,
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
    """Record the target's output, with probabilities. 'outrider replay', plan and export read the log.

    'outrider generate --output --probs' writes such lines, too, with a draft."""
    sampling = over_checkpoint(sampling, command, generation_config, target, machine.models)
    with ExitStack() as files:
        lines = files.enter_context(open_prompts(prompts))
        check_without_options(prompts, lines)
        options = sampling.to_options(seed=seed, num_seeds=len(lines), logprobs=None, **end.to_options())
        if tensors is not None:
            plain = SamplingOptions(temperature=0.0)
            greedy = replace(sampling, top_k=plain.top_k, top_p=plain.top_p, min_p=plain.min_p)  # no effect at 0
            if greedy != plain or template.is_chat or any(isinstance(line.prompt, Chat) for line in lines):
                raise OptionError(
                    "--tensors",
                    str(tensors),
                    "this format has no sampling options and is read as greedy: record with -t 0, and "
                    "without penalties, --logit-bias, --min-tokens and --chat",
                )
        pair = PairOptions(target=target, draft=["none"], **asdict(machine))
        setup = Setup(pair, "none", DEFAULT_NUM_DRAFT_TOKENS, options, template, probs)
        totals = Totals(None)
        worker = LocalWorker(setup, batch_size)
        run_job(setup, lines, files, totals, lambda _: worker, num_slots=batch_size, output=output, part=Shard())
        say(totals.summary(worker.pair()) + f": {output}")
    if totals.is_interrupted:
        raise typer.Exit(130)
    if totals.num_failed:
        raise typer.Exit(1)
    if tensors is not None:
        from outrider.replay.log import Log
        from outrider.replay.rounds import tensor_text

        write_text(tensors, tensor_text(one.token_ids for one in Log.open(output).records))
