"""Costs of rounds, cached on disk for later runs of the same pair on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from outrider.decoding.measured_costs import MeasuredCosts, favoured_ks, load_sizes, measure_round_costs
from outrider.drafters.base import Drafter
from outrider.errors import FileError
from outrider.options import MAX_NUM_DRAFT_TOKENS
from outrider.runtime.lm import LM
from outrider.runtime.tensor_parts import stored_tensors
from outrider.sampling.rules import Rule
from outrider.system.files import cache_folder, keep_in_cache
from outrider.system.provenance import processor_name
from outrider.system.ranks import current_ranks

_LOG = logging.getLogger(__name__)
_KEPT = timedelta(days=30)  # drivers, power settings and neighbours change without a new name
# Rounds correct them while they run. Measuring on a busy machine may take a minute, which not every run should.
_DOUBTED = timedelta(hours=1)
_METHOD = 7  # change it with the method of timing: cached costs with another number are ignored
_DESCRIPTION = {
    **dict.fromkeys(("target", "draft", "acceptance", "dtype", "execution", "device", "processor", "torch"), str),
    **dict.fromkeys(("num_rows", "num_threads"), int),
}
# Raised by the values of a damaged file where they are used: infinite numbers, endless nesting ...
_UNREADABLE = OSError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError


def round_costs(target: LM, drafter: Drafter, rule: Rule, num_rows: int, num_tokens: int) -> dict[int, float]:
    """K -> seconds of a round of ``num_rows`` rows with K drafted tokens, for the K of ``favoured_ks``. If
    rounds do not wait for their programs, and compiled ones were not measured before, the costs of eager ones.

    Args:
        num_tokens: final length of the longest row. The cache gets that size, so that programs compiled for measuring
            serve the run as well.
    """
    path = _path(target, drafter, rule, num_rows)
    choices = favoured_ks(target, drafter)
    kept = current_ranks().of_first(lambda: _seconds(path, choices))
    if kept is not None:
        return kept
    if not target.execution.waits:  # the costs of eager rounds do until then
        costs = round_costs(target.eager(), drafter.with_models(LM.eager), rule, num_rows, num_tokens)
        return {k: costs[k] for k in choices}
    measured = measure_round_costs(target, drafter, rule, num_rows, num_tokens)
    if measured.doubt is not None:
        _LOG.info("kept for an hour only: %s", measured.doubt)
    content = {"of": _description(target, drafter, rule, num_rows), **asdict(measured)}
    keep_in_cache(path, json.dumps(content).encode())
    return dict(measured.seconds)


@dataclass(frozen=True, slots=True)
class KeptCosts:
    """One file of costs.

    Attributes:
        of: description: models, rule, number of rows and machine.
        measured_at: modification time of the file.
    """

    path: Path
    of: Mapping[str, Any]
    measured: MeasuredCosts
    measured_at: datetime

    @property
    def is_used(self) -> bool:
        """Whether a run would use them. A time far in the future is of a wrong clock: their age is unknown."""
        return abs(datetime.now(UTC) - self.measured_at) < (_KEPT if self.measured.doubt is None else _DOUBTED)


def kept_costs() -> tuple[list[KeptCosts], list[Path]]:
    """All files of costs, the newest first; and the unreadable ones: damaged, of another version or another user.

    Raises:
        FileError: the folder cannot be read.
    """
    folder = cache_folder("costs")
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        paths = []
    except OSError as error:
        raise FileError(f"cannot read {folder}: {error.strerror}") from None
    found, others = [], []
    for path in paths:
        try:
            found.append(_read(path))
        except _UNREADABLE:
            others.append(path)
    return sorted(found, key=lambda one: one.measured_at, reverse=True), others


def _read(path: Path) -> KeptCosts:
    """Read a file of costs. Raises one of _UNREADABLE if it is missing or damaged."""
    content = json.loads(path.read_text(encoding="utf-8"))
    of, load = content.pop("of"), content.pop("load")
    of = {name: of[name] for name in _DESCRIPTION}
    if not all(isinstance(of[name], kind) for name, kind in _DESCRIPTION.items()):
        raise ValueError("not a description")
    by_k = {name: {int(k): float(value) for k, value in values.items()} for name, values in content.items()}
    num_rounds = {k: int(num) for k, num in by_k.pop("num_rounds").items()}
    measured = MeasuredCosts(num_rounds=num_rounds, load=None if load is None else float(load), **by_k)
    ks = measured.seconds.keys()
    if any(values.keys() != ks for values in (measured.verify_s, measured.spread, num_rounds)) or 0 not in ks:
        raise ValueError("of different K")
    if not all(0 <= k <= MAX_NUM_DRAFT_TOKENS for k in ks):
        raise ValueError("no K")
    positive = [*measured.seconds.values(), *measured.verify_s.values(), *num_rounds.values()]
    others = [*measured.spread.values(), 0.0 if measured.load is None else measured.load]
    if not (all(0 < value < math.inf for value in positive) and all(0 <= value < math.inf for value in others)):
        raise ValueError("not positive")
    return KeptCosts(path, of, measured, datetime.fromtimestamp(path.stat().st_mtime, UTC))


def _seconds(path: Path, ks: Sequence[int]) -> dict[int, float] | None:
    """The cached costs, if they can be used."""
    try:
        kept = _read(path)
    except _UNREADABLE:
        return None
    return dict(kept.measured.seconds) if kept.is_used and set(kept.measured.seconds) == set(ks) else None


def costs_by_load(
    target: LM, drafter: Drafter, rule: Rule, num_slots: int, num_tokens: int
) -> dict[int, dict[int, float]]:
    """Number of rows -> K -> seconds of a round, for the loads of ``load_sizes``."""
    return {size: round_costs(target, drafter, rule, size, num_tokens) for size in load_sizes(num_slots)}


def _description(target: LM, drafter: Drafter, rule: Rule, num_rows: int) -> dict[str, Any]:
    return {
        "target": target.name,
        "draft": drafter.name,
        "acceptance": rule.name,
        "num_rows": num_rows,
        "dtype": str(target.dtype).removeprefix("torch."),
        "execution": target.execution.name,
        **_machine(target),
    }


def _machine(target: LM) -> dict[str, Any]:
    is_cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if is_cuda else str(target.device),
        "processor": processor_name(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _path(target: LM, drafter: Drafter, rule: Rule, num_rows: int) -> Path:
    def facts(lm: LM) -> tuple[Any, ...]:
        weights = list(lm.model.parameters())
        num_params = sum(weight.numel() for weight in weights)
        # Weights that are kept in their stored form take another time to read.
        kinds = sorted({(type(weight).__name__, str(stored_tensors(weight)[0].dtype)) for weight in weights})
        return lm.name, num_params, kinds, str(lm.dtype), str(lm.device), lm.execution.name

    lms = [target, *drafter.models]
    machine = *_machine(target).values(), torch.backends.cpu.get_cpu_capability()
    loop = drafter.name, rule.name, num_rows, favoured_ks(target, drafter), current_ranks().size
    what = [facts(lm) for lm in lms], loop, machine, _METHOD
    return cache_folder("costs") / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.json"
