"""``outrider latency``: milliseconds per token of targets, drafts and pairs at every K."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from outrider.cli.shared import options as shared
from outrider.cli.shared.flat import flat
from outrider.cli.shared.output import report_context_limit
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.cli.shared.progress import measure_all, warm_up_all
from outrider.cli.shared.template_options import TemplateOptions, encode_lines


@flat
def latency(
    command: typer.Context,
    pair: PairOptions,
    sampling: shared.SamplingOptions,
    template: TemplateOptions,
    report: shared.ReportOptions,
    num_draft_tokens: shared.NumDraftTokensListOption = "1-8",
    max_new_tokens: shared.NumTokensOption = 64,
    seed: shared.SeedOption = 0,
    generation_config: shared.GenerationConfigOption = "auto",
) -> None:
    """Time target, drafts and pairs at each K. They run in turn, on 15 built-in prompts, after a warm-up."""
    sampling = shared.over_checkpoint(sampling, command, generation_config, pair.target, pair.models)
    lines = template.read_lines(None)
    options = sampling.to_options(seed=seed, num_seeds=len(lines), max_new_tokens=max_new_tokens, ignore_eos=True)
    ks = shared.parse_k(num_draft_tokens)

    decoder = pair.load()

    from outrider.measure.arms import Arm, Case, arms_by_k, names_of_drafts, peak_memory_bytes

    prompts = encode_lines(decoder, lines)
    report_context_limit(decoder.target.name, decoder.target.context_len, prompts, max_new_tokens)
    alone, pairs = [Arm(f"{decoder.target.name} alone", decoder)], []
    for name, drafter in pair.load_drafts(decoder).items():
        if drafter.lm is not None:
            alone.append(Arm(f"{name} alone", replace(decoder, target=drafter.lm), draft=name))
        pairs += arms_by_k(replace(decoder, drafter=drafter), name, ks)
    arms = alone + pairs
    cases = [Case(index, prompt, seed + index) for index, prompt in enumerate(prompts)]
    warm_up_all(arms, cases, options)
    summaries, is_interrupted = measure_all(arms, cases, options, "measurements")
    body: dict[str, Any] = {
        "arms": [summary.to_json() for summary in summaries],
        "baseline": arms[0].name,
        "num_prompts": summaries[0].num_cases,
        "is_interrupted": is_interrupted,
        "peak_memory_bytes": peak_memory_bytes(decoder.target.device),
    }
    settings = options_json(pair, options, draft=names_of_drafts(arms), num_draft_tokens=ks, **template.to_json())
    report.finish("latency", settings, body, decoder)
    if is_interrupted:
        raise typer.Exit(130)
