"""Rounds of ``outrider replay``: drawn from a log, or read from a file; and their table by prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.shared.output import console_for, print_table, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from outrider.replay.replay import ReplayedRecord
    from outrider.replay.rounds import Analysis, PromptRounds, RecordedArm


@dataclass
class DrawnRounds:
    """Rounds for ``--output`` and ``--per-prompt``, drawn at random."""

    acceptance: str
    ks: Sequence[int]
    seed: int
    arms: dict[RecordedArm, list[PromptRounds]] = field(default_factory=dict)
    committed: list[list[int]] = field(default_factory=list)

    def draw(self, replayed: Iterator[ReplayedRecord], draft: str) -> Iterator[ReplayedRecord]:
        """Yield the records, and draw the rounds of each."""
        import numpy as np

        from outrider.replay.rounds import PromptRounds, RecordedArm
        from outrider.stats.counts import stats_of

        for one in replayed:
            for k in self.ks:
                law = one.rounds(k)
                rounds, is_truncated = law.draw(np.random.default_rng([self.seed, one.index, k]))
                stats = stats_of(rounds, int(is_truncated), len(law.num_drafted))
                arm = RecordedArm(draft, k, self.acceptance)
                self.arms.setdefault(arm, []).append(PromptRounds(one.index, one.category, stats))
                self.committed.append([num_accepted + 1 for _, num_accepted in rounds])
            yield one

    def analyses(self) -> dict[RecordedArm, Analysis]:
        from outrider.replay.rounds import analyse

        return {arm: analyse(prompts) for arm, prompts in self.arms.items()}


def has_no_draft(file: Path) -> bool:
    """Whether a file has outputs without a draft, and so no rounds of its own. False if it cannot be read."""
    try:
        with file.open("rb") as stream:
            row = json.loads(stream.readline())
        return bool(row["settings"]["draft"] == "none")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def show_file(
    file: Path, tokens_per_prompt: int | None, k: int | None, plot: Path | None, json_target: str | None
) -> None:
    """Summarise a file of rounds: the output of ``generate``, or lines of cumulative counts.

    Args:
        tokens_per_prompt, k: see ``outrider.replay.rounds.read_file``.

    Raises:
        FileError: the file has no rounds.
    """
    from outrider.bench.plots import plot_rounds
    from outrider.replay.rounds import analyse, read_file

    found = read_file(file, tokens_per_prompt=tokens_per_prompt, k=k)
    analyses = {arm: analyse(prompts) for arm, prompts in found.arms.items()}
    console = console_for(json_target)
    show(console, str(file), analyses)
    for note in found.notes:
        console.print(f"Note: {note}")
    if plot is not None:
        plot_rounds({arm.label: one.stats for arm, one in analyses.items()}, plot, file.name)
        console.print(f"Plot: {plot}")
    options = {"file": str(file), "tokens_per_prompt": tokens_per_prompt, "num_draft_tokens": k}
    body: dict[str, Any] = {
        "arms": [
            {"draft": arm.draft, "k": arm.k, "acceptance": arm.acceptance, **_analysis_json(one)}
            for arm, one in analyses.items()
        ],
        "notes": list(found.notes),
    }
    write_json(json_target, "analyze", options, body)


def show(console: Console, title: str, analyses: Mapping[RecordedArm, Analysis]) -> None:
    """Print a row for each arm, and for each category of its prompts."""
    from outrider.bench.report import interval_text
    from outrider.bench.tables import NameCell, new_table

    has_categories = any(one.by_category for one in analyses.values())
    rules = list(dict.fromkeys(arm.acceptance for arm in analyses if arm.acceptance))
    columns = "draft", "K", *["rule"] * (len(rules) > 1), *["category"] * has_categories
    title = f"{title}, {rules[0]}" if len(rules) == 1 else title
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


def _analysis_json(analysis: Analysis) -> dict[str, Any]:
    prompts = [{"index": one.index, "category": one.category, "stats": one.stats.to_json()} for one in analysis.prompts]
    categories = [{"category": name, **one.to_json()} for name, one in analysis.by_category.items()]
    return analysis.to_json() | {"categories": categories, "prompts": prompts}
