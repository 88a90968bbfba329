"""``outrider eval multiplication``: success rates of plain and speculative decoding."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import JsonOption, NumDraftTokensOption, SamplingOptions, SeedOption, flat
from outrider.cli.shared.output import (
    console_for,
    print_table,
    progress_bar,
    write_json,
)
from outrider.cli.shared.pair_options import PairOptions, options_json, single_k

if TYPE_CHECKING:
    from outrider.evals.multiplication import SheetScore


@flat
def multiplication(
    pair: PairOptions,
    sampling: SamplingOptions,
    num_draft_tokens: NumDraftTokensOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Problems to solve.")] = 600,
    batch_size: Annotated[int, typer.Option(min=1, help="Problems solved concurrently.")] = 8,
    margin: Annotated[float, typer.Option(min=1e-6, max=1, help="Equivalence margin of the success rates.")] = 0.05,
    seed: SeedOption = 0,
    json_target: JsonOption = None,
) -> None:
    """Score multiplication problems. Is the first line after "a * b = " the product?"""
    k, draft = single_k(num_draft_tokens, pair, sampling, seed), pair.compared_draft
    options = sampling.to_options(seed=seed, num_seeds=num_prompts)

    from outrider.bench.tables import new_table
    from outrider.evals.multiplication import compare_scores, problems, score
    from outrider.stats.intervals import num_trials_to_decide

    decoder = pair.load()
    arms = {
        "plain": decoder,
        "speculative": replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k),
    }
    sheet = problems(num_prompts, seed)
    scores: dict[str, SheetScore] = {}
    with progress_bar("problems", len(arms) * num_prompts) as advance:
        for name, arm in arms.items():
            scores[name] = score(arm, sheet, batch_size=batch_size, on_solved=advance, **options)
    paired = compare_scores(scores["plain"], scores["speculative"], margin)

    console = console_for(json_target)
    title = f"{decoder.target.name} with {draft}, K = {k}, {decoder.acceptance}"
    table = new_table(title, "arm", "solved", "rate", "95% Wald", "95% Wilson", "tau")
    for name, result in scores.items():
        table.add_row(
            name,
            f"{result.num_solved} of {num_prompts}",
            f"{result.wald.value:.1%}",
            f"{result.wald.low:.1%} to {result.wald.high:.1%}",
            f"{result.wilson.low:.1%} to {result.wilson.high:.1%}",
            f"{result.stats.mean_acceptance_length or 1:.2f}",
        )
    print_table(console, table)
    difference = paired.difference
    console.print(
        f"Speculative minus plain: {difference.value:+.1%}, 95% {difference.low:+.1%} to {difference.high:+.1%}; "
        f"solved by one arm only: {paired.only_first} plain, {paired.only_second} speculative."
    )
    needed = num_trials_to_decide((paired.only_first + paired.only_second) / num_prompts, margin)
    remedy = f"about {needed} prompts would decide" if needed > num_prompts else "more prompts may decide"
    verdict = "equivalent" if paired.is_equivalent else f"not shown to be equivalent ({remedy})"
    console.print(
        f"Within a margin of {margin:.1%} the arms are {verdict}: two one-sided tests, p = {paired.tost_p:.2g}."
    )
    body: dict[str, Any] = {
        "scores": {name: _score_json(result) for name, result in scores.items()},
        "difference": asdict(paired) | {"is_equivalent": paired.is_equivalent},
        "num_to_decide": needed,
        "problems": [
            {"a": problem.a, "b": problem.b, **{name: result.answers[i] for name, result in scores.items()}}
            for i, problem in enumerate(sheet)
        ],
    }
    settings = options_json(
        pair, options, num_draft_tokens=k, num_prompts=num_prompts, batch_size=batch_size, margin=margin
    )
    write_json(json_target, "eval-multiplication", settings, body, decoder)


def _score_json(result: SheetScore) -> dict[str, Any]:
    return {
        "num_solved": result.num_solved,
        "num_prompts": len(result.is_solved),
        "wald": result.wald.to_json(),
        "wilson": result.wilson.to_json(),
        "stats": result.stats.to_json(),
        "time_s": result.timing.to_json(),
    }
