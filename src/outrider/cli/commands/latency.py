"""``outrider latency``: milliseconds per token of targets, drafts and pairs at every K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import (
    GenerationConfigOption,
    NumDraftTokensListOption,
    ReportOptions,
    SamplingOptions,
    SeedOption,
    over_checkpoint,
    parse_k,
)
from outrider.cli.shared.output import report_context_limit
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.cli.shared.progress import count_items, gather, progress
from outrider.cli.shared.template_options import TemplateOptions, encode_lines

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.measure.arms import Arm
    from outrider.options import NumDraftTokens


@flat
def latency(
    command: typer.Context,
    pair: PairOptions,
    sampling: SamplingOptions,
    template: TemplateOptions,
    report: ReportOptions,
    num_draft_tokens: NumDraftTokensListOption = "1-8",
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="Tokens to generate per prompt.")] = 64,
    seed: SeedOption = 0,
    generation_config: GenerationConfigOption = "auto",
) -> None:
    """Time target, drafts and pairs at each K. They run in turn, on 15 built-in prompts, after a warm-up."""
    sampling = over_checkpoint(sampling, command, generation_config, pair.target, pair.models)
    lines = template.read_lines(None)
    options = sampling.to_options(seed=seed, num_seeds=len(lines), max_new_tokens=max_new_tokens, ignore_eos=True)
    ks = parse_k(num_draft_tokens)

    decoder = pair.load()

    from outrider.measure.arms import Case, interleave, names_of_drafts, peak_memory_bytes, summarise, warm_up

    prompts = encode_lines(decoder, lines)
    report_context_limit(decoder.target.name, decoder.target.context_len, prompts, max_new_tokens)
    arms = _arms(pair, decoder, ks)
    cases = [Case(index, prompt, seed + index) for index, prompt in enumerate(prompts)]
    with progress("warming up", len(arms)) as advance:
        for arm in count_items(arms, advance):
            warm_up([arm], cases, options)
    measurements, is_interrupted = gather(interleave(arms, cases, options), len(arms) * len(cases), "measurements")
    summaries = summarise(measurements, arms)
    if not summaries:
        raise typer.Exit(130)
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


def _arms(pair: PairOptions, decoder: Decoder, ks: Sequence[NumDraftTokens]) -> list[Arm]:
    """Target alone (the baseline), each draft model alone, and each pair with each K."""
    from outrider.measure.arms import Arm, arms_by_k

    alone = [Arm(f"{decoder.target.name} alone", decoder)]
    pairs = []
    for name, drafter in pair.load_drafts(decoder).items():
        if drafter.lm is not None:
            alone.append(Arm(f"{name} alone", replace(decoder, target=drafter.lm), draft=name))
        pairs += arms_by_k(replace(decoder, drafter=drafter), name, ks)
    return alone + pairs
