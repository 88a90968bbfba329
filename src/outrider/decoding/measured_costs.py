"""What a round costs on this machine, for each number of drafted tokens. This module does not know what is done with
it."""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import torch

from outrider.decoding.cost_bounds import implausible_k
from outrider.decoding.engine import decode
from outrider.drafters.base import AlteredDrafter, Drafter, Rows
from outrider.options import Sampling
from outrider.records import Draft, Request, Timing
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule
from outrider.system.ranks import current_ranks

_LOG = logging.getLogger(__name__)
_MOST_PASSES, _PASSES_S = 5, 1.0  # another pass over all K only while all passes took less than this
_MOST_REPEATED, _REPEATED_S = 25, 5.0  # the same, where the result is not to be believed
_LARGEST_ERROR = 0.1  # of a cost, from the spread of its times
_SILENT_S = 5.0  # of measuring, between lines of the log
_NUM_ROUNDS = 4  # of an arm in each pass, after one that is not counted
_PLAIN = Sampling()
_SHORT = 16  # tokens to begin with, where nothing else is asked for


def load_sizes(num_slots: int) -> list[int]:
    """1, 2, 4, ... rows and all slots."""
    return sorted({*(2**i for i in range(num_slots.bit_length())), num_slots})


def timed_ks(target: LM, drafter: Drafter) -> list[int]:
    """The K that the execution favours and the drafter can draft."""
    most = drafter.most_drafted
    return [k for k in target.execution.favoured_k if most is None or k <= most]


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of rounds, and how far they can be believed. All are by K.

    Attributes:
        seconds: of a round.
        verify_s: of its verify.
        spread: the interquartile range of the times, over ``seconds``.
        num_rounds: that were timed.
        load: the system's load average when they were; None where it is not known.
    """

    seconds: Mapping[int, float]
    verify_s: Mapping[int, float]
    spread: Mapping[int, float]
    num_rounds: Mapping[int, int]
    load: float | None

    @property
    def doubt(self) -> str | None:
        """Why they are not to be believed; None if they are."""
        k = implausible_k(self.seconds, self.verify_s)
        if k is not None:
            return f"{self.seconds[k]:.3g} s for K = {k} cannot be right beside the other K"
        error = {k: spread / math.sqrt(self.num_rounds[k]) for k, spread in self.spread.items()}
        worst = max(error, key=error.__getitem__)
        if error[worst] > _LARGEST_ERROR:
            return f"the times of {self.num_rounds[worst]} rounds of K = {worst} scatter by {self.spread[worst]:.0%}"
        return None


def measure_round_costs(target: LM, drafter: Drafter, rule: Rule, num_rows: int, num_tokens: int) -> MeasuredCosts:
    """The costs of rounds of ``num_rows`` rows, measured now: for about a second, and again for some more where the
    result is not to be believed.

    Args:
        num_tokens: of the longest row in the end. A cache of that size is taken, so that what is compiled for measuring
            serves the run as well.
    """
    arms = [CostArm(target, drafter, k) for k in timed_ks(target, drafter)]
    average = average_of([target, *drafter.models])
    load = _load_average()
    begin_s = told_s = time.perf_counter()
    _LOG.info(
        "measuring rounds of %s with %s (%d %s, K = %s)",
        target.name,
        drafter.name,
        num_rows,
        "rows" if num_rows > 1 else "row",
        ", ".join(str(arm.k) for arm in arms),
    )

    def tell(arm: CostArm) -> None:
        nonlocal told_s
        now_s = time.perf_counter()
        if now_s - told_s > _SILENT_S:
            told_s = now_s
            _LOG.info("measuring rounds: K = %d, %.0f s", arm.k, now_s - begin_s)

    def is_enough(taken: Sequence[Sequence[Timing]], num_passes: int, seconds: float) -> bool:
        if num_passes >= _MOST_PASSES or seconds > _PASSES_S:
            is_over = num_passes >= _MOST_REPEATED or seconds > _REPEATED_S
            return is_over or _measured(arms, taken, average, load).doubt is None
        return False

    taken = time_rounds(
        arms,
        rule,
        num_rows=num_rows,
        length=min(_SHORT, target.context_len // 2),
        num_tokens=num_tokens,
        is_enough=is_enough,
        on_arm=tell,
    )
    return _measured(arms, taken, average, current_ranks().shared(load))


def _measured(
    arms: Sequence[CostArm],
    taken: Sequence[Sequence[Timing]],
    average: Callable[[Sequence[float]], float],
    load: float | None,
) -> MeasuredCosts:
    by_k = {arm.k: [timing.decode_s for timing in timings] for arm, timings in zip(arms, taken, strict=True)}
    seconds = {k: average(times) for k, times in by_k.items()}
    verifies = {arm.k: [timing.verify_s for timing in timings] for arm, timings in zip(arms, taken, strict=True)}
    return MeasuredCosts(
        seconds=seconds,
        verify_s={k: average(times) for k, times in verifies.items()},
        spread={k: _interquartile_range(times) / seconds[k] for k, times in by_k.items()},
        num_rounds={k: len(times) for k, times in by_k.items()},
        load=load,
    )


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # a system that has none
        return None


def _interquartile_range(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def average_of(lms: Sequence[LM]) -> Callable[[Sequence[float]], float]:
    """How times of rounds are averaged: by the median, which is not moved by what disturbs a few of them. But with
    states some rounds advance them, which is part of the costs: by the mean."""
    return statistics.fmean if any(lm.has_states for lm in lms) else statistics.median


@dataclass(frozen=True, slots=True)
class CostArm:
    """What rounds are timed of: a drafter, and so many tokens drafted with it. K = 0 is plain decoding."""

    target: LM
    drafter: Drafter
    k: int


def tokens_needed(most_k: int) -> int:
    """How many tokens the timed rounds may add to a row."""
    return (1 + _NUM_ROUNDS) * (most_k + 1)


def time_rounds(
    arms: Sequence[CostArm],
    rule: Rule,
    *,
    num_rows: int,
    length: int,
    num_tokens: int = 0,
    num_passes: int = 1,
    is_enough: Callable[[Sequence[Sequence[Timing]], int, float], bool] = lambda *_: True,
    sampling: Sampling = _PLAIN,
    on_pass: Callable[[], None] = lambda: None,
    on_arm: Callable[[CostArm], None] = lambda _: None,
) -> list[list[Timing]]:
    """The times of rounds of each arm, on random text, arms in turn.

    Args:
        length: tokens of each row to begin with.
        num_tokens: of the longest row in the end, at least. A cache of that size is taken, so that what is compiled for
            measuring serves the run as well.
        num_passes: over all arms, at least; every second one in the opposite order, so that a machine that becomes
            slower does so for all.
        is_enough: asked after these and after each one more, with the times so far, the number of passes, and the
            seconds that they took. One process of a job decides.
        sampling: options that the rounds run under.
        on_pass: called after each pass, and after the one that warms up.
        on_arm: called after the rounds of each arm, in all passes.

    Returns:
        For each arm its rounds. If a run has several, without the first: it comes after the prefill, which has swept
        the processor's caches, and a text has one of its kind. The second holds the prefill in its place.
    """
    generator = torch.Generator().manual_seed(0)
    taken: list[list[Timing]] = [[] for _ in arms]

    def rounds(arm: CostArm) -> list[Timing]:
        most_new = max(num_tokens - length, tokens_needed(max(arm.k for arm in arms)))
        prompts = torch.randint(arm.target.vocab_size, (num_rows, length), generator=generator).tolist()
        rows = [replace(sampling, seed=i, max_new_tokens=most_new) for i in range(num_rows)]
        requests = [Request(*pair) for pair in zip(prompts, rows, strict=True)]
        drafter = arm.drafter
        if not drafter.models:
            # On random text a look-up finds nothing, and its rounds would seem to cost next to nothing.
            drafter = AlteredDrafter(drafter, drafter.name, _filled_up)
        loop = decode(arm.target, drafter, requests, rule, num_draft_tokens=arm.k)
        first, *others = (round_.timing for round_ in islice(loop, 1 + _NUM_ROUNDS))
        if not others:  # the context is full
            return [first]
        others[0] += Timing(prefill_s=first.prefill_s, total_s=first.prefill_s)
        return others

    for arm in arms:
        rounds(arm)  # whatever happens only once
        on_arm(arm)
    on_pass()
    begin = time.perf_counter()
    in_turn = list(zip(arms, taken, strict=True))
    for num_done in count(1):
        for arm, timings in in_turn:
            timings += rounds(arm)
            on_arm(arm)
        on_pass()
        in_turn.reverse()
        if num_done >= num_passes and current_ranks().shared(is_enough(taken, num_done, time.perf_counter() - begin)):
            break
    return current_ranks().shared(taken)


def _filled_up(rows: Rows, k: int, draft: Draft) -> Draft:
    """As many tokens as are wanted, whatever a look-up has found."""
    if int(rows.num_wanted.amax()) == 0:
        return draft
    return Draft(ids=rows.last_ids[:, 1:].expand(-1, k), probs=None, num_drafted=rows.num_wanted)
