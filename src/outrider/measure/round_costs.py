"""Times rounds of the loop on this machine, and predicts from them the best draft and K, or none.

Replay gives the number of rounds per sequence (outrider.measure.replay); rounds of the real loop, timed on random
tokens, give their duration. Together they predict tokens per second for every draft and K; no pair generates anything.
Two effects are left out: the prefill, and that the rows of a batch do not end together, which costs speculation more
than plain decoding.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from outrider.decoding.engine import decode
from outrider.decoding.schedule import ConstantSchedule, favoured_ks
from outrider.drafters.base import NO_DRAFTER, Drafter, Rows, altered_drafter
from outrider.measure.intervals import bounded_mean, paired_ratio
from outrider.options import Sampling
from outrider.records import Draft, Interval, Request, Stats, Timing, add_counts
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule

_NUM_PASSES, _NUM_PLAN_PASSES = 5, 8  # over all K; over all drafts and K
NUM_STEPS = _NUM_PLAN_PASSES + 1  # of the progress bar
_NUM_ROUNDS = 4  # of an arm in each pass, after one that is discarded
_PLAIN = Sampling()
_SHORT = 16  # initial tokens of a row


def measure_round_costs(target: LM, drafter: Drafter, rule: Rule) -> dict[int, float]:
    """K -> seconds of a round of one row with K drafted tokens, for the K of ``favoured_ks``."""
    ks = favoured_ks(target, drafter)
    arms = [CostArm(target, drafter, k, ks[-1]) for k in ks]
    length = min(_SHORT, target.context_len // 2)
    taken = time_rounds(arms, rule, num_rows=1, length=length, num_passes=_NUM_PASSES)
    average = _average_of([target, *drafter.models])
    return {k: average([timing.decode_s for timing in timings]) for k, timings in zip(ks, taken, strict=True)}


def _average_of(lms: Sequence[LM]) -> Callable[[Sequence[float]], float]:
    """The average for times of rounds: the median, which ignores a few disturbed rounds; for models with states the
    mean, since advancing them in some rounds is part of the cost."""
    return statistics.fmean if any(lm.has_states for lm in lms) else statistics.median


class CostArm(NamedTuple):
    """A pair and the K at which its rounds are timed. K = 0 is plain decoding. ``max_k``: the largest K of the run that
    is timed, if that is more than ``k``: some drafters feed as many columns."""

    target: LM
    drafter: Drafter
    k: int
    max_k: int = 0


def tokens_needed(most_k: int) -> int:
    return (1 + _NUM_ROUNDS) * (most_k + 1)


def time_rounds(
    arms: Sequence[CostArm],
    rule: Rule,
    *,
    num_rows: int,
    length: int,
    num_passes: int = 1,
    sampling: Sampling = _PLAIN,
    on_pass: Callable[[], None] = lambda: None,
) -> list[list[Timing]]:
    """Time the rounds of each arm, on random tokens, arms in turn.

    Args:
        length: initial tokens of each row.
        num_passes: over all arms; every second one in the opposite order, so that a machine that becomes slower affects
            all arms alike.
        sampling: options of the rows.
        on_pass: called after each pass and after the warm-up.

    Returns:
        The rounds of each arm. If a run has several, the first is left out: it follows the prefill, which evicts the
        CPU caches, and occurs once per sequence. The prefill is added to the second.
    """
    generator = torch.Generator().manual_seed(0)
    taken: list[list[Timing]] = [[] for _ in arms]
    most_new = tokens_needed(max(arm.k for arm in arms))

    def rounds(arm: CostArm) -> list[Timing]:
        prompts = torch.randint(arm.target.vocab_size, (num_rows, length), generator=generator).tolist()
        rows = [replace(sampling, seed=i, max_new_tokens=most_new) for i in range(num_rows)]
        requests = [Request(*pair) for pair in zip(prompts, rows, strict=True)]
        drafter = arm.drafter
        if not drafter.models:
            # In random tokens a look-up finds nothing, and its rounds would seem to be free.
            drafter = altered_drafter(drafter, drafter.name, _padded_draft)
        loop = decode(arm.target, drafter, requests, rule, num_draft_tokens=ConstantSchedule(arm.k, arm.max_k))
        first, *others = (round_.timing for round_ in islice(loop, 1 + _NUM_ROUNDS))
        if not others:  # the context is full
            return [first]
        others[0] += Timing(prefill_s=first.prefill_s, total_s=first.prefill_s)
        return others

    for arm in arms:
        rounds(arm)  # warm up
    on_pass()
    in_turn = list(zip(arms, taken, strict=True))
    for _ in range(num_passes):
        for arm, timings in in_turn:
            timings += rounds(arm)
        on_pass()
        in_turn.reverse()
    return taken


def _padded_draft(rows: Rows, k: int, draft: Draft) -> Draft:
    """A draft of as many tokens as are wanted, whatever a look-up has found."""
    if int(rows.num_wanted.amax()) == 0:
        return draft
    return Draft(ids=rows.last_ids[:, 1:].expand(-1, k), probs=None, num_drafted=rows.num_wanted)


class RoundCost(NamedTuple):
    """Median seconds of the timed rounds of a draft and K. ``round_s`` is the median of the sum, not the sum of the
    medians. (For models with states: means, see ``_average_of``.)"""

    round_s: float
    draft_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs of rounds in a batch of ``num_rows`` rows of ``context`` tokens each.

    Attributes:
        prefill_s: of the target, for all rows.
        plain: a round without drafts.
        rounds: by draft and K.
        lookup_s: time per round that a look-up drafter takes even without a match.
    """

    num_rows: int
    context: int
    prefill_s: float
    plain: RoundCost
    rounds: Mapping[tuple[str, int], RoundCost]
    lookup_s: Mapping[str, float] = field(default_factory=dict)

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
    *,
    num_rows: int,
    context: int,
    on_pass: Callable[[], None] = lambda: None,
) -> Costs:
    """Time rounds of every draft and K, and plain ones, in turn. ``ks``: of each draft. ``on_pass``: called after
    warming up and after each pass: NUM_STEPS times."""
    keys = [(name, k) for name in drafters for k in ks[name]]
    arms = [CostArm(target, NO_DRAFTER, 0), *(CostArm(target, drafters[name], k) for name, k in keys)]
    size: dict[str, int] = {"num_rows": num_rows, "length": context, "num_passes": _NUM_PLAN_PASSES}
    taken = time_rounds(arms, rule, **size, sampling=sampling, on_pass=on_pass)
    average = _average_of([target, *(lm for drafter in drafters.values() for lm in drafter.models)])
    names = "decode_s", "draft_s", "verify_s"
    averages = ((average([getattr(one, name) for one in timings]) for name in names) for timings in taken)
    plain, *rounds = (RoundCost(*each) for each in averages)
    by_key = dict(zip(keys, rounds, strict=True))
    lookups = [name for name, drafter in drafters.items() if ks[name] and not drafter.models]
    prefill_s = statistics.median(one.prefill_s for one in taken[0] if one.prefill_s > 0)
    lookup_s = {name: by_key[name, min(ks[name])].draft_s for name in lookups}
    return Costs(num_rows, context, prefill_s, plain, by_key, lookup_s)


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
        round_ms, draft_ms, verify_ms: cost of a round.
    """

    draft: str
    k: int
    tau: Interval
    speed_up: Interval
    tokens_per_s: float
    if_free: float
    if_agreeing: float
    round_ms: float
    draft_ms: float
    verify_ms: float


def choices(costs: Costs, counts: Mapping[tuple[str, int], Sequence[Stats]]) -> list[PairChoice]:
    """Predictions for all drafts and K, fastest first. ``counts``: expected rounds of each draft and K, by sequence."""
    found = []
    for (draft, k), texts in counts.items():
        tokens = [one.num_generated_tokens for one in texts]
        plain_s = [num * costs.plain.round_s for num in tokens]
        seconds = [_seconds(costs, draft, k, one, lambda cost: cost.round_s) for one in texts]
        free_s = [_seconds(costs, draft, k, one, lambda cost: cost.round_s - cost.draft_s) for one in texts]
        # With full acceptance every round commits K + 1 tokens.
        agreeing_s = [-(-num // (k + 1)) * costs.rounds[draft, k].round_s for num in tokens]
        tau = bounded_mean(tokens, [one.num_rounds + one.num_truncated_rounds for one in texts], (1.0, k + 1.0))
        speed_up, free, agreeing = (paired_ratio(plain_s, other_s) for other_s in (seconds, free_s, agreeing_s))
        per_s = costs.num_rows * sum(tokens) / sum(seconds)
        cost_ms = (1e3 * part_s for part_s in costs.rounds[draft, k])
        found.append(PairChoice(draft, k, tau, speed_up, per_s, free.value, agreeing.value, *cost_ms))
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
