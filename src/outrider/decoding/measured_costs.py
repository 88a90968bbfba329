"""Measures the cost of a round on this machine, for each number of drafted tokens. This module does not know what the
costs are for."""

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
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import AlteredDrafter, Drafter, Rows
from outrider.options import Sampling
from outrider.records import Draft, Request, Timing
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule
from outrider.system.ranks import current_ranks

_LOG = logging.getLogger(__name__)
_MOST_PASSES, _PASSES_S = 5, 1.0  # another pass over all K only while all passes took less than this
_MOST_REPEATED, _REPEATED_S = 25, 5.0  # likewise, while the result is not reliable
_LARGEST_ERROR = 0.1  # of a cost, from the spread of its times
_SILENT_S = 5.0  # between log lines
_NUM_ROUNDS = 4  # of an arm in each pass, after one that is discarded
_PLAIN = Sampling()
_SHORT = 16  # initial tokens of a row, unless given


def load_sizes(num_slots: int) -> list[int]:
    """Numbers of rows to measure: 1, 2, 4, ... and all slots."""
    return sorted({*(2**i for i in range(num_slots.bit_length())), num_slots})


def favoured_ks(target: LM, drafter: Drafter) -> tuple[int, ...]:
    """Values of K for adaptive schedules, 0 included: those that the execution or the drafter favours, and the drafter
    can draft."""
    most = drafter.most_drafted
    return tuple(k for k in sorted({*target.execution.favoured_k, *drafter.favoured_k}) if most is None or k <= most)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of rounds and their reliability, by K.

    Attributes:
        seconds: time of a round.
        verify_s: time of its verify.
        spread: interquartile range of the times, over ``seconds``.
        num_rounds: number of timed rounds.
        load: load average of the system at the time; None where it is unknown.
    """

    seconds: Mapping[int, float]
    verify_s: Mapping[int, float]
    spread: Mapping[int, float]
    num_rounds: Mapping[int, int]
    load: float | None

    @property
    def doubt(self) -> str | None:
        """Why they are not reliable; None if they are."""
        k = implausible_k(self.seconds, self.verify_s)
        if k is not None:
            return f"{self.seconds[k]:.3g} s for K = {k} contradicts the other K"
        error = {k: spread / math.sqrt(self.num_rounds[k]) for k, spread in self.spread.items()}
        worst = max(error, key=error.__getitem__)
        if error[worst] > _LARGEST_ERROR:
            return f"the times of {self.num_rounds[worst]} rounds of K = {worst} scatter by {self.spread[worst]:.0%}"
        return None


def measure_round_costs(target: LM, drafter: Drafter, rule: Rule, num_rows: int, num_tokens: int) -> MeasuredCosts:
    """Measure the costs of rounds of ``num_rows`` rows: for about a second, and longer if the result is not reliable.

    Args:
        num_tokens: final length of the longest row. The cache gets that size, so that programs compiled for measuring
            serve the run as well.
    """
    ks = favoured_ks(target, drafter)
    arms = [CostArm(target, drafter, k, ks[-1]) for k in ks]
    average = average_of([target, *drafter.models])
    load = _load_average()
    begin_s = logged_s = time.perf_counter()
    _LOG.info(
        "measuring rounds of %s with %s (%d %s, K = %s)",
        target.name,
        drafter.name,
        num_rows,
        "rows" if num_rows > 1 else "row",
        ", ".join(str(arm.k) for arm in arms),
    )

    def log_progress(arm: CostArm) -> None:
        nonlocal logged_s
        now_s = time.perf_counter()
        if now_s - logged_s > _SILENT_S:
            logged_s = now_s
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
        on_arm=log_progress,
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
    """The average for times of rounds: the median, which ignores a few disturbed rounds; for models with states the
    mean, since advancing them in some rounds is part of the cost."""
    return statistics.fmean if any(lm.has_states for lm in lms) else statistics.median


@dataclass(frozen=True, slots=True)
class CostArm:
    """A pair and the K at which its rounds are timed. K = 0 is plain decoding.

    Attributes:
        max_k: the largest K of the run that is timed, if that is more than ``k``: some drafters feed as many columns.
    """

    target: LM
    drafter: Drafter
    k: int
    max_k: int = 0


def tokens_needed(most_k: int) -> int:
    """The most tokens that the timed rounds may add to a row."""
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
    """Time the rounds of each arm, on random tokens, arms in turn.

    Args:
        length: initial tokens of each row.
        num_tokens: least final length of the longest row. The cache gets that size, so that programs compiled for
            measuring serve the run as well.
        num_passes: over all arms, at least; every second one in the opposite order, so that a machine that becomes
            slower affects all arms alike.
        is_enough: called after these and after each further pass, with the times so far, the number of passes, and
            the seconds that they took. The first rank of a job decides.
        sampling: options of the rows.
        on_pass: called after each pass and after the warm-up.
        on_arm: called after the rounds of each arm, in all passes.

    Returns:
        The rounds of each arm. If a run has several, the first is left out: it follows the prefill, which evicts the
        CPU caches, and occurs once per sequence. The prefill is added to the second.
    """
    generator = torch.Generator().manual_seed(0)
    taken: list[list[Timing]] = [[] for _ in arms]

    def rounds(arm: CostArm) -> list[Timing]:
        most_new = max(num_tokens - length, tokens_needed(max(arm.k for arm in arms)))
        schedule = ConstantSchedule(arm.k, arm.max_k)
        prompts = torch.randint(arm.target.vocab_size, (num_rows, length), generator=generator).tolist()
        rows = [replace(sampling, seed=i, max_new_tokens=most_new) for i in range(num_rows)]
        requests = [Request(*pair) for pair in zip(prompts, rows, strict=True)]
        drafter = arm.drafter
        if not drafter.models:
            # In random tokens a look-up finds nothing, and its rounds would seem to be free.
            drafter = AlteredDrafter(drafter, drafter.name, _padded_draft)
        loop = decode(arm.target, drafter, requests, rule, num_draft_tokens=schedule)
        first, *others = (round_.timing for round_ in islice(loop, 1 + _NUM_ROUNDS))
        if not others:  # the context is full
            return [first]
        others[0] += Timing(prefill_s=first.prefill_s, total_s=first.prefill_s)
        return others

    for arm in arms:
        rounds(arm)  # warm up
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


def _padded_draft(rows: Rows, k: int, draft: Draft) -> Draft:
    """A draft of as many tokens as are wanted, whatever a look-up has found."""
    if int(rows.num_wanted.amax()) == 0:
        return draft
    return Draft(ids=rows.last_ids[:, 1:].expand(-1, k), probs=None, num_drafted=rows.num_wanted)
