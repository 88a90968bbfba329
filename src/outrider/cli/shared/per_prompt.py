"""Rounds of ``outrider replay``: drawn from a log, or read from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.shared.options import ReportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outrider.measure.replay import ReplayedRecord
    from outrider.measure.rounds_file import Analysis, PromptRounds, RecordedArm


@dataclass
class DrawnRounds:
    """Rounds for ``--per-prompt``, drawn at random."""

    acceptance: str
    ks: Sequence[int]
    seed: int
    arms: dict[RecordedArm, list[PromptRounds]] = field(default_factory=dict)

    def draw(self, replayed: Iterator[ReplayedRecord], draft: str) -> Iterator[ReplayedRecord]:
        """Yield the records, and draw the rounds of each."""
        import numpy as np

        from outrider.measure.rounds_file import PromptRounds, RecordedArm
        from outrider.measure.tau import stats_of

        for one in replayed:
            for k in self.ks:
                law = one.rounds(k)
                rounds, is_truncated = law.draw(np.random.default_rng([self.seed, one.index, k]))
                stats = stats_of(rounds, int(is_truncated), len(law.num_drafted))
                arm = RecordedArm(draft, k, self.acceptance)
                self.arms.setdefault(arm, []).append(PromptRounds(one.index, one.category, stats))
            yield one

    def analyses(self) -> dict[RecordedArm, Analysis]:
        from outrider.measure.rounds_file import analyse

        return {arm: analyse(prompts) for arm, prompts in self.arms.items()}


def has_no_draft(file: Path) -> bool:
    """Whether a file has outputs without a draft, and so no rounds of its own. False if it cannot be read."""
    try:
        with file.open("rb") as stream:
            row = json.loads(stream.readline())
        return bool(row["settings"]["draft"] == "none")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def show_file(file: Path, tokens_per_prompt: int | None, k: int | None, report: ReportOptions) -> None:
    """Summarise a file of rounds: the output of ``generate``, or lines of cumulative counts.

    Args:
        tokens_per_prompt, k: see ``outrider.measure.rounds_file.read_file``.

    Raises:
        FileError: the file has no rounds.
    """
    from outrider.measure.rounds_file import analyse, read_file

    found = read_file(file, tokens_per_prompt=tokens_per_prompt, k=k)
    arms = analyses_json({arm: analyse(prompts) for arm, prompts in found.arms.items()})
    options = {"file": str(file), "tokens_per_prompt": tokens_per_prompt, "num_draft_tokens": k}
    report.finish("analyze", options, {"arms": arms, "notes": list(found.notes)})


def analyses_json(analyses: Mapping[RecordedArm, Analysis]) -> list[dict[str, Any]]:
    """Entry of a document for each arm, with its categories and prompts."""
    return [
        {
            "draft": arm.draft,
            "k": arm.k,
            "acceptance": arm.acceptance,
            **one.to_json(),
            "categories": [{"category": name, **part.to_json()} for name, part in one.by_category.items()],
            "prompts": [
                {"index": prompt.index, "category": prompt.category, "stats": prompt.stats.to_json()}
                for prompt in one.prompts
            ],
        }
        for arm, one in analyses.items()
    ]
