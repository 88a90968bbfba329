"""``outrider divergence``: where greedy speculative and plain decoding differ, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.cli.commands.certify import job_of
from outrider.cli.shared.findings import greedy_row, print_differences
from outrider.cli.shared.generation_config import GenerationConfigOption, over_checkpoint
from outrider.cli.shared.options import (
    DEFAULT_SIGNIFICANCE,
    BatchSizeOption,
    JsonOption,
    NumDraftTokensOption,
    PromptsOption,
    SamplingOptions,
    SeedOption,
    check_batch_size,
    flat,
)
from outrider.cli.shared.output import (
    check_json_target,
    console_for,
    options_json,
    print_table,
    progress_bar,
    write_json,
)
from outrider.cli.shared.pair_options import PairOptions, single_k
from outrider.cli.shared.template_options import TemplateOptions
from outrider.errors import OptionError


@dataclass(frozen=True)
class _GreedyOptions(SamplingOptions):
    """Sampling options that default to greedy."""

    temperature: Annotated[
        float, typer.Option("-t", "--temperature", help="0 is greedy; above 0 only with --acceptance gumbel.")
    ] = 0.0


@flat
def divergence(
    command: typer.Context,
    pair: PairOptions,
    sampling: _GreedyOptions,
    template: TemplateOptions,
    num_draft_tokens: NumDraftTokensOption = None,
    prompts: PromptsOption = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "-n", "--max-new-tokens", help="Maximum tokens to generate per prompt.", rich_help_panel="Sampling"
        ),
    ] = 128,
    batch_size: BatchSizeOption = 8,
    seed: SeedOption = 0,
    generation_config: GenerationConfigOption = "auto",
    json_target: JsonOption = None,
) -> None:
    """Explain where speculative and plain decoding diverge. Both are greedy: by rounding, or by a bug (exit code 1)."""
    check_json_target(json_target)
    check_batch_size(batch_size)
    sampling = over_checkpoint(sampling, command, generation_config, pair.target, pair.models, leaves=("temperature",))
    k = single_k(num_draft_tokens, pair, sampling, seed)
    draft = pair.compared_draft
    if sampling.temperature > 0 and pair.acceptance != "gumbel":
        remedy = f"under {pair.acceptance} samples may differ: use 0, or --acceptance gumbel"
        raise OptionError("--temperature", sampling.temperature, remedy)
    options = sampling.to_options(seed=seed, num_seeds=2**33, max_new_tokens=max_new_tokens)
    lines = template.read(prompts)

    from outrider.bench.tables import new_table
    from outrider.certify.run import check_greedily, plain_texts

    decoder, job = job_of(pair, options, k, lines, prompts, DEFAULT_SIGNIFICANCE, batch_size, seed)
    with progress_bar("texts", len(job.prompts)) as advance:
        report = check_greedily(job, plain_texts(job), on_texts=advance)
    console = console_for(json_target)
    title = f"{decoder.target.name} with {draft}, {decoder.acceptance}, K = {k}, temperature {sampling.temperature:g}"
    table = new_table(title, "texts", "found", "verdict")
    table.add_row(*greedy_row(report))
    print_table(console, table)
    print_differences(console, report, "prompt", decoder.tokenizer)
    settings = options_json(
        pair, options, num_draft_tokens=k, prompts=prompts, batch_size=batch_size, **template.to_json()
    )
    write_json(json_target, "divergence", settings, report.to_json(), decoder.target)
    if not report.is_ok:
        raise typer.Exit(1)
