"""Plan: predict the best draft and K, or none, for this machine from measurements on it.

Replay gives the number of rounds per sequence (outrider.measure.replay); rounds of the real loop, timed on random
tokens, give their duration. Together they predict tokens per second for every draft and K; no pair generates anything.
Two effects are left out: the prefill, and that the rows of a batch do not end together, which costs speculation more
than plain decoding.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.measure.intervals import Interval, bounded_mean, paired_ratio
from outrider.measure.round_costs import CostArm, average_of, time_rounds
from outrider.options import Sampling
from outrider.records import Stats, Timing, add_counts
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule

_NUM_PASSES = 8  # over all drafts and K
NUM_STEPS = _NUM_PASSES + 1  # of the progress bar


@dataclass(frozen=True, slots=True)
class Setting:
    """Batch in which rounds are timed: number of rows, and of tokens in each."""

    num_rows: int
    context: int


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Median seconds of the timed rounds of a draft and K. ``round_s`` is the median of the sum, not the sum of the
    medians. (For models with states: means, see ``average_of``.)"""

    round_s: float
    draft_s: float
    verify_s: float

    @classmethod
    def of(cls, timings: Sequence[Timing], average: Callable[[Sequence[float]], float]) -> RoundCost:
        return cls(
            average([one.decode_s for one in timings]),
            average([one.draft_s for one in timings]),
            average([one.verify_s for one in timings]),
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs of rounds in one setting.

    Attributes:
        prefill_s: of the target, for all rows.
        plain: a round without drafts.
        rounds: by draft and K.
        lookup_s: time per round that a look-up drafter takes even without a match.
    """

    setting: Setting
    prefill_s: float
    plain: RoundCost
    rounds: Mapping[tuple[str, int], RoundCost]
    lookup_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def drafts(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.rounds))

    def draft_step_s(self, draft: str) -> float:
        """t_draft(1): seconds of one draft step, from the round with the largest K."""
        k = max(k for name, k in self.rounds if name == draft)
        return self.rounds[draft, k].draft_s / k

    def target_s(self) -> dict[int, float]:
        """t_target(T): T -> seconds of a target step on T tokens per row, with verification. T = 1 is plain."""
        by_width: dict[int, list[float]] = {1: [self.plain.verify_s]}
        for (_, k), cost in self.rounds.items():
            by_width.setdefault(k + 1, []).append(cost.verify_s)
        return {width: statistics.median(seconds) for width, seconds in sorted(by_width.items())}


def measure_costs(
    target: LM,
    drafters: Mapping[str, Drafter],
    ks: Mapping[str, Sequence[int]],
    rule: Rule,
    sampling: Sampling,
    setting: Setting,
    on_pass: Callable[[], None] = lambda: None,
    num_passes: int = _NUM_PASSES,
) -> Costs:
    """Time rounds of every draft and K, and plain ones, in turn.

    Args:
        ks: of each draft.
        on_pass: called after warming up and after each pass: NUM_STEPS times, unless ``num_passes`` says otherwise.
    """
    keys = [(name, k) for name in drafters for k in ks[name]]
    arms = [CostArm(target, NO_DRAFTER, 0), *(CostArm(target, drafters[name], k) for name, k in keys)]
    plain, *rounds = time_rounds(
        arms,
        rule,
        num_rows=setting.num_rows,
        length=setting.context,
        num_passes=num_passes,
        sampling=sampling,
        on_pass=on_pass,
    )
    average = average_of([target, *(lm for drafter in drafters.values() for lm in drafter.models)])
    by_key = {key: RoundCost.of(timings, average) for key, timings in zip(keys, rounds, strict=True)}
    lookups = [name for name, drafter in drafters.items() if ks[name] and not drafter.models]
    return Costs(
        setting=setting,
        prefill_s=statistics.median(one.prefill_s for one in plain if one.prefill_s > 0),
        plain=RoundCost.of(plain, average),
        rounds=by_key,
        lookup_s={name: by_key[name, min(ks[name])].draft_s for name in lookups},
    )


@dataclass(frozen=True, slots=True)
class PairChoice:
    """Prediction for a draft and a K.

    Attributes:
        tau: tokens per round, including rounds truncated by the end of a sequence; with an interval over sequences.
        speed_up: over plain decoding, paired by sequence like measured arms; the interval is over sequences, and does
            not cover the costs.
        tokens_per_s: of all rows together.
        if_free: speed-up if the draft took no time.
        if_agreeing: speed-up if every drafted token were accepted.
    """

    draft: str
    k: int
    tau: Interval
    speed_up: Interval
    tokens_per_s: float
    if_free: float
    if_agreeing: float
    cost: RoundCost


def choices(costs: Costs, counts: Mapping[tuple[str, int], Sequence[Stats]]) -> list[PairChoice]:
    """Predictions for all drafts and K, fastest first.

    Args:
        counts: expected rounds of each draft and K, by sequence.
    """
    found = []
    for (draft, k), texts in counts.items():
        tokens = [one.num_generated_tokens for one in texts]
        plain_s = [num * costs.plain.round_s for num in tokens]
        seconds = [_seconds(costs, draft, k, one, lambda cost: cost.round_s) for one in texts]
        free_s = [_seconds(costs, draft, k, one, lambda cost: cost.round_s - cost.draft_s) for one in texts]
        # With full acceptance every round commits K + 1 tokens.
        agreeing_s = [-(-num // (k + 1)) * costs.rounds[draft, k].round_s for num in tokens]
        found.append(
            PairChoice(
                draft=draft,
                k=k,
                tau=bounded_mean(tokens, [one.num_rounds + one.num_truncated_rounds for one in texts], (1.0, k + 1.0)),
                speed_up=paired_ratio(plain_s, seconds),
                tokens_per_s=costs.setting.num_rows * sum(tokens) / sum(seconds),
                if_free=paired_ratio(plain_s, free_s).value,
                if_agreeing=paired_ratio(plain_s, agreeing_s).value,
                cost=costs.rounds[draft, k],
            )
        )
    return sorted(found, key=lambda one: (-one.speed_up.value, one.k))


def _seconds(costs: Costs, draft: str, k: int, stats: Stats, part: Callable[[RoundCost], float]) -> float:
    """Total time of rounds. Those near the end of a sequence draft fewer tokens; the times of other K are interpolated.
    Truncated rounds had drafted in full."""
    lookup_s, plain = costs.lookup_s.get(draft, 0.0), costs.plain
    nothing = RoundCost(plain.round_s + lookup_s, lookup_s, plain.verify_s)
    timed = {0: nothing} | {other: cost for (name, other), cost in costs.rounds.items() if name == draft}
    ks = sorted(timed)
    by_drafted = np.interp(range(k + 1), ks, [part(timed[other]) for other in ks])
    drafted = add_counts(stats.drafted_histogram, [0.0] * (k + 1))
    return float(np.dot(by_drafted, drafted) + by_drafted[k] * stats.num_truncated_rounds)
