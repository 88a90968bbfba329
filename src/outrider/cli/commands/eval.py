"""``outrider eval multiplication``: success rates of plain and speculative decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption, NumDraftTokensOption, SamplingOptions, SeedOption
from outrider.cli.shared.output import console_for, print_table, write_json
from outrider.cli.shared.pair_options import PairOptions, options_json, single_k
from outrider.cli.shared.progress import progress
from outrider.system.files import short_names

if TYPE_CHECKING:
    from outrider.evals.multiplication import SheetScore


@flat
def multiplication(
    pair: PairOptions,
    sampling: SamplingOptions,
    num_draft_tokens: NumDraftTokensOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Problems to solve.")] = 600,
    batch_size: Annotated[int, typer.Option(min=1, help="Problems solved concurrently.")] = 8,
    seed: SeedOption = 0,
    json_target: JsonOption = None,
) -> None:
    """Score multiplication problems. Is the first line after "a * b = " the product?"""
    k, draft = single_k(num_draft_tokens, pair, sampling, seed), pair.compared_draft
    options = sampling.to_options(seed=seed, num_seeds=num_prompts)

    decoder = pair.load()
    draft, drafter = pair.load_named(decoder, draft)
    arms = {"plain": decoder, "speculative": replace(decoder, drafter=drafter, num_draft_tokens=k)}

    from outrider.evals.multiplication import mcnemar, problems, score
    from outrider.measure.tables import new_table

    sheet = problems(num_prompts, seed)
    scores: dict[str, SheetScore] = {}
    with progress("problems", len(arms) * num_prompts) as advance:
        for name, arm in arms.items():
            scores[name] = score(arm, sheet, batch_size=batch_size, on_solved=advance, **options)
    only_plain, only_speculative, p = mcnemar(scores["plain"], scores["speculative"])

    console = console_for(json_target)
    title = f"{' with '.join(short_names([decoder.target.name, draft]))}, K = {k}, {decoder.acceptance}"
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
    console.print(
        f"Solved by one arm only: {only_plain} plain, {only_speculative} speculative; McNemar's exact test of no "
        f"difference: p = {p:.2g}."
    )
    body: dict[str, Any] = {
        "scores": {name: _score_json(result) for name, result in scores.items()},
        "difference": {"only_plain": only_plain, "only_speculative": only_speculative, "p": p},
        "problems": [
            {"a": problem.a, "b": problem.b, **{name: result.answers[i] for name, result in scores.items()}}
            for i, problem in enumerate(sheet)
        ],
    }
    more = {"draft": [draft], "num_draft_tokens": k, "num_prompts": num_prompts, "batch_size": batch_size}
    settings = options_json(pair, options, **more)
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
