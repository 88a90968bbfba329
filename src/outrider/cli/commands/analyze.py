"""``outrider analyze``: tokens per round and acceptance, from recorded rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import HtmlOption, JsonOption
from outrider.cli.shared.output import (
    check_figure_files,
    check_json_target,
    check_outputs,
    console_for,
    print_table,
    write_json,
)
from outrider.errors import OptionError
from outrider.options import MAX_NUM_DRAFT_TOKENS

if TYPE_CHECKING:
    from outrider.replay.rounds import Analysis


def analyze(
    file: Annotated[
        Path,
        typer.Argument(
            help="Rounds: the --output of replay or of generate; or lines of cumulative counts like [3, 5] "
            "(decoding-speculative-decoding), where a decrease starts a new prompt, unless --tokens-per-prompt is "
            "given."
        ),
    ],
    tokens_per_prompt: Annotated[
        int | None, typer.Option(help="For cumulative counts: tokens generated per prompt.")
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "-k", "--num-draft-tokens", help="For cumulative counts: K. Default: the most accepted in a round."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot rounds and positions: FILE.png or FILE.svg.")] = None,
    html: HtmlOption = None,
    json_target: JsonOption = None,
) -> None:
    """Summarise recorded rounds. Tokens per round by prompt and category, acceptance by drafted position."""
    for name, value in (("--tokens-per-prompt", tokens_per_prompt), ("-k/--num-draft-tokens", num_draft_tokens)):
        if value is not None and value < 1:
            raise OptionError(name, value, "a whole number >= 1")
    if num_draft_tokens is not None and num_draft_tokens > MAX_NUM_DRAFT_TOKENS:
        raise OptionError("-k/--num-draft-tokens", num_draft_tokens, f"a whole number <= {MAX_NUM_DRAFT_TOKENS}")
    check_outputs({"--html": html, "--json": json_target, "--plot": plot}, [file])
    check_json_target(json_target)

    from outrider.bench.plots import plot_rounds
    from outrider.bench.report import interval_text
    from outrider.bench.tables import NameCell, new_table
    from outrider.replay.rounds import analyse, read_file

    check_figure_files(plot, html)
    found = read_file(file, tokens_per_prompt=tokens_per_prompt, k=num_draft_tokens)
    analyses = {arm: analyse(prompts) for arm, prompts in found.arms.items()}
    console = console_for(json_target)
    has_categories = any(one.by_category for one in analyses.values())
    rules = list(dict.fromkeys(arm.acceptance for arm in analyses if arm.acceptance))
    columns = "draft", "K", *["rule"] * (len(rules) > 1), *["category"] * has_categories
    title = f"{file}, {rules[0]}" if len(rules) == 1 else str(file)
    table = new_table(title, *columns, "prompts", "rounds", "tau, 95%", "by prompt", "accepted")
    for arm, all_prompts in analyses.items():
        for category, one in [("all", all_prompts), *all_prompts.by_category.items()]:
            table.add_row(
                NameCell(arm.draft or "-"),
                str(arm.k or "-"),
                *[arm.acceptance or "-"] * (len(rules) > 1),
                *[category] * has_categories,
                str(len(one.prompts)),
                str(round(one.stats.num_rounds)),
                interval_text(one.tau),
                "-" if one.prompt_tau is None else f"{one.prompt_tau:.2f}",
                "-" if one.stats.draft_acceptance_rate is None else f"{100 * one.stats.draft_acceptance_rate:.1f}%",
            )
    print_table(console, table)
    console.print(
        "tau: tokens per round, with an interval over the prompts; by prompt: the mean of their own tau",
        style="dim",
    )
    for note in found.notes:
        console.print(f"Note: {note}")
    if plot is not None:
        plot_rounds({arm.label: one.stats for arm, one in analyses.items()}, plot, file.name)
        console.print(f"Plot: {plot}")
    options = {"file": str(file), "tokens_per_prompt": tokens_per_prompt, "num_draft_tokens": num_draft_tokens}
    body: dict[str, Any] = {
        "arms": [
            {"draft": arm.draft, "k": arm.k, "acceptance": arm.acceptance, **_analysis_json(one)}
            for arm, one in analyses.items()
        ],
        "notes": list(found.notes),
    }
    write_json(json_target, "analyze", options, body, html=html)
    files = [str(one) for one in (html, json_target) if one not in (None, "-")]
    where = " and ".join(files) or "add --html FILE or --json FILE"
    console.print(f"By position in the round, and by prompt: {where}", markup=False)


def _analysis_json(analysis: Analysis) -> dict[str, Any]:
    prompts = [{"index": one.index, "category": one.category, "stats": one.stats.to_json()} for one in analysis.prompts]
    categories = [{"category": name, **one.to_json()} for name, one in analysis.by_category.items()]
    return analysis.to_json() | {"categories": categories, "prompts": prompts}
