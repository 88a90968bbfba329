"""Times rounds of the loop on this machine, for each number of drafted tokens. This module does not know what the
costs are for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from outrider.decoding.engine import decode
from outrider.decoding.schedule import ConstantSchedule, favoured_ks
from outrider.drafters.base import Drafter, Rows, altered_drafter
from outrider.options import Sampling
from outrider.records import Draft, Request, Timing
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule

_NUM_PASSES = 5  # over all K
_NUM_ROUNDS = 4  # of an arm in each pass, after one that is discarded
_PLAIN = Sampling()
_SHORT = 16  # initial tokens of a row


def measure_round_costs(target: LM, drafter: Drafter, rule: Rule) -> dict[int, float]:
    """K -> seconds of a round of one row with K drafted tokens, for the K of ``favoured_ks``."""
    ks = favoured_ks(target, drafter)
    arms = [CostArm(target, drafter, k, ks[-1]) for k in ks]
    length = min(_SHORT, target.context_len // 2)
    taken = time_rounds(arms, rule, num_rows=1, length=length, num_passes=_NUM_PASSES)
    average = average_of([target, *drafter.models])
    return {k: average([timing.decode_s for timing in timings]) for k, timings in zip(ks, taken, strict=True)}


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
        schedule = ConstantSchedule(arm.k, arm.max_k)
        prompts = torch.randint(arm.target.vocab_size, (num_rows, length), generator=generator).tolist()
        rows = [replace(sampling, seed=i, max_new_tokens=most_new) for i in range(num_rows)]
        requests = [Request(*pair) for pair in zip(prompts, rows, strict=True)]
        drafter = arm.drafter
        if not drafter.models:
            # In random tokens a look-up finds nothing, and its rounds would seem to be free.
            drafter = altered_drafter(drafter, drafter.name, _padded_draft)
        loop = decode(arm.target, drafter, requests, rule, num_draft_tokens=schedule)
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
