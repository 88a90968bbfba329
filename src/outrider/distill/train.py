"""Train a draft for a target: Hugging Face's Trainer, with the target's distribution for a label.

What is watched is what the draft is for: alpha on sequences that are not trained on, and the tokens per second that
follow from it and from the measured cost of a round. The weights that did best are what is kept. A run that is killed
goes on from its last checkpoint when it is started again.
"""

from __future__ import annotations

import copy
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
from torch.utils.checkpoint import checkpoint as checkpoint_part
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from outrider.decoding.costs import measure_round_costs
from outrider.distill.data import Mixture
from outrider.distill.losses import LOSSES, Loss
from outrider.drafters.model import ModelDrafter
from outrider.errors import FileError, OptionError
from outrider.models.loading import Checkpoint, build_lm, without_bars
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from outrider.scoring.alpha import measure_alpha
from outrider.scoring.teacher_forcing import Text
from outrider.stats.intervals import Interval
from outrider.stats.speedup import expected_tokens
from outrider.system.files import to_disk, write_whole

_LOG = logging.getLogger(__name__)
_WARM_UP, _DECAY = 0.02, 0.6  # of the budget: the learning rate rises, and falls to zero
_NUM_CHECKS = 20  # evaluations of alpha in a run
_MARK = "outrider.json"  # in a checkpoint, written last: without it a checkpoint is not whole
_NUM_KEPT = 2  # checkpoints
_LOSS_NUMBERS = 2**26  # logits that a loss looks at in one piece: 256 MiB, several times over


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: a number of steps, or of seconds of training."""

    num_steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.seconds is None):
            raise OptionError("steps", self.num_steps, "either --steps or --minutes")
        if not 0 < (self.num_steps or self.seconds or 0) < math.inf:
            raise OptionError("steps", self.num_steps or self.seconds, "steps or minutes above 0")

    def spent(self, num_steps: int, seconds: float) -> float:
        """The part that is used up, from 0 to 1."""
        used = num_steps / self.num_steps if self.num_steps is not None else seconds / (self.seconds or 1)
        return min(1.0, used)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train.

    Attributes:
        loss: of distill/losses.py.
        patience: end after so many checks in a row without a better alpha.
        save_s: seconds between checkpoints, about.
    """

    loss: str = "kl"
    batch_size: int = 8
    learning_rate: float = 2e-3
    patience: int = 8
    seed: int = 0
    save_s: float = 120.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise OptionError("loss", self.loss, f"choose one of {', '.join(LOSSES)}")
        if self.batch_size < 1:
            raise OptionError("batch_size", self.batch_size, "a whole number >= 1")
        if not 0 < self.learning_rate < math.inf:
            raise OptionError("learning_rate", self.learning_rate, "a number above 0")
        if self.patience < 1:
            raise OptionError("patience", self.patience, "a whole number >= 1")
        if not 0 <= self.seed < 2**32:
            raise OptionError("seed", self.seed, "a whole number, 0 <= seed < 2**32")


@dataclass(frozen=True, slots=True)
class Check:
    """What was seen of the draft at one moment.

    Attributes:
        seconds: of training so far.
        loss: mean since the last check; None at the beginning.
        alpha: of the weights as they would be kept, on the sequences held out, with an interval over them.
        k: the number of drafted tokens that promises the most.
        tokens_per_s: to be expected with it: tau(K) for an equal alpha at every place, over the cost of such a round,
            timed at the beginning as the models are here (eager, the draft in float32). For K = 0: plain decoding.
    """

    step: int
    seconds: float
    loss: float | None
    alpha: Interval
    k: int
    tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"alpha": self.alpha.to_json()}


@dataclass(slots=True)
class _Progress:
    """What has to survive a kill, beside what the trainer saves itself."""

    seconds: float = 0.0
    num_idle: int = 0
    best_alpha: float = -1.0
    loss_sum: float = 0.0  # since the last check
    num_losses: int = 0
    checks: list[dict[str, Any]] = field(default_factory=list)


OnCheck = Callable[[Check], None]
OnStep = Callable[[float], None]


def distil(
    target: LM,
    draft: Any,
    tokenizer: Any,
    output: Path,
    data: Mixture,
    held_out: Sequence[Text],
    recipe: Recipe,
    budget: Budget,
    *,
    save_dtype: torch.dtype,
    on_step: OnStep | None = None,
    on_check: OnCheck | None = None,
) -> list[Check]:
    """Train ``draft`` in place, and keep the best of it in ``output``.

    Args:
        draft: of Hugging Face, in float32, with the target's tokens.
        output: becomes a checkpoint of Hugging Face, in ``save_dtype``; what a resumed run needs is in
            ``output/training``.
        held_out: texts to measure alpha on.
        on_step: told the part of the budget that is spent.
        on_check: told each check as it is made.

    Returns:
        All checks, those before an interruption included. The first is of the draft before training.
    """
    draft.to(target.device)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    watch = _Watch(target, draft, tokenizer, output, held_out, recipe, budget, save_dtype)
    watch.on_step, watch.on_check = on_step, on_check
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: _rate(watch.spent))
    loss_of = LOSSES[recipe.loss]

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        with torch.no_grad():
            target_logits = target.model(input_ids=labels.to(target.device), use_cache=False).logits
        value = _mean(loss_of, target_logits[..., : target.vocab_size], outputs.logits[..., : target.vocab_size])
        watch.losses.append(value.detach())
        return value

    training = output / "training"
    arguments = TrainingArguments(
        output_dir=str(training),
        per_device_train_batch_size=recipe.batch_size,
        max_steps=budget.num_steps or 2**31 - 1,
        train_sampling_strategy="sequential",
        max_grad_norm=1.0,
        save_strategy="no",  # the watch says when
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        average_tokens_across_devices=False,
        use_cpu=target.device.type == "cpu",
        seed=recipe.seed,
    )
    arguments._n_gpu = min(
        1, arguments.n_gpu
    )  # several GPUs have a process each, or the batch would not be what it says
    trainer = Trainer(
        model=draft,
        args=arguments,
        train_dataset=data,
        compute_loss_func=loss,
        optimizers=(optimizer, schedule),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint, watch.progress = _last_checkpoint(training)
    if trainer.is_world_process_zero():
        for path in training.glob("checkpoint-*"):  # what was being written when a run was killed
            if not (path / _MARK).exists():
                shutil.rmtree(path)
    if not watch.is_over(0 if checkpoint is None else int(checkpoint.name.split("-")[1])):
        with without_bars():
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    draft.eval()
    return [_check_of(check) for check in watch.progress.checks]


def _mean(loss_of: Loss, target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """The mean loss over all places, some places at a time: what a loss needs for its gradient is several times as
    large as the logits, and made again when it is needed."""
    places = max(1, _LOSS_NUMBERS // (target_logits.shape[0] * target_logits.shape[-1]))

    def part(p: Tensor, q: Tensor) -> Tensor:
        return loss_of(p.float(), q.float()).sum()

    parts = zip(torch.split(target_logits, places, 1), torch.split(draft_logits, places, 1), strict=True)
    if places >= target_logits.shape[1]:
        sums = [part(p, q) for p, q in parts]
    else:
        sums = [checkpoint_part(part, p, q, use_reentrant=False) for p, q in parts]
    return torch.stack(sums).sum() / target_logits.shape[:2].numel()


def _rate(spent: float) -> float:
    """The learning rate's factor: up, level, and linearly down to zero."""
    return min(1.0, (spent + 1e-3) / _WARM_UP, (1.0 - spent) / _DECAY)


class _Watch(TrainerCallback):
    """Looks at the clock and at alpha; says when to save and when to stop; keeps the best weights."""

    def __init__(
        self,
        target: LM,
        draft: Any,
        tokenizer: Any,
        output: Path,
        held_out: Sequence[Text],
        recipe: Recipe,
        budget: Budget,
        save_dtype: torch.dtype,
    ) -> None:
        self.progress = _Progress()
        self.losses: list[Tensor] = []
        self.spent = 0.0
        self.on_step: OnStep | None = None
        self.on_check: OnCheck | None = None
        self._target, self._draft, self._tokenizer, self._output = target, draft, tokenizer, output
        self._held_out, self._recipe, self._budget, self._save_dtype = held_out, recipe, budget, save_dtype
        self._costs: Mapping[int, float] = {}
        self._last = self._last_save = 0.0

    def is_over(self, num_steps: int) -> bool:
        """Whether the budget is spent, or alpha has not risen for long enough."""
        spent = self._budget.spent(num_steps, self.progress.seconds)
        return spent >= 1.0 or self.progress.num_idle >= self._recipe.patience

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lm = self._kept_model()
        length = len(self._held_out[0].ids)
        self._costs = _of_first(measure_round_costs(self._target, ModelDrafter(lm), REJECTION, 1, length))
        if not self.progress.checks:
            self._check(state)
        self.spent = self._budget.spent(state.global_step, self.progress.seconds)
        self._last = self._last_save = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        # All processes must decide alike, so what they decide by is everyone's: the clock and alpha of the first.
        step_s, since_save_s = _of_first((now - self._last, now - self._last_save))
        self.progress.seconds += step_s
        before, self.spent = self.spent, self._budget.spent(state.global_step, self.progress.seconds)
        if self.on_step is not None:
            self.on_step(self.spent)
        is_due = math.floor(before * _NUM_CHECKS) < math.floor(self.spent * _NUM_CHECKS)
        if is_due:
            self._check(state)
        control.should_training_stop = self.is_over(state.global_step)
        # Also after a check, so that what is kept and what is known of it belong together.
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
                to_disk(path)  # before the mark that says they are there
            write_whole(folder / _MARK, json.dumps(asdict(self.progress)).encode())
            to_disk(folder / _MARK)
            for _, old in sorted(_whole_checkpoints(training))[:-_NUM_KEPT]:
                (old / _MARK).unlink()
                shutil.rmtree(old)

    def _gather_losses(self) -> None:
        if self.losses:
            self.progress.loss_sum += float(torch.stack(self.losses).sum())
            self.progress.num_losses += len(self.losses)
            self.losses.clear()

    def _kept_model(self) -> LM:
        """The draft as it would be kept: rounded to the type of the file."""
        model: Any = copy.deepcopy(self._draft)
        for parameter in model.parameters():  # no buffers that are not in the file, but computed anew
            parameter.data = parameter.to(self._save_dtype).to(torch.float32)
        return build_lm(Checkpoint(self._output.name, model, self._tokenizer), self._target.vocab_size)

    def _check(self, state: Any) -> None:
        alpha = _of_first(measure_alpha(self._target, self._kept_model(), self._held_out, [Sampling()])[0].alpha)
        tau = expected_tokens([alpha.value] * max(self._costs))
        best_k = max(sorted(self._costs), key=lambda k: tau[k] / self._costs[k])
        self._gather_losses()
        progress = self.progress
        loss = progress.loss_sum / progress.num_losses if progress.num_losses else None
        progress.loss_sum, progress.num_losses = 0.0, 0
        check = Check(state.global_step, progress.seconds, loss, alpha, best_k, tau[best_k] / self._costs[best_k])
        progress.checks.append(check.to_json())
        progress.num_idle += 1
        if alpha.value > progress.best_alpha:
            progress.best_alpha, progress.num_idle = alpha.value, 0
            if state.is_world_process_zero:
                self._keep()
        if self.on_check is not None:
            self.on_check(check)

    def _keep(self) -> None:
        """Write the draft beside what is there, then over it file by file, the weights last."""
        model: Any = copy.deepcopy(self._draft).to(self._save_dtype)
        model.config.use_cache = True  # the trainer has switched it off
        part = self._output / "training" / "best.part"
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(part)
        for path in sorted(part.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.replace(self._output / path.name)
        part.rmdir()


def _of_first(value: Any) -> Any:
    """The value of the first process, in all of them."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    if PartialState().num_processes == 1:
        return value
    values = [value]
    broadcast_object_list(values)
    return values[0]


def _check_of(entry: dict[str, Any]) -> Check:
    return Check(**{**entry, "alpha": Interval(**entry["alpha"])})


def _whole_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    return [(int(path.parent.name.split("-")[1]), path.parent) for path in folder.glob(f"checkpoint-*/{_MARK}")]


def _last_checkpoint(folder: Path) -> tuple[Path | None, _Progress]:
    """The newest checkpoint that is whole, and how far it had come."""
    for _, path in sorted(_whole_checkpoints(folder), reverse=True):
        try:
            return path, _Progress(**json.loads((path / _MARK).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:  # the disk has lost it
            _LOG.warning("%s is damaged (%s): going on from the one before", path, error)
            (path / _MARK).unlink(missing_ok=True)
    return None, _Progress()


def check_same_run(output: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a run into its folder, or compare them to those that are there.

    Raises:
        FileError: another run has been there.
    """
    path = output / "training" / "settings.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (output / "config.json").exists():
            raise FileError(f"{output} holds a model already: choose another folder") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(settings, indent=2).encode())
        return
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}") from None
    differing = sorted(key for key in settings.keys() | found.keys() if settings.get(key) != found.get(key))
    if differing:
        raise FileError(
            f"{output} holds another run (its {', '.join(differing)} differ): choose another folder, or remove this one"
        )
