"""``outrider eval harness``: tasks of EleutherAI's lm-evaluation-harness, by two arms on the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import (
    MODELS_PANEL,
    BatchSizeOption,
    JsonOption,
    NumDraftTokensOption,
    SeedOption,
    TaskSamplingOptions,
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
from outrider.errors import MissingExtra, OptionError
from outrider.options import Sampling

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.evals.scores import ArmResult, MetricScore, ScoreVerdict, TaskResult


@flat
def harness(
    tasks: Annotated[str, typer.Option(help="Comma-separated tasks: gsm8k,hellaswag.")],
    pair: PairOptions,
    sampling: TaskSamplingOptions,
    template: TemplateOptions,
    num_draft_tokens: NumDraftTokensOption = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with your own task files.")] = None,
    limit: Annotated[int | None, typer.Option(help="Documents per task. Default: all.")] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(help="Few-shot examples per prompt (a task with 0 keeps 0). Default: the task's."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("-n", "--max-new-tokens", help="Maximum tokens to generate.", rich_help_panel="Sampling"),
    ] = None,
    batch_size: BatchSizeOption = 8,
    margin: Annotated[float, typer.Option(help="Equivalence margin of the means, in the metric's unit.")] = 0.05,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare the target with another model instead of a draft: the original, or another quantization. The "
            "draft's options set its placement.",
            rich_help_panel=MODELS_PANEL,
        ),
    ] = None,
    seed: SeedOption = 0,
    json_target: JsonOption = None,
) -> None:
    """Run tasks of lm-evaluation-harness. With plain and speculative decoding, or two models, on the same documents.

    Sampling follows the task, except for options given here. Tasks that score the likelihood of given text run once,
    without a draft.
    """
    k = single_k(num_draft_tokens, pair, sampling, seed)
    if against is not None and pair.draft is not None:
        raise OptionError("--against", against, "the second arm is either a draft or another model: leave one out")
    draft = None if against else pair.compared_draft
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise OptionError("--tasks", tasks, "name one or more, separated by commas")
    if limit is not None and limit < 1:
        raise OptionError("--limit", limit, "a whole number >= 1")
    if num_fewshot is not None and num_fewshot < 0:
        raise OptionError("--num-fewshot", num_fewshot, "a whole number >= 0")
    if not margin > 0:
        raise OptionError("--margin", margin, "a number above 0")
    check_batch_size(batch_size)
    Sampling(seed=seed)
    overrides = sampling.to_options(max_new_tokens=max_new_tokens)
    check_json_target(json_target)
    if find_spec("lm_eval") is None:
        raise MissingExtra("lm-eval", "eval")

    from outrider.evals.scores import compare, documents_json, verdict
    from outrider.evals.tasks import is_generated, load_tasks, most_new_tokens, run_in_turn, set_fewshot

    loaded, groups = load_tasks(names, include_path)
    set_fewshot(loaded, num_fewshot)
    decoder = pair.load(most_new_tokens(loaded, limit, overrides))  # per arm; most outputs are shorter
    other = None
    if against is not None:
        other = pair.against(against).load()
    elif draft is not None and any(map(is_generated, loaded.values())):
        other = replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k)
    console = console_for(json_target)
    results: list[TaskResult] = []
    is_interrupted = False
    try:
        for result in run_in_turn(
            loaded.values(),
            decoder,
            other,
            batch_size=batch_size,
            seed=seed,
            overrides=overrides,
            limit=limit,
            chat=template.options if template.is_chat else None,
            progress=progress_bar,
        ):
            results.append(result)
    except KeyboardInterrupt:
        is_interrupted = True
        console.print(f"Interrupted: {len(results)} of {len(loaded)} tasks are complete.")
        if not results:
            raise typer.Exit(130) from None
    scores = compare(results, groups, margin)
    overall = verdict(scores)

    title = decoder.target.name
    if other is not None:
        title += f" against {against}" if against else f" with {draft}, K = {k}, {decoder.acceptance}"
    print_table(console, _table(scores, title, results))
    for line in _notes(scores, margin):
        console.print(line)
    if overall is not None:
        console.print(_verdict_text(overall, margin), style="bold")
    body: dict[str, Any] = {
        "scores": [score.to_json() for score in scores],
        "verdict": overall.to_json() if overall else None,
        "tasks": [
            {
                "task": result.name,
                "output_type": loaded[result.name].OUTPUT_TYPE,
                "num_fewshot": loaded[result.name].get_config("num_fewshot"),
                "plain": _stats_json(result.plain),
                result.arm: _stats_json(result.other),
            }
            for result in results
        ],
        "groups": [
            {"group": group.name, "tasks": [task.task_name for task in group.get_all_tasks()]} for group in groups
        ],
        "documents": documents_json(results),
        "is_interrupted": is_interrupted,
    }
    settings = options_json(
        pair,
        {field: overrides.get(field) for field in vars(sampling)} | {"max_new_tokens": max_new_tokens, "seed": seed},
        num_draft_tokens=k,
        tasks=names,
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        margin=margin,
        against=against,
        **template.to_json(),
    )
    write_json(json_target, "eval-harness", settings, body, decoder.target)
    if is_interrupted:
        raise typer.Exit(130)


def _stats_json(arm: ArmResult | None) -> dict[str, Any] | None:
    return None if arm is None or arm.stats is None else arm.stats.to_json()


def _table(scores: Sequence[MetricScore], title: str, results: Sequence[TaskResult]) -> Table:
    from outrider.bench.report import interval_text
    from outrider.bench.tables import new_table

    taus = {
        result.name: result.other.stats.mean_acceptance_length
        for result in results
        if result.arm == "speculative" and result.other and result.other.stats
    }
    second = "against" if any(result.arm == "against" for result in results) else "spec."
    columns = ("n", "plain", second, "difference, 95%", "p equal", "p diff.", "tau")
    table = new_table(title, "task: metric, filter", *columns)
    for score in scores:
        paired = score.paired
        tau = taus.get(score.task)
        table.add_row(
            score.label,
            str(score.num_documents),
            _number(score.plain),
            _number(score.other),
            interval_text(paired.difference, 3) if paired else "-",
            f"{paired.tost_p:.2g}" if paired else "-",
            f"{paired.difference_p:.2g}" if paired else "-",
            f"{tau:.2f}" if tau else "-",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _notes(scores: Sequence[MetricScore], margin: float) -> list[str]:
    """Notes on the table."""
    notes = []
    if any(score.paired for score in scores):
        notes.append(
            f"p equal: two one-sided tests against a difference of {margin:g} or more; below 0.05 the row by itself is "
            "equivalent within the margin. p diff.: test against no difference."
        )
    once = dict.fromkeys(score.task for score in scores if score.other is None)
    if once:
        notes.append(f"Scored once: {', '.join(once)}. The likelihood of given text needs no draft.")
    unpaired = [score.label for score in scores if score.other is not None and not score.paired]
    if unpaired:
        notes.append(f"Not a mean over documents, so not tested: {'; '.join(unpaired)}.")
    return notes


def _verdict_text(overall: ScoreVerdict, margin: float) -> str:
    """Verdict on equivalence and difference, over all rows."""
    counts = f"{overall.num_equivalent} of {overall.num_compared}"
    if overall.is_equivalent:
        equivalent = f"all equivalent within {margin:g} ({counts})"
    else:
        equivalent = f"not all shown to be equivalent within {margin:g} ({counts} are, each by itself)"
    num_different = len(overall.differing)
    different = "none shown to differ"
    if num_different:
        verb = "differs" if num_different == 1 else "differ"
        different = f"{num_different} of {overall.num_compared} {verb}: {'; '.join(overall.differing)}"
    return f"Verdict, 5% error per claim: {equivalent}; {different}."
