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
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from outrider.costs import round_costs
from outrider.distill.data import Mixture, sequences
from outrider.distill.losses import LOSSES
from outrider.drafters.model import ModelDrafter
from outrider.errors import FileError, OptionError
from outrider.files import write_whole
from outrider.flow import Sampling
from outrider.intervals import Interval
from outrider.lab.alpha import measure_alpha
from outrider.lab.forced import Text
from outrider.lm import LM
from outrider.models.loading import Checkpoint, build_lm, without_bars
from outrider.speedup import expected_tokens
from outrider.verify import REJECTION

_LOG = logging.getLogger(__name__)
_WARM_UP, _DECAY = 0.02, 0.6  # of the budget: the learning rate rises, and falls to zero
_NUM_CHECKS = 20  # evaluations of alpha in a run
_MARK = "outrider.json"  # in a checkpoint, written last: without it a checkpoint is not whole


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: a number of steps, or of seconds of training."""

    num_steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.seconds is None):
            raise OptionError("steps", self.num_steps, "either --steps or --minutes")
        if not (self.num_steps or self.seconds or 0) > 0:
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


@dataclass(frozen=True, slots=True)
class Check:
    """What was seen of the draft at one moment.

    Attributes:
        seconds: of training so far.
        loss: mean since the last check; None at the beginning.
        alpha: on the sequences held out, with an interval over them.
        k: the number of drafted tokens that promises the most.
        tokens_per_s: to be expected with it: tau(K) for an equal alpha at every place, over the measured cost of such a
            round. For K = 0 it is plain decoding.
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
    checks: list[dict[str, Any]] = field(default_factory=list)


OnCheck = Callable[[Check], None]
OnStep = Callable[[float], None]


def distil(
    target: LM,
    draft: Any,
    tokenizer: Any,
    output: Path,
    data: Mixture,
    held_out: Tensor,
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
        held_out: sequences to measure alpha on. [H, length]
        on_step: told the part of the budget that is spent.
        on_check: told each check as it is made.

    Returns:
        All checks, those before an interruption included. The first is of the draft before training.
    """
    draft.to(target.device)
    lm = build_lm(Checkpoint(output.name, draft, tokenizer), target.vocab_size)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    watch = _Watch(target, lm, tokenizer, output, held_out, recipe, budget, save_dtype)
    watch.on_step, watch.on_check = on_step, on_check
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: _rate(watch.spent))
    loss_of = LOSSES[recipe.loss]

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        with torch.no_grad():
            target_logits = target.model(input_ids=labels.to(target.device), use_cache=False).logits
        size = target.vocab_size
        value = loss_of(target_logits[..., :size].float(), outputs.logits[..., :size].float()).mean()
        watch.losses.append(value.detach())
        return value

    arguments = TrainingArguments(
        output_dir=str(output / "training"),
        per_device_train_batch_size=recipe.batch_size,
        max_steps=budget.num_steps or 2**31 - 1,
        train_sampling_strategy="sequential",
        max_grad_norm=1.0,
        save_strategy="no",  # the watch decides
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        average_tokens_across_devices=False,
        use_cpu=target.device.type == "cpu",
        seed=recipe.seed,
    )
    trainer = Trainer(
        model=draft,
        args=arguments,
        train_dataset=data,
        compute_loss_func=loss,
        optimizers=(optimizer, schedule),
        callbacks=[watch],
    )
    trainer.remove_callback(_printer())
    checkpoint = _last_checkpoint(output / "training")
    if checkpoint is not None:
        watch.progress = _Progress(**json.loads((checkpoint / _MARK).read_text(encoding="utf-8")))
        _LOG.info("going on from %s", checkpoint)
    with without_bars():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    draft.eval()
    return [_check_of(check) for check in watch.progress.checks]


def _printer() -> type:
    from transformers.trainer_callback import PrinterCallback

    printer: type = PrinterCallback
    return printer


def _rate(spent: float) -> float:
    """The learning rate's factor: up, level, and linearly down to zero."""
    return min(1.0, (spent + 1e-3) / _WARM_UP, (1.0 - spent) / _DECAY)


class _Watch(TrainerCallback):
    """Looks at the clock and at alpha; says when to save and when to stop; keeps the best weights."""

    def __init__(
        self,
        target: LM,
        draft: LM,
        tokenizer: Any,
        output: Path,
        held_out: Tensor,
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
        self._recipe, self._budget = recipe, budget
        self._save_dtype = save_dtype
        self._texts = [Text(ids) for ids in sequences(held_out)]
        self._costs: Mapping[int, float] = {}
        self._last = self._last_save = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._draft.model.eval()
        self._costs = round_costs(self._target, ModelDrafter(self._draft), REJECTION, 1, len(self._texts[0].ids))
        if not self.progress.checks:
            self._check(state)
        self._draft.model.train()
        self.spent = self._budget.spent(state.global_step, self.progress.seconds)
        self._last = self._last_save = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        step_s, self._last = now - self._last, now
        # All processes must decide alike, so the clock of the first is everyone's.
        self.progress.seconds = _of_first(self.progress.seconds + step_s)
        before, self.spent = self.spent, self._budget.spent(state.global_step, self.progress.seconds)
        if self.on_step is not None:
            self.on_step(self.spent)
        if math.floor(before * _NUM_CHECKS) < math.floor(self.spent * _NUM_CHECKS):
            self._check(state)
            control.should_training_stop = self.spent >= 1.0 or self.progress.num_idle >= self._recipe.patience
        if _of_first(now - self._last_save) > self._recipe.save_s or control.should_training_stop:
            control.should_save = True
            self._last_save = now
        self._last = time.perf_counter()  # checks are not training

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_whole(folder / _MARK, json.dumps(asdict(self.progress)).encode())

    def _check(self, state: Any) -> None:
        self._draft.model.eval()
        alpha = measure_alpha(self._target, self._draft, self._texts, [Sampling()])[0].alpha
        self._draft.model.train()
        tau = expected_tokens([alpha.value] * max(self._costs))
        best_k = max(sorted(self._costs), key=lambda k: tau[k] / self._costs[k])
        loss = float(torch.stack(self.losses).mean()) if self.losses else None
        self.losses.clear()
        check = Check(state.global_step, self.progress.seconds, loss, alpha, best_k, tau[best_k] / self._costs[best_k])
        self.progress.checks.append(check.to_json())
        self.progress.num_idle += 1
        if alpha.value > self.progress.best_alpha:
            self.progress.best_alpha, self.progress.num_idle = alpha.value, 0
            if state.is_world_process_zero:
                self._keep()
        if self.on_check is not None:
            self.on_check(check)

    def _keep(self) -> None:
        model: Any = copy.deepcopy(self._draft.model).to(self._save_dtype)
        model.save_pretrained(self._output)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(self._output)


def _of_first(value: float) -> float:
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


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest that is whole."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{_MARK}")]
    return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)


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
