"""Train a draft for a target with Hugging Face's Trainer, with the target's distribution as label.

Training monitors alpha on held-out sequences, and the tokens per second that follow from it and from the measured cost
of a round. The best weights are kept. A killed run resumes from its last checkpoint when restarted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpoint_part
from transformers import PrinterCallback, Trainer, TrainingArguments

from outrider.distill.data import Mixture
from outrider.distill.kinds import Pair, Student
from outrider.distill.losses import LOSSES, Loss
from outrider.distill.recipe import Budget, Recipe
from outrider.distill.watch import MARK, Check, OnCheck, OnStep, Watch, last_checkpoint
from outrider.errors import FileError
from outrider.models.reading import without_bars
from outrider.scoring.teacher_forcing import Text
from outrider.system.files import write_whole

_WARM_UP, _DECAY = 0.02, 0.6  # shares of the budget in which the learning rate rises, and falls to zero
_LOSS_NUMBERS = 2**26  # logits per piece of the loss: 256 MiB, several times over


def distil(
    student: Student,
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
    """Train a draft in place, and store its best weights in ``output``.

    Args:
        output: becomes a checkpoint, in ``save_dtype``; the state for resuming is in ``output/training``.
        held_out: sequences to measure alpha on.
        on_step: called with the fraction of the budget that is spent.
        on_check: called with each check.

    Returns:
        All checks, including those before an interruption. The first precedes training.
    """
    target, draft = student.target, student.module
    draft.to(target.device)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    watch = Watch(student, output, held_out, recipe, budget, save_dtype)
    watch.on_step, watch.on_check = on_step, on_check
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: _rate(watch.spent))
    loss_of = LOSSES[recipe.loss]

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        value = _over_pairs(loss_of, student.pairs(outputs, labels.to(target.device)), student.later)
        watch.losses.append(value.detach())
        return value

    training = output / "training"
    arguments = TrainingArguments(
        output_dir=str(training),
        per_device_train_batch_size=recipe.batch_size,
        max_steps=budget.num_steps or 2**31 - 1,
        train_sampling_strategy="sequential",
        label_names=["labels"],
        max_grad_norm=1.0,
        save_strategy="no",  # the callback decides when
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        average_tokens_across_devices=False,
        use_cpu=target.device.type == "cpu",
        seed=recipe.seed,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process per GPU, or the batch size would be wrong
    trainer = Trainer(
        model=draft,
        args=arguments,
        train_dataset=data,
        compute_loss_func=loss,
        optimizers=(optimizer, schedule),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint, watch.progress = last_checkpoint(training)
    if trainer.is_world_process_zero():
        for path in training.glob("checkpoint-*"):  # left incomplete by a killed run
            if not (path / MARK).exists():
                shutil.rmtree(path)
    if not watch.is_over(0 if checkpoint is None else int(checkpoint.name.split("-")[1])):
        with without_bars():
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    draft.eval()
    return [Check.from_json(check) for check in watch.progress.checks]


def _over_pairs(loss_of: Loss, pairs: Sequence[Pair], later: float) -> Tensor:
    """Mean loss over all positions and drafted tokens, each weighted with ``later`` times the weight before."""
    weights = [later**i for i in range(len(pairs))]
    losses = [weight * _mean(loss_of, *pair) for weight, pair in zip(weights, pairs, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


def _mean(loss_of: Loss, target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Mean loss over all positions, in pieces: intermediate results of the gradient, several times as large as the
    logits, are recomputed on demand."""
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
    """Factor of the learning rate: warm-up, plateau, linear decay to zero."""
    return min(1.0, (spent + 1e-3) / _WARM_UP, (1.0 - spent) / _DECAY)


def check_same_run(output: Path, settings: dict[str, Any]) -> None:
    """Store the settings of a run in its folder, or compare them with the stored ones.

    Raises:
        FileError: the folder belongs to another run.
    """
    path = output / "training" / "settings.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (output / "config.json").exists():
            raise FileError(f"{output} already holds a model: choose another folder") from None
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
