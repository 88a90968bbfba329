"""What a round costs on this machine, for each number of drafted tokens.

``round_costs`` measures once a month, and keeps what it finds on disk, so that an adaptive K rests on the same numbers
in the next run. This module does not know what is done with them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from outrider.decoding.engine import decode
from outrider.drafters.base import Altered, Drafter, Rows
from outrider.options import Sampling
from outrider.records import Draft, Request, Timing
from outrider.runtime.lm import LM
from outrider.runtime.stored import stored_tensors
from outrider.sampling.rules import Rule
from outrider.system.files import cache_folder, keep_in_cache
from outrider.system.provenance import processor_name
from outrider.system.ranks import here

_LOG = logging.getLogger(__name__)
_MOST_PASSES, _PASSES_S = 5, 1.0  # another pass over all K only while all passes took less than this
_NUM_ROUNDS = 4  # of an arm in each pass, after one that is not counted
_METHOD = 5  # to be changed with what is timed, or how: costs that were kept are of another number then
_KEPT_S = 30 * 24 * 3600.0  # drivers, power settings and neighbours change without a new name
_PLAIN = Sampling()
_SHORT = 16  # tokens to begin with, where nothing else is asked for


def round_costs(target: LM, drafter: Drafter, rule: Rule, num_rows: int, num_tokens: int) -> dict[int, float]:
    """K -> seconds of a round of ``num_rows`` rows with K drafted tokens, for the K that the execution favours. Where
    rounds do not wait for their programs, and compiled ones were not measured before, these are the costs of eager
    ones.

    Args:
        num_tokens: of the longest row in the end. A cache of that size is taken, so that what is compiled for measuring
            serves the run as well.
    """
    path = _path(target, drafter, rule, num_rows)
    choices = _choices(target, drafter)
    kept = here().of_first(lambda: _read(path, choices))
    if kept is not None:
        return kept
    if not target.execution.waits:  # eager rounds do for the time being
        costs = round_costs(target.eager(), drafter.with_models(LM.eager), rule, num_rows, num_tokens)
        return {k: costs[k] for k in choices}
    _LOG.info("measuring the cost of a round of %s with %s", target.name, drafter.name)
    costs = measure_round_costs(target, drafter, rule, num_rows, num_tokens)
    keep_in_cache(path, json.dumps(costs).encode())
    return costs


def _read(path: Path, choices: Sequence[int]) -> dict[int, float] | None:
    """The costs that are kept, if they are fresh and whole."""
    try:
        kept = {int(k): float(seconds) for k, seconds in json.loads(path.read_text(encoding="utf-8")).items()}
        is_fresh = time.time() - path.stat().st_mtime < _KEPT_S
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # not there, or not what was written
    is_whole = set(kept) == set(choices) and all(0 < seconds < math.inf for seconds in kept.values())
    return kept if is_fresh and is_whole else None


def costs_by_load(
    target: LM, drafter: Drafter, rule: Rule, num_slots: int, num_tokens: int
) -> dict[int, dict[int, float]]:
    """Number of rows -> K -> seconds of a round, for the loads of ``load_sizes``."""
    return {size: round_costs(target, drafter, rule, size, num_tokens) for size in load_sizes(num_slots)}


def load_sizes(num_slots: int) -> list[int]:
    """1, 2, 4, ... rows and all slots."""
    return sorted({*(2**i for i in range(num_slots.bit_length())), num_slots})


def _choices(target: LM, drafter: Drafter) -> list[int]:
    """The K that the execution favours and the drafter can draft."""
    most = drafter.most_drafted
    return [k for k in target.execution.favoured_k if most is None or k <= most]


def measure_round_costs(target: LM, drafter: Drafter, rule: Rule, num_rows: int, num_tokens: int) -> dict[int, float]:
    """The same, measured now and not kept."""
    arms = [CostArm(target, drafter, k) for k in _choices(target, drafter)]
    length = min(_SHORT, target.context_len // 2)
    rounds = time_rounds(arms, rule, num_rows=num_rows, length=length, num_tokens=num_tokens)
    average = average_of([target, *drafter.models])
    return {arm.k: average([timing.decode_s for timing in timings]) for arm, timings in zip(arms, rounds, strict=True)}


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
    num_passes: int = 0,
    sampling: Sampling = _PLAIN,
    on_pass: Callable[[], None] = lambda: None,
) -> list[list[Timing]]:
    """The times of rounds of each arm, on random text, arms in turn.

    Args:
        length: tokens of each row to begin with.
        num_tokens: of the longest row in the end, at least. A cache of that size is taken, so that what is compiled for
            measuring serves the run as well.
        num_passes: over all arms; 0: as many as take about a second, but no more than five.
        sampling: options that the rounds run under.
        on_pass: called after each pass, and after the one that warms up.

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
            drafter = Altered(drafter, drafter.name, _filled_up)
        loop = decode(arm.target, drafter, requests, rule, num_draft_tokens=arm.k)
        first, *others = (round_.timing for round_ in islice(loop, 1 + _NUM_ROUNDS))
        if not others:  # the context is full
            return [first]
        others[0] += Timing(prefill_s=first.prefill_s, total_s=first.prefill_s)
        return others

    for arm in arms:
        rounds(arm)  # whatever happens only once
    on_pass()
    begin = time.perf_counter()
    for _ in range(num_passes or _MOST_PASSES):
        for arm, timings in zip(arms, taken, strict=True):
            timings += rounds(arm)
        on_pass()
        if not num_passes and here().shared(time.perf_counter() - begin > _PASSES_S):
            break
    return here().shared(taken)


def _filled_up(rows: Rows, k: int, draft: Draft) -> Draft:
    """As many tokens as are wanted, whatever a look-up has found."""
    if int(rows.num_wanted.amax()) == 0:
        return draft
    return Draft(ids=rows.last_ids[:, 1:].expand(-1, k), probs=None, num_drafted=rows.num_wanted)


def _path(target: LM, drafter: Drafter, rule: Rule, num_rows: int) -> Path:
    def facts(lm: LM) -> tuple[Any, ...]:
        weights = list(lm.model.parameters())
        num_params = sum(weight.numel() for weight in weights)
        # Kept as they are stored, they are read in another time.
        kinds = sorted({(type(weight).__name__, str(stored_tensors(weight)[0].dtype)) for weight in weights})
        return lm.name, num_params, kinds, str(lm.dtype), str(lm.device), lm.execution.name

    lms = [target, *drafter.models]
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    processor = processor_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    machine = torch.__version__, processor, device
    loop = drafter.name, rule.name, num_rows, target.execution.favoured_k, here().size
    what = [facts(lm) for lm in lms], loop, machine, _METHOD
    return cache_folder("costs") / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.json"
