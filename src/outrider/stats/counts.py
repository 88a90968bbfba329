"""Counts of rounds, measured or expected, and the quantities derived from them.

Terms as in ``outrider.records.Stats``: a round truncated by the end of its sequence is left out. Counts of real rounds
are integers, expected counts are not; otherwise they are treated alike.

This module does not know where the rounds come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from outrider.records import add_counts
from outrider.stats.intervals import Interval, bounded_mean


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
        return {
            "position": self.position,
            "num_drafted": self.num_drafted,
            "num_judged": self.num_judged,
            "num_accepted": self.num_accepted,
            "conditional": self.conditional,
            "unconditional": self.unconditional,
        }


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """Counts of rounds by outcome. They add.

    Attributes:
        accepted: at index i the rounds with exactly i accepted tokens.
        drafted: at index i the rounds with exactly i drafted tokens.
        full: at index i the rounds with i drafted tokens, all accepted.
        num_truncated: rounds truncated by the end of the sequence, excluded from the other counts.
        num_generated_tokens: all tokens, truncated rounds included.
    """

    accepted: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()
    full: tuple[float, ...] = ()
    num_truncated: float = 0
    num_generated_tokens: int = 0

    def __add__(self, other: RoundCounts) -> RoundCounts:
        return RoundCounts(
            add_counts(self.accepted, other.accepted),
            add_counts(self.drafted, other.drafted),
            add_counts(self.full, other.full),
            self.num_truncated + other.num_truncated,
            self.num_generated_tokens + other.num_generated_tokens,
        )

    @classmethod
    def of(cls, rounds: Iterable[tuple[int, int]], num_truncated: int, num_generated_tokens: int) -> RoundCounts:
        """Count rounds, each (drafted, accepted)."""
        pairs = list(rounds)
        return cls(
            accepted=_histogram(accepted for _, accepted in pairs),
            drafted=_histogram(drafted for drafted, _ in pairs),
            full=_histogram(drafted for drafted, accepted in pairs if drafted == accepted),
            num_truncated=num_truncated,
            num_generated_tokens=num_generated_tokens,
        )

    @property
    def num_rounds(self) -> float:
        return sum(self.accepted)

    @property
    def num_draft_tokens(self) -> float:
        return sum(i * count for i, count in enumerate(self.drafted))

    @property
    def num_accepted_draft_tokens(self) -> float:
        return sum(i * count for i, count in enumerate(self.accepted))

    @property
    def num_committed(self) -> float:
        """Tokens committed by the rounds, including corrections and bonuses."""
        return self.num_rounds + self.num_accepted_draft_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """tau: tokens per round."""
        return 1 + self.num_accepted_draft_tokens / self.num_rounds if self.num_rounds else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def most_drafted(self) -> int:
        """The most tokens that a round drafted."""
        return max((i for i, count in enumerate(self.drafted) if count), default=0)

    @property
    def positions(self) -> list[Position]:
        """One entry for every drafted position."""
        longest = self.most_drafted
        at_least = _tail_sums(add_counts(self.accepted, (0,) * (longest + 1)))
        drafted = _tail_sums(self.drafted)
        full = add_counts(self.full, (0,) * (longest + 1))
        # A round verifies token i if i-1 were accepted and an i-th was drafted.
        return [Position(i, drafted[i], at_least[i - 1] - full[i - 1], at_least[i]) for i in range(1, longest + 1)]

    def to_json(self) -> dict[str, Any]:
        """The counts under the field names of ``Stats``."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": list(self.accepted),
            "drafted_histogram": list(self.drafted),
            "num_rounds": self.num_rounds,
            "num_truncated_rounds": self.num_truncated,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_generated_tokens": self.num_generated_tokens,
        }


def total(counts: Iterable[RoundCounts]) -> RoundCounts:
    return sum(counts, RoundCounts())


def tau_interval(prompts: Sequence[RoundCounts]) -> Interval | None:
    """tau over all rounds, with an interval over the prompts, within 1 and K + 1; None without rounds."""
    rounds = [counts.num_rounds for counts in prompts]
    if not sum(rounds):
        return None
    most = max(counts.most_drafted for counts in prompts)
    return bounded_mean([counts.num_committed for counts in prompts], rounds, (1.0, 1.0 + most))


def _histogram(values: Iterable[int]) -> tuple[int, ...]:
    found = list(values)
    return tuple(found.count(i) for i in range(max(found, default=-1) + 1))


def _tail_sums(values: Sequence[float]) -> list[float]:
    """Sums of the values from each index on."""
    return list(accumulate(reversed(values)))[::-1]
