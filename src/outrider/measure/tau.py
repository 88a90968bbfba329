"""Acceptance by position and tau, from counts of rounds (``outrider.records.Stats``), measured or expected.

This module does not know where the rounds come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from outrider.measure.intervals import Interval, bounded_mean
from outrider.records import Stats, add_counts


@dataclass(frozen=True, slots=True)
class Position:
    """The i-th drafted token of a round.

    Attributes:
        position: i, from 1.
        num_drafted: rounds that drafted at least i tokens.
        num_judged: of these, rounds in which all tokens before it were accepted, so that it was verified.
        num_accepted: rounds in which it was accepted too.
    """

    position: int
    num_drafted: float
    num_judged: float
    num_accepted: float

    @property
    def conditional(self) -> float | None:
        """Acceptance rate given that the tokens before it are accepted."""
        return self.num_accepted / self.num_judged if self.num_judged else None

    @property
    def unconditional(self) -> float | None:
        """Acceptance rate when drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"conditional": self.conditional, "unconditional": self.unconditional}


def stats_of(rounds: Iterable[tuple[int, int]], num_truncated_rounds: int, num_generated_tokens: int) -> Stats:
    """Count rounds, each (drafted, accepted)."""
    pairs = list(rounds)
    return Stats(
        num_generated_tokens,
        acceptance_histogram=_histogram(accepted for _, accepted in pairs),
        drafted_histogram=_histogram(drafted for drafted, _ in pairs),
        full_histogram=_histogram(drafted for drafted, accepted in pairs if drafted == accepted),
        num_truncated_rounds=num_truncated_rounds,
    )


def total(stats: Iterable[Stats]) -> Stats:
    return sum(stats, Stats())


def positions_of(stats: Stats) -> list[Position]:
    """One entry for every drafted position."""
    longest = _most_drafted(stats)
    at_least = _tail_sums(add_counts(stats.acceptance_histogram, (0,) * (longest + 1)))
    drafted = _tail_sums(stats.drafted_histogram)
    full = add_counts(stats.full_histogram, (0,) * (longest + 1))
    # A round verifies token i if i-1 were accepted and an i-th was drafted.
    return [Position(i, drafted[i], at_least[i - 1] - full[i - 1], at_least[i]) for i in range(1, longest + 1)]


def tau_interval(prompts: Sequence[Stats]) -> Interval | None:
    """tau over all rounds, with an interval over the prompts, within 1 and K + 1; None without rounds."""
    rounds = [stats.num_rounds for stats in prompts]
    if not sum(rounds):
        return None
    tokens = [stats.num_rounds + stats.num_accepted_draft_tokens for stats in prompts]
    return bounded_mean(tokens, rounds, (1.0, 1.0 + max(map(_most_drafted, prompts))))


def _most_drafted(stats: Stats) -> int:
    """The most tokens that a round drafted."""
    return max((i for i, count in enumerate(stats.drafted_histogram) if count), default=0)


def _histogram(values: Iterable[int]) -> tuple[int, ...]:
    found = list(values)
    return tuple(found.count(i) for i in range(max(found, default=-1) + 1))


def _tail_sums(values: Sequence[float]) -> list[float]:
    """Sums of the values from each index on."""
    return list(accumulate(reversed(values)))[::-1]
