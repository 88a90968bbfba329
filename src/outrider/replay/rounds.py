"""Rounds read from files, and their analysis: tokens committed per round, acceptance by position, by prompt.

Reads three formats: ``outrider replay --output``; ``outrider generate --output``, whose rounds follow from the origins
of the tokens; and that of the decoding-speculative-decoding project (see outrider.replay.other_formats). This module
knows no models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.errors import FileError
from outrider.options import MAX_NUM_DRAFT_TOKENS
from outrider.records import Stats
from outrider.replay.other_formats import read_rounds
from outrider.stats.counts import Position, positions_of, stats_of, tau_interval, total
from outrider.stats.intervals import Interval, wilson
from outrider.system.files import read_text


@dataclass(frozen=True, slots=True)
class RecordedArm:
    """Draft, K and acceptance rule, where the file states them."""

    draft: str | None = None
    k: int | str | None = None
    acceptance: str | None = None

    @property
    def label(self) -> str:
        known = [str(self.draft) if self.draft else "", f"K = {self.k}" if self.k else "", self.acceptance or ""]
        return ", ".join(part for part in known if part) or "all"


@dataclass(frozen=True, slots=True)
class PromptRounds:
    """Rounds of one prompt."""

    index: int
    category: str | None
    stats: Stats


@dataclass(frozen=True, slots=True)
class RoundsFile:
    """Rounds of one or more arms.

    Attributes:
        notes: assumptions, for human readers.
    """

    arms: Mapping[RecordedArm, tuple[PromptRounds, ...]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rate:
    """Acceptance rate of a position, conditional and unconditional, with Wilson intervals, which treat the rounds as
    independent."""

    position: Position
    conditional: Interval | None
    unconditional: Interval | None

    @classmethod
    def of(cls, position: Position) -> Rate:
        def interval(trials: float) -> Interval | None:
            return wilson(round(position.num_accepted), round(trials)) if trials else None

        return cls(position, interval(position.num_judged), interval(position.num_drafted))

    def to_json(self) -> dict[str, Any]:
        return self.position.to_json() | {
            "conditional": self.conditional and self.conditional.to_json(),
            "unconditional": self.unconditional and self.unconditional.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Analysis:
    """Analysis of rounds.

    Attributes:
        tau: over all rounds, with an interval over the prompts; None without rounds.
        prompt_tau: mean over the prompts' own tau.
        by_category: analysis of each category, if prompts have one.
    """

    prompts: tuple[PromptRounds, ...]
    tau: Interval | None
    prompt_tau: float | None
    by_category: Mapping[str, Analysis]

    @property
    def stats(self) -> Stats:
        return total(one.stats for one in self.prompts)

    @property
    def rates(self) -> list[Rate]:
        return [Rate.of(position) for position in positions_of(self.stats)]

    def to_json(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self.prompts),
            "tau": self.tau and self.tau.to_json(),
            "prompt_tau": self.prompt_tau,
            "stats": self.stats.to_json(),
            "positions": [rate.to_json() for rate in self.rates],
        }


def analyse(prompts: Sequence[PromptRounds]) -> Analysis:
    categories = sorted({one.category for one in prompts if one.category is not None})
    taus = [tau for one in prompts if (tau := one.stats.mean_acceptance_length) is not None]
    return Analysis(
        prompts=tuple(prompts),
        tau=tau_interval([one.stats for one in prompts]),
        prompt_tau=sum(taus) / len(taus) if taus else None,
        by_category={name: analyse(_without_category(prompts, name)) for name in categories},
    )


def _without_category(prompts: Sequence[PromptRounds], name: str) -> list[PromptRounds]:
    return [PromptRounds(one.index, None, one.stats) for one in prompts if one.category == name]


def round_row(
    arm: RecordedArm,
    index: int,
    category: str | None,
    rounds: Sequence[tuple[int, int]],
    is_truncated: bool,
    num_tokens: int,
) -> dict[str, Any]:
    """Line of ``outrider replay --output``.

    Args:
        rounds: (drafted, accepted) of each whole round.
    """
    return {
        "index": index,
        "category": category,
        "draft": arm.draft,
        "k": arm.k,
        "acceptance": arm.acceptance,
        "num_drafted": [drafted for drafted, _ in rounds],
        "num_accepted": [accepted for _, accepted in rounds],
        "num_truncated_rounds": int(is_truncated),
        "num_generated_tokens": num_tokens,
    }


def read_file(path: Path, *, tokens_per_prompt: int | None = None, k: int | None = None) -> RoundsFile:
    """Read rounds from a file in any of the three formats, detected by its first character and keys.

    Args:
        tokens_per_prompt, k: for cumulative counts, which contain neither the ends of prompts nor the numbers of
            drafted tokens.

    Raises:
        FileError: with the line number.
    """
    # Not splitlines(), which also splits at characters that may occur inside JSON strings.
    lines = [(n, line) for n, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]
    if not lines:
        raise FileError(f"{path} has no rounds in it")
    if lines[0][1].lstrip().startswith("["):
        return _from_counts(path, tokens_per_prompt, k)
    arms: dict[RecordedArm, list[PromptRounds]] = {}
    seen: dict[tuple[RecordedArm, int], int] = {}
    for number, line in lines:
        try:
            row = json.loads(line)
            arm, prompt = _from_origins(row) if "origins" in row else read_row(row)
            _check(arm, prompt)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise FileError(
                f"{path}, line {number}: neither a line of replay --output nor of generate --output"
            ) from None
        first = seen.setdefault((arm, prompt.index), number)
        if first != number:
            raise FileError(
                f"{path}, line {number}: prompt {prompt.index} already occurs on line {first} ({arm.label}): "
                "give each run by itself"
            )
        arms.setdefault(arm, []).append(prompt)
    return RoundsFile({arm: tuple(prompts) for arm, prompts in arms.items()})


def _check(arm: RecordedArm, prompt: PromptRounds) -> None:
    """Check that the counts are consistent: well-formed JSON may still come from elsewhere.

    Raises:
        ValueError: they are not.
    """

    def is_count(value: object, most: int = 2**63 - 1) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most

    for text in (arm.draft, arm.acceptance, prompt.category):
        if text is not None:
            str.encode(text)  # a lone surrogate could not be printed
    stats = prompt.stats
    accepted, drafted = stats.acceptance_histogram, stats.drafted_histogram
    numbers = [*accepted, *drafted, prompt.index, stats.num_truncated_rounds, stats.num_generated_tokens]
    is_valid = (
        (arm.k is None or arm.k == "auto" or is_count(arm.k, MAX_NUM_DRAFT_TOKENS))
        and all(map(is_count, numbers))
        and max(len(accepted), len(drafted)) <= MAX_NUM_DRAFT_TOKENS + 1
        and sum(drafted) == stats.num_rounds
        # No more rounds accept i tokens than draft i or more, and no more are fully accepted than draft i.
        and all(position.num_drafted >= position.num_accepted for position in positions_of(stats))
        and len(accepted) <= len(drafted)
        and all(full <= all_ for full, all_ in zip(stats.full_histogram, drafted, strict=False))
    )
    if not is_valid:
        raise ValueError


def read_row(row: Mapping[str, Any]) -> tuple[RecordedArm, PromptRounds]:
    """Read what ``round_row`` has made.

    Raises:
        ValueError, KeyError, TypeError: the row is something else.
    """
    pairs = list(zip(row["num_drafted"], row["num_accepted"], strict=True))
    if any(not 0 <= accepted <= drafted <= MAX_NUM_DRAFT_TOKENS for drafted, accepted in pairs):
        raise ValueError
    stats = stats_of(pairs, row["num_truncated_rounds"], row["num_generated_tokens"])
    return RecordedArm(row["draft"], row["k"], row["acceptance"]), PromptRounds(row["index"], row["category"], stats)


def _from_origins(row: dict[str, Any]) -> tuple[RecordedArm, PromptRounds]:
    """Reconstruct rounds from the origins of tokens: each ends with its correction or bonus. Accepted tokens at the end
    without either belong to a truncated round. Tokens drafted after a rejection are in the file's counts only."""
    settings, counts = row["settings"], row["stats"]
    rounds, num_accepted = [], 0
    for origin in row["origins"]:
        if origin == "accepted":
            num_accepted += 1
        elif origin in ("correction", "bonus"):
            rounds.append((num_accepted, origin == "bonus"))
            num_accepted = 0
        else:
            raise ValueError
    stats = stats_of([(n, n) for n, _ in rounds], int(num_accepted > 0), len(row["origins"]))
    if list(stats.acceptance_histogram) != counts["acceptance_histogram"]:
        raise ValueError
    full = stats_of([(n, n) for n, is_full in rounds if is_full], 0, 0).full_histogram
    stats = replace(stats, drafted_histogram=tuple(counts["drafted_histogram"]), full_histogram=full)
    arm = RecordedArm(settings["draft"], settings["num_draft_tokens"], settings["acceptance"])
    return arm, PromptRounds(row["index"], row.get("category"), stats)


def _from_counts(path: Path, tokens_per_prompt: int | None, k: int | None) -> RoundsFile:
    found = read_rounds(path, tokens_per_prompt)
    most = max((max(rounds) - 1 for rounds in found.prompts if rounds), default=0)
    if k is not None and most > k:
        raise FileError(f"{path}: a round accepted {most} drafted tokens, which is impossible with K = {k}")
    num_drafted = most if k is None else k
    notes = []
    if found.is_guessed:
        notes.append(
            "the ends of prompts are guessed from decreases; if all have the same number of tokens, set "
            "--tokens-per-prompt"
        )
    if k is None:
        notes.append(
            f"the number of drafted tokens per round, {num_drafted}, is guessed from the most accepted; set -k"
        )
    prompts = tuple(
        PromptRounds(index, None, stats_of([(num_drafted, n - 1) for n in rounds], 0, sum(rounds)))
        for index, rounds in enumerate(found.prompts)
    )
    return RoundsFile({RecordedArm(k=k): prompts}, tuple(notes))
