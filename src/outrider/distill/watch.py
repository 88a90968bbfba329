"""Trainer callback: evaluates the draft, saves and resumes, stops early, and keeps the best weights.

Checkpoints are complete or absent.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from outrider.bench.round_costs import measure_round_costs
from outrider.distill.kinds import Student
from outrider.distill.recipe import Budget, Recipe
from outrider.errors import NumericsError
from outrider.sampling.rules import REJECTION
from outrider.scoring.teacher_forcing import Text
from outrider.stats.intervals import Interval
from outrider.stats.speedup import expected_tokens
from outrider.system.files import to_disk, write_whole

_LOG = logging.getLogger(__name__)
_NUM_CHECKS = 20  # evaluations of alpha in a run
MARK = "outrider.json"  # file written last: without it a checkpoint is incomplete
_NUM_KEPT = 2  # checkpoints


@dataclass(frozen=True, slots=True)
class Check:
    """Evaluation of the draft.

    Attributes:
        seconds: of training so far.
        loss: mean since the last check; None at the beginning.
        alphas: of the weights as stored, on the held-out sequences, with an interval over them: for the first drafted
            token of a round, the second, ... The last one holds for all later tokens too.
        k: best predicted K; 0 is plain decoding.
        tokens_per_s: prediction for it: tau(K) for these alphas at every place, over the cost of a round, timed at the
            beginning with the models of the training (eager, a draft model in float32).
    """

    step: int
    seconds: float
    loss: float | None
    alphas: tuple[Interval, ...]
    k: int
    tokens_per_s: float

    @property
    def alpha(self) -> Interval:
        """alpha of the first drafted token."""
        return self.alphas[0]

    @property
    def mean_alpha(self) -> float:
        """The measure of the best weights."""
        return sum(alpha.value for alpha in self.alphas) / len(self.alphas)

    def to_json(self) -> dict[str, Any]:
        alphas = [alpha.to_json() for alpha in self.alphas]
        return asdict(self) | {"alpha": alphas[0], "alphas": alphas}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Check:
        stored = dict(entry)
        alpha = stored.pop("alpha")
        # Runs of earlier versions have stored no others.
        alphas = tuple(Interval(**one) for one in stored.pop("alphas", [alpha]))
        return cls(**stored, alphas=alphas)


@dataclass(slots=True)
class Progress:
    """State to resume from, besides the trainer's own."""

    seconds: float = 0.0
    num_idle: int = 0
    best_alpha: float = -1.0  # the mean over the drafted tokens
    loss_sum: float = 0.0  # since the last check
    num_losses: int = 0
    checks: list[dict[str, Any]] = field(default_factory=list)


OnCheck = Callable[[Check], None]
OnStep = Callable[[float], None]


class Watch(TrainerCallback):
    """Callback that monitors time and alpha, saves, stops early, and keeps the best weights."""

    def __init__(
        self,
        student: Student,
        output: Path,
        held_out: Sequence[Text],
        recipe: Recipe,
        budget: Budget,
        save_dtype: torch.dtype,
    ) -> None:
        self.progress = Progress()
        self.losses: list[Tensor] = []
        self.spent = 0.0
        self.on_step: OnStep | None = None
        self.on_check: OnCheck | None = None
        self._student, self._output = student, output
        self._held_out, self._recipe, self._budget, self._save_dtype = held_out, recipe, budget, save_dtype
        self._costs: Mapping[int, float] = {}
        self._last = self._last_save = 0.0

    def is_over(self, num_steps: int) -> bool:
        """Whether the budget is spent, or alpha has stopped improving."""
        spent = self._budget.spent(num_steps, self.progress.seconds)
        return spent >= 1.0 or self.progress.num_idle >= self._recipe.patience

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        drafter = self._student.as_stored(self._output.name, self._save_dtype)
        self._costs = _of_first(measure_round_costs(self._student.target, drafter, REJECTION))
        if not self.progress.checks:
            self._check(state)
        self.spent = self._budget.spent(state.global_step, self.progress.seconds)
        self._last = self._last_save = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        # All processes must decide alike, so they use the clock and alpha of the first.
        step_s, since_save_s = _of_first((now - self._last, now - self._last_save))
        self.progress.seconds += step_s
        before, self.spent = self.spent, self._budget.spent(state.global_step, self.progress.seconds)
        if self.on_step is not None:
            self.on_step(self.spent)
        is_due = math.floor(before * _NUM_CHECKS) < math.floor(self.spent * _NUM_CHECKS)
        if is_due:
            self._check(state)
        control.should_training_stop = self.is_over(state.global_step)
        # Also after a check, so that stored weights and checks match.
        if is_due or since_save_s > self._recipe.save_s or control.should_training_stop:
            control.should_save = True
            self._last_save = now
        self._last = time.perf_counter()  # checks are not training

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gather_losses()
        if state.is_world_process_zero:
            training = Path(args.output_dir)
            folder = training / f"checkpoint-{state.global_step}"
            for path in folder.rglob("*"):
                to_disk(path)  # before the mark that makes them complete
            write_whole(folder / MARK, json.dumps(asdict(self.progress)).encode())
            to_disk(folder / MARK)
            for _, old in sorted(_whole_checkpoints(training))[:-_NUM_KEPT]:
                (old / MARK).unlink()
                shutil.rmtree(old)

    def _gather_losses(self) -> None:
        if self.losses:
            self.progress.loss_sum += float(torch.stack(self.losses).sum())
            self.progress.num_losses += len(self.losses)
            self.losses.clear()

    def _alphas(self) -> tuple[Interval, ...]:
        drafter = self._student.as_stored(self._output.name, self._save_dtype)
        try:
            return self._student.alphas(drafter, self._held_out)
        except NumericsError:
            if not self.progress.checks:
                raise
            # Training has spoilt the weights: nothing that they draft is verified.
            return (Interval(0.0, 0.0, 0.0, 0.95),)

    def _check(self, state: Any) -> None:
        alphas = _of_first(self._alphas())
        tau = expected_tokens([alphas[min(i, len(alphas) - 1)].value for i in range(max(self._costs))])
        best_k = max(sorted(self._costs), key=lambda k: tau[k] / self._costs[k])
        self._gather_losses()
        progress = self.progress
        loss = progress.loss_sum / progress.num_losses if progress.num_losses else None
        progress.loss_sum, progress.num_losses = 0.0, 0
        check = Check(state.global_step, progress.seconds, loss, alphas, best_k, tau[best_k] / self._costs[best_k])
        progress.checks.append(check.to_json())
        progress.num_idle += 1
        if check.mean_alpha > progress.best_alpha:
            progress.best_alpha, progress.num_idle = check.mean_alpha, 0
            if state.is_world_process_zero:
                self._keep()
        if self.on_check is not None:
            self.on_check(check)

    def _keep(self) -> None:
        """Save the draft beside the existing one, then replace it file by file, the weights last."""
        part = self._output / "training" / "best.part"
        shutil.rmtree(part, ignore_errors=True)
        self._student.save(part, self._save_dtype)
        for path in sorted(part.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.replace(self._output / path.name)
        part.rmdir()


def _of_first(value: Any) -> Any:
    """Broadcast the first process's value."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    if PartialState().num_processes == 1:
        return value
    values = [value]
    broadcast_object_list(values)
    return values[0]


def _whole_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    return [(int(path.parent.name.split("-")[1]), path.parent) for path in folder.glob(f"checkpoint-*/{MARK}")]


def last_checkpoint(folder: Path) -> tuple[Path | None, Progress]:
    """Find the newest complete checkpoint, and its progress."""
    for _, path in sorted(_whole_checkpoints(folder), reverse=True):
        try:
            return path, Progress(**json.loads((path / MARK).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:  # lost by the disk
            _LOG.warning("%s is damaged (%s): resuming from the previous one", path, error)
            (path / MARK).unlink(missing_ok=True)
    return None, Progress()
