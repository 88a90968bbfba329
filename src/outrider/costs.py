"""What a round costs on this machine, for each number of drafted tokens: measured once, and kept.

They are kept on disk so that an adaptive K rests on the same numbers in the next run, and the same seed gives the same
text again. This module does not know what is done with them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from outrider.batch import Batch
from outrider.decode import decode
from outrider.drafters.base import Drafter
from outrider.drafters.model import ModelDrafter
from outrider.files import cache_folder, keep_in_cache
from outrider.flow import Draft, Request, Sampling
from outrider.lm import LM
from outrider.verify import Rule

_LOG = logging.getLogger(__name__)
_MOST_PASSES, _PASSES_S = 5, 1.0  # another pass over all K only while all passes took less than this
_NUM_ROUNDS = 4  # in each pass


def round_costs(target: LM, drafter: Drafter, rule: Rule, num_rows: int, num_tokens: int) -> dict[int, float]:
    """K -> seconds of a round of ``num_rows`` rows with K drafted tokens, for the K that the execution favours.

    Args:
        num_tokens: of the longest row in the end. A cache of that size is taken, so that what is compiled for measuring
            serves the run as well.
    """
    path = _path(target, drafter, rule, num_rows)
    try:
        kept = {int(k): float(seconds) for k, seconds in json.loads(path.read_text(encoding="utf-8")).items()}
        if set(kept) == set(target.execution.favoured_k) and all(0 < seconds < math.inf for seconds in kept.values()):
            return kept
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # not there, or not what was written
    _LOG.info("measuring the cost of a round of %s with %s", target.name, drafter.name)
    costs = _measure(target, drafter, rule, num_rows, num_tokens)
    keep_in_cache(path, json.dumps(costs).encode())
    return costs


def _measure(target: LM, drafter: Drafter, rule: Rule, num_rows: int, num_tokens: int) -> dict[int, float]:
    if not isinstance(drafter, ModelDrafter):
        drafter = _Repeater()  # on random text a look-up finds nothing, and would seem to cost nothing
    generator = torch.Generator().manual_seed(0)
    length = min(16, target.context_len // 2)
    most_new = max(num_tokens - length, _NUM_ROUNDS * (max(target.execution.favoured_k) + 1))
    prompts = torch.randint(target.vocab_size, (num_rows, length), generator=generator).tolist()
    requests = [Request(prompt, Sampling(seed=i, max_new_tokens=most_new)) for i, prompt in enumerate(prompts)]
    seconds: dict[int, list[float]] = {k: [] for k in target.execution.favoured_k}

    def rounds_s(k: int) -> list[float]:
        rounds = islice(decode(target, drafter, requests, rule, num_draft_tokens=k), _NUM_ROUNDS)
        return [round_.timing.decode_s for round_ in rounds]

    for k in seconds:
        rounds_s(k)  # whatever happens only once
    begin = time.perf_counter()
    for _ in range(_MOST_PASSES):
        for k, taken in seconds.items():
            taken += rounds_s(k)
        if time.perf_counter() - begin > _PASSES_S:
            break
    return {k: statistics.median(taken) for k, taken in seconds.items()}


class _Repeater:
    """Proposes the last token again and again."""

    name = "repeater"

    def open(self, batch: Batch) -> _Repeater:
        return self

    def compiled(self) -> _Repeater:
        return self

    def keep(self, rows: torch.Tensor) -> None:
        pass

    def propose(self, batch: Batch, num_wanted: Sequence[int], k: int, rule: Rule, noise: Any) -> Draft:
        ids = batch.last_ids[:, None].expand(-1, max(num_wanted))
        return Draft(ids=ids, probs=None, num_drafted=torch.tensor(num_wanted, device=ids.device))


def _path(target: LM, drafter: Drafter, rule: Rule, num_rows: int) -> Path:
    def facts(lm: LM) -> tuple[Any, ...]:
        num_params = sum(parameter.numel() for parameter in lm.model.parameters())
        return lm.name, num_params, str(lm.dtype), str(lm.device), lm.execution.name

    lms = [target, drafter.lm] if isinstance(drafter, ModelDrafter) else [target]
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else ""
    machine = torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), device
    what = [facts(lm) for lm in lms], drafter.name, rule.name, num_rows, machine, target.execution.favoured_k
    return cache_folder("costs") / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.json"
