"""Output rows of ``generate``, and their totals (docs/reference/json.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.errors import OutriderError
from outrider.offline.prompt_row import PromptLine
from outrider.records import Completion, Stats


def row_of(
    index: int, line: PromptLine, prompt_ids: list[int], seed: int | None, done: Completion | OutriderError | None
) -> dict[str, Any]:
    """Output row. The index comes first: it identifies a half-written line.

    Args:
        seed: where there is no completion.
        done: None if it was interrupted before the first token.
    """
    fields: dict[str, Any] = {"text": "", "token_ids": [], "origins": [], "finish_reason": None}
    if isinstance(done, Completion):
        fields["text"], fields["finish_reason"] = done.text, done.finish_reason
        fields["token_ids"], fields["origins"] = list(done.token_ids), list(done.origins)
        seed = done.seed
    elif done is not None:
        fields["finish_reason"] = "error"
    fields["stats"] = stats_of(done).to_json()
    if isinstance(done, Completion) and done.logprobs is not None:
        fields["logprobs"] = [asdict(item) for item in done.logprobs]
    if isinstance(done, OutriderError):
        fields["error"] = str(done)
    return {"index": index, **line.source, "prompt_ids": prompt_ids, **fields, "seed": seed, **line.labels}


def stats_of(done: Completion | OutriderError | None) -> Stats:
    return done.stats if isinstance(done, Completion) else Stats()


@dataclass
class Totals:
    """Totals of a run, which may be interrupted at any time.

    Attributes:
        rows: None to keep none.
        num_failed: prompts that ended in an error, earlier runs included.
        seed: note on the drawn seed; empty if none was drawn, or each prompt has its own.
    """

    rows: list[dict[str, Any]] | None
    stats: Stats = field(default_factory=Stats)
    time_s: dict[str, float | None] = field(default_factory=dict)
    num_failed: int = 0
    is_interrupted: bool = False
    seed: str = ""

    def add(self, row: dict[str, Any], stats: Stats) -> None:
        self.stats += stats
        self.num_failed += row["finish_reason"] == "error"
        if self.rows is not None:
            self.rows.append(row)

    @property
    def tokens_per_s(self) -> float:
        total_s = self.time_s.get("total")
        return self.stats.num_generated_tokens / total_s if total_s else 0.0

    def summary(self, pair: str) -> str:
        """Summary line.

        Args:
            pair: description of the models and their use.
        """
        tau = self.stats.mean_acceptance_length
        speed = f", {self.tokens_per_s:.1f} tokens/s, mean acceptance length {1.0 if tau is None else tau:.2f}"
        return (
            f"{self.stats.num_generated_tokens} tokens{speed if self.stats.num_generated_tokens else ''} ({pair})"
            + (f", {self.seed}" if self.seed else "")
            + (f", {self.num_failed} failed" if self.num_failed else "")
            + (", interrupted" if self.is_interrupted else "")
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "completions": self.rows,
            "num_failed": self.num_failed,
            "tokens_per_s": self.tokens_per_s,
            "stats": self.stats.to_json(),
            "time_s": self.time_s,
            "is_interrupted": self.is_interrupted,
        }
