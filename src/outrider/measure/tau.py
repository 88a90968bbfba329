"""tau, acceptance by position and the speed-up: from counts of rounds (``outrider.records.Stats``), measured or
expected, or in closed form.

In a round of K drafted tokens each is accepted with probability alpha if those before it are. With c the time of a
draft step and v that of a verify, both over the time of a plain step of the target, the speed-up follows from the
tokens that a round commits and from its duration (Leviathan et al. 2211.17192, section 3, where v is 1 and K is gamma).

This module does not know where the rounds come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from outrider.measure.intervals import bounded_mean
from outrider.records import Interval, Stats, add_counts


def stats_of(rounds: Iterable[tuple[int, int]], num_truncated_rounds: int, num_generated_tokens: int) -> Stats:
    """Count rounds, each (drafted, accepted)."""
    pairs = list(rounds)

    def histogram(values: list[int]) -> tuple[int, ...]:
        return tuple(values.count(i) for i in range(max(values, default=-1) + 1))

    accepted = histogram([num_accepted for _, num_accepted in pairs])
    drafted = histogram([num_drafted for num_drafted, _ in pairs])
    full = histogram([num_drafted for num_drafted, num_accepted in pairs if num_drafted == num_accepted])
    return Stats(num_generated_tokens, accepted, drafted, full, num_truncated_rounds)


def counts_json(prompts: Sequence[Stats]) -> dict[str, Any]:
    """Entry of a document for the rounds of some prompts: tau, with an interval over the prompts; the counts; and those
    of the i-th drafted token of a round, for each i:

    - ``num_drafted``: rounds that drafted at least i tokens.
    - ``num_judged``: of these, rounds in which all tokens before it were accepted, so that it was verified.
    - ``num_accepted``: rounds in which it was accepted too. ``conditional``: over ``num_judged``; ``unconditional``:
      over ``num_drafted``; None where that is 0.
    """
    stats, tau = sum(prompts, Stats()), tau_interval(prompts)
    longest = _most_drafted(stats)
    at_least = _tail_sums(add_counts(stats.acceptance_histogram, (0,) * (longest + 1)))
    drafted = _tail_sums(stats.drafted_histogram)
    full = add_counts(stats.full_histogram, (0,) * (longest + 1))
    positions = []
    for i in range(1, longest + 1):
        judged = at_least[i - 1] - full[i - 1]  # i-1 were accepted and an i-th was drafted
        counts = {"num_drafted": drafted[i], "num_judged": judged, "num_accepted": at_least[i]}
        conditional, unconditional = (at_least[i] / num if num else None for num in (judged, drafted[i]))
        positions.append({"position": i, **counts, "conditional": conditional, "unconditional": unconditional})
    return {"tau": tau and tau.to_json(), "stats": stats.to_json(), "positions": positions}


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


def _tail_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values)))[::-1]


class Prediction(NamedTuple):
    """The prediction for K drafted tokens per round.

    Attributes:
        tau: tokens per round.
        speed_up: speed over that of plain decoding.
        operations: arithmetic operations over those of plain decoding.
    """

    k: int
    tau: float
    speed_up: float
    operations: float


def predict(ks: Sequence[int], *, alpha: float, c: float, v: float, c_ops: float) -> list[Prediction]:
    """For each K: the speed-up tau / (K c + v), for v = 1 that of theorem 3.8, and the operations (K c_ops + K + 1) /
    tau of theorem 3.11. ``alpha``: the probability that a drafted token is accepted if those before it are, at any
    position. ``c``, ``v``: the time of a draft step and that of a verify, over that of a plain step. ``c_ops``: the
    operations of a draft step over those of a plain step."""
    tau = list(accumulate(alpha**i for i in range(max(ks) + 1)))
    return [Prediction(k, tau[k], tau[k] / (k * c + v), (k * c_ops + k + 1) / tau[k]) for k in ks]
