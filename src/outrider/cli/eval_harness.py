"""``outrider eval harness``: tasks of EleutherAI's lm-evaluation-harness, plain and speculative."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import (
    BatchSizeOption,
    JsonOption,
    NumDraftTokensOption,
    PairOptions,
    SeedOption,
    TaskSamplingOptions,
    check_batch_size,
    flat,
    single_k,
)
from outrider.cli.output import check_json_target, console_for, options_json, progress_bar, write_json
from outrider.errors import MissingExtra, OptionError
from outrider.flow import Sampling, Stats

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.api import Decoder
    from outrider.evals.tasks import Score


@flat
def harness(
    tasks: Annotated[str, typer.Option(help="Names, with commas between them: gsm8k,hellaswag.")],
    pair: PairOptions,
    sampling: TaskSamplingOptions,
    num_draft_tokens: NumDraftTokensOption = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Documents of each task. Default: all.")] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(help="Solved examples in each prompt (a task that says 0 keeps it). Default: the task's."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompts into the model's chat template.")] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("-n", "--max-new-tokens", help="Most tokens to generate.", rich_help_panel="Sampling"),
    ] = None,
    batch_size: BatchSizeOption = 8,
    margin: Annotated[
        float, typer.Option(help="Means closer than this are equivalent, in the unit of the metric.")
    ] = 0.05,
    seed: SeedOption = 0,
    json_target: JsonOption = None,
) -> None:
    """Tasks of the lm-evaluation-harness, by plain and speculative decoding, on the same documents.

    Text is sampled as the task says, but for the sampling options given here. Tasks that score the likelihood of given
    text are run once: a draft has no part in them.
    """
    k, draft = single_k(num_draft_tokens, pair, sampling, seed), pair.compared_draft
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise OptionError("--tasks", tasks, "name one or more, with commas between them")
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

    from outrider.evals.harness import OutriderLM
    from outrider.evals.tasks import (
        compare,
        documents_json,
        is_generated,
        load_tasks,
        most_new_tokens,
        run_tasks,
        set_fewshot,
    )

    loaded = load_tasks(names, include_path)
    set_fewshot(loaded, num_fewshot)
    generated = {name: task for name, task in loaded.items() if is_generated(task)}
    decoder = pair.load(most_new_tokens(loaded, limit, overrides))  # by each of two arms, but most answers are shorter

    def run(arm: str, by: Decoder, tasks: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Stats]]:
        """What the harness says of tasks, and the counts of each that is generated."""
        counts: dict[str, Stats] = {}

        def count(task: str, more: Stats) -> None:
            counts[task] = counts.get(task, Stats()) + more

        def bar(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
            return progress_bar(f"{arm}: {what}", total)

        lm = OutriderLM(by, batch_size=batch_size, seed=seed, overrides=overrides, progress=bar, on_generated=count)
        return run_tasks(lm, tasks, limit=limit, is_chat=chat), counts

    plain, plain_stats = run("plain", decoder, loaded)
    speculative: dict[str, Any] | None = None
    speculative_stats: dict[str, Stats] = {}
    if generated:
        drafted = replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k)
        speculative, speculative_stats = run("speculative", drafted, generated)
    scores = compare(plain, speculative, margin)

    console = console_for(json_target)
    with_draft = f" with {draft}, K = {k}, {decoder.acceptance}" if generated else ""
    console.print(_table(scores, f"{decoder.target.name}{with_draft}", speculative_stats))
    for line in _notes(scores, margin):
        console.print(line)
    body: dict[str, Any] = {
        "scores": [score.to_json() for score in scores],
        "tasks": [
            {
                "task": name,
                "output_type": task.OUTPUT_TYPE,
                "num_fewshot": task.get_config("num_fewshot"),
                "plain": plain_stats[name].to_json() if name in plain_stats else None,
                "speculative": speculative_stats[name].to_json() if name in speculative_stats else None,
            }
            for name, task in loaded.items()
        ],
        "documents": documents_json(plain, speculative),
    }
    settings = options_json(
        pair,
        {field: overrides.get(field) for field in vars(sampling)} | {"max_new_tokens": max_new_tokens, "seed": seed},
        num_draft_tokens=k,
        tasks=names,
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        chat=chat,
        batch_size=batch_size,
        margin=margin,
    )
    write_json(json_target, "eval-harness", settings, body, decoder.target)


def _table(scores: list[Score], title: str, stats: dict[str, Stats]) -> Table:
    from outrider.bench.report import interval_text, new_table

    table = new_table(title, "task: metric, filter", "n", "plain", "spec.", "difference, 95%", "p", "tau")
    for score in scores:
        paired = score.paired
        tau = stats[score.task].mean_acceptance_length if score.task in stats else None
        table.add_row(
            f"{score.task}: {score.metric}" + (f", {score.filter}" if score.filter != "none" else ""),
            str(score.num_documents),
            _number(score.plain),
            _number(score.speculative),
            interval_text(paired.difference, 3) if paired else "-",
            f"{paired.tost_p:.2g}" if paired else "-",
            f"{tau:.2f}" if tau else "-",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _notes(scores: list[Score], margin: float) -> list[str]:
    """What the table does not say by itself."""
    notes = []
    verdicts = [score.paired.is_equivalent for score in scores if score.paired is not None]
    if verdicts:
        notes.append(
            f"p: two one-sided tests against a difference of {margin:g} or more. Below 0.05 the arms are equivalent "
            f"within that margin: {sum(verdicts)} of {len(verdicts)} (more documents may decide the others)."
        )
    once = dict.fromkeys(score.task for score in scores if score.speculative is None)
    if once:
        notes.append(
            f"Scored once: {', '.join(once)}. The likelihood of given text is the target's own: "
            "a draft has no part in it."
        )
    unpaired = [
        f"{score.task} {score.metric}" for score in scores if score.speculative is not None and not score.paired
    ]
    if unpaired:
        notes.append(f"No number for each document, so no test: {', '.join(unpaired)}.")
    return notes
