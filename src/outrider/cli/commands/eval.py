"""``outrider eval multiplication``: success rates of plain and speculative decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typer import Option

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption, NumDraftTokensOption, SamplingOptions, SeedOption
from outrider.cli.shared.output import console_for, show_table, write_json
from outrider.cli.shared.pair_options import PairOptions, options_json, single_k
from outrider.cli.shared.progress import progress
from outrider.pages.reports import Table
from outrider.system.files import short_names

if TYPE_CHECKING:
    from outrider.evals.multiplication import SheetScore


@flat
def multiplication(
    pair: PairOptions,
    sampling: SamplingOptions,
    num_draft_tokens: NumDraftTokensOption = None,
    num_prompts: int = Option(600, min=1, help="Problems to solve."),
    batch_size: int = Option(8, min=1, help="Problems solved concurrently."),
    seed: SeedOption = 0,
    json_target: JsonOption = None,
) -> None:
    """Score multiplication problems. Is the first line after "a * b = " the product?"""
    k, draft = single_k(num_draft_tokens, pair, sampling, seed), pair.single_draft
    pair.check_compared()
    options = sampling.to_options(seed=seed, num_seeds=num_prompts)

    decoder = pair.load()
    draft, drafter = pair.load_named(decoder, draft)
    arms = {"plain": decoder, "speculative": replace(decoder, drafter=drafter, num_draft_tokens=k)}

    from outrider.evals.multiplication import mcnemar, problems, score

    sheet = problems(num_prompts, seed)
    scores: dict[str, SheetScore] = {}
    with progress("problems", len(arms) * num_prompts) as advance:
        for name, arm in arms.items():
            scores[name] = score(arm, sheet, batch_size=batch_size, on_solved=advance, **options)
    only_plain, only_speculative, p = mcnemar(scores["plain"], scores["speculative"])

    console, body = console_for(json_target), {name: result.to_json() for name, result in scores.items()}

    def row(name: str, one: dict[str, Any]) -> list[str]:
        ends = [f"{one[interval]['low']:.1%} to {one[interval]['high']:.1%}" for interval in ("wald", "wilson")]
        solved, tau = f"{one['num_solved']} of {num_prompts}", one["stats"]["mean_acceptance_length"] or 1
        return [name, solved, f"{one['wald']['value']:.1%}", *ends, f"{tau:.2f}"]

    rows = [row(*one) for one in body.items()]
    title = f"{' with '.join(short_names([decoder.target.name, draft]))}, K = {k}, {decoder.acceptance}"
    show_table(console, Table(title, ("arm", "solved", "rate", "95% Wald", "95% Wilson", "tau"), rows))
    only = f"{only_plain} plain, {only_speculative} speculative"
    console.print(f"Solved by one arm only: {only}; McNemar's exact test of no difference: p = {p:.2g}.")
    more = {"draft": [draft], "num_draft_tokens": k, "num_prompts": num_prompts, "batch_size": batch_size}
    settings = options_json(pair, options, **more)
    difference = {"only_plain": only_plain, "only_speculative": only_speculative, "p": p}
    answers = ({name: result.answers[i] for name, result in scores.items()} for i in range(num_prompts))
    solved = [{"a": a, "b": b} | own for (a, b), own in zip(sheet, answers, strict=True)]
    document = {"scores": body, "difference": difference, "problems": solved}
    write_json(json_target, "eval-multiplication", settings, document, decoder)
