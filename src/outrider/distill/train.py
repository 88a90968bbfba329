"""Train a draft for a target, with the target's distribution as label.

Training monitors alpha on held-out sequences, and the tokens per second that follow from it and from the measured cost
of a round. The best weights are kept. A killed run resumes from its last checkpoint when restarted: one file, which is
replaced at once. Under ``accelerate launch`` every process trains on sequences of its own.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpoint_part

from outrider.decoding.schedule import expected_tokens
from outrider.distill.data import Mixture
from outrider.distill.student import Pair, Student
from outrider.errors import FileError, NumericsError, OptionError
from outrider.measure.round_costs import measure_round_costs
from outrider.measure.teacher_forcing import Text
from outrider.models.reading import without_bars
from outrider.records import Interval
from outrider.sampling.rules import REJECTION
from outrider.system.files import parse_row, read_bytes, write_whole

_PROGRESS = "num_steps", "seconds", "num_idle", "best_alpha", "losses"  # in a checkpoint, besides the checks
_LOSS_NUMBERS = 2**26  # logits per piece of the loss: 256 MiB, several times over


# Losses: the distance of the draft's distribution q from the target's p, token by token. Each is a pure function of the
# logits of both, [..., V] and [..., V] -> [...], zero where q = p, in nats. Zhou et al. compare them for drafts
# (DistillSpec, 2310.08461); the best choice depends on the pair.


def kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Forward KL, sum_v p log(p / q): the draft must cover all that the target may generate.

    Its gradient is q - p, which never vanishes while they differ, so it is the loss to start with. Hinton et al.
    1503.02531 (there with a temperature).
    """
    log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def tv(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Total variation, sum_v |p - q| / 2 = 1 - alpha: it determines acceptance directly.

    (Leviathan et al. 2211.17192, corollary 3.6.) Its gradient vanishes where p and q have nothing in common, so a draft
    cannot learn new tokens from it: use it for a draft that already agrees.
    """
    return (target_logits.softmax(-1) - draft_logits.softmax(-1)).abs().sum(-1) / 2


def lk(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """LK loss, w KL + (1 - w) TV with w = exp(-3 alpha): KL where little is accepted, TV where much is.

    So tokens are learned from KL, and the end of training serves acceptance. Samarin et al. 2602.23881, the hybrid
    form. They take w from the mean alpha of a batch; here it is that of the position, so that the loss is a function of
    one position.
    """
    missed = tv(target_logits, draft_logits)
    weight = torch.exp(-3.0 * (1 - missed.detach()))
    return weight * kl(target_logits, draft_logits) + (1 - weight) * missed


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"kl": kl, "tv": tv, "lk": lk}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Budget, in steps or seconds, and hyperparameters of training."""

    num_steps: int | None = None
    seconds: float | None = None
    loss: str = "kl"
    batch_size: int = 8
    learning_rate: float = 2e-3
    patience: int = 8  # stop after this many checks in a row without a better alpha
    seed: int = 0
    save_s: float = 120.0  # between checkpoints, approximately

    def __post_init__(self) -> None:
        budget = self.seconds if self.num_steps is None else self.num_steps
        is_one = (self.num_steps is None) != (self.seconds is None)
        for name, value, is_right, remedy in (
            ("steps", self.num_steps, is_one, "either --steps or --minutes"),
            ("steps", budget, 0 < (budget or 0) < math.inf, "steps or minutes above 0"),
            ("loss", self.loss, self.loss in LOSSES, f"choose one of {', '.join(LOSSES)}"),
            ("batch_size", self.batch_size, self.batch_size >= 1, "a whole number >= 1"),
            ("learning_rate", self.learning_rate, 0 < self.learning_rate < math.inf, "a number above 0"),
            ("patience", self.patience, self.patience >= 1, "a whole number >= 1"),
            ("seed", self.seed, 0 <= self.seed < 2**32, "a whole number, 0 <= seed < 2**32"),
        ):
            if not is_right:
                raise OptionError(name, value, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """Evaluation of the draft.

    Attributes:
        alphas: alpha of the weights as stored, on the held-out sequences, with an interval over them: for the first
            drafted token of a round, the second, ... The last one holds for all later tokens too.
        tokens_per_s: prediction for this K: tau(K) for these alphas at every place, over the cost of a round, timed at
            the beginning with the models of the training (eager, a draft model in float32).
    """

    step: int
    seconds: float
    loss: float | None  # mean since the last check; None at the beginning
    alphas: tuple[Interval, ...]
    k: int  # the best, by prediction; 0 is plain decoding
    tokens_per_s: float

    @property
    def mean_alpha(self) -> float:
        """The measure of the best weights."""
        return sum(alpha.value for alpha in self.alphas) / len(self.alphas)


def distil(
    student: Student,
    output: Path,
    data: Mixture,
    held_out: Sequence[Text],
    recipe: Recipe,
    *,
    save_dtype: torch.dtype,
    on_step: Callable[[float], None] = lambda spent: None,
    on_check: Callable[[Check], None] = lambda check: None,
) -> list[Check]:
    """Train a draft in place, and store its best weights in ``output``. Returns all checks, including those before an
    interruption. The first precedes training.

    Args:
        output: becomes a checkpoint, in ``save_dtype``; the state for resuming is in ``output/training``.
        held_out: sequences to measure alpha on.
        on_step: called with the fraction of the budget that is spent.
        on_check: called with each check.
    """
    run = _Run(student, output, held_out, recipe, save_dtype, on_check)
    device = student.target.device
    parameters = student.module.to(device).parameters()
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    run.resume(optimizer)
    if run.is_over():
        return run.checks
    accelerator = Accelerator(cpu=device.type == "cpu")
    model, optimizer = accelerator.prepare(student.module, optimizer)
    drafter = student.as_stored(output.name, save_dtype)
    run.costs = _of_first(measure_round_costs(student.target, drafter, REJECTION))
    if not run.checks:  # of a draft that is not trained
        run.check()
    last = last_save = time.perf_counter()
    while not run.is_over():
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate(run.spent)
        first = (run.num_steps * accelerator.num_processes + accelerator.process_index) * recipe.batch_size
        ids = torch.stack([data[first + i] for i in range(recipe.batch_size)]).to(device)
        torch.manual_seed(recipe.seed + first)  # of dropout, so that a resumed run goes on alike
        model.train()
        value = _over_pairs(LOSSES[recipe.loss], student.pairs(model(input_ids=ids), ids), student.later)
        accelerator.backward(value)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        # All processes must decide alike, so they use the clock and alpha of the first.
        step_s, since_save_s = _of_first((now - last, now - last_save))
        is_due = run.advance(float(value.detach()), step_s)
        on_step(run.spent)
        if is_due:
            run.check()
        # Also after a check, so that stored weights and checks match.
        if is_due or since_save_s > recipe.save_s or run.is_over():
            run.save(optimizer)
            last_save = now
        last = time.perf_counter()  # checks are not training
    student.module.eval()
    return run.checks


@dataclass
class _Run:
    """Run of training: its settings, and its progress besides weights and optimizer."""

    student: Student
    output: Path
    held_out: Sequence[Text]
    recipe: Recipe
    save_dtype: torch.dtype
    on_check: Callable[[Check], None]
    num_steps: int = 0
    seconds: float = 0.0
    num_idle: int = 0
    best_alpha: float = -1.0  # the mean over the drafted tokens
    losses: list[float] = field(default_factory=list)  # since the last check
    checks: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checkpoint = self.output / "training" / "checkpoint.pt"
        self.costs: Mapping[int, float] = {}

    @property
    def spent(self) -> float:
        steps, seconds = self.recipe.num_steps, self.recipe.seconds or 1
        return min(1.0, self.seconds / seconds if steps is None else self.num_steps / steps)

    def is_over(self) -> bool:
        return self.spent >= 1.0 or self.num_idle >= self.recipe.patience

    def advance(self, loss: float, step_s: float) -> bool:
        """Count a step. Returns whether a check is due."""
        before, num_checks = self.spent, 20
        self.num_steps += 1
        self.seconds += step_s
        self.losses.append(loss)
        return math.floor(before * num_checks) < math.floor(self.spent * num_checks)

    def check(self) -> None:
        student = self.student
        drafter = student.as_stored(self.output.name, self.save_dtype)
        student.module.eval()
        try:
            alphas = student.alphas(drafter, self.held_out)
        except NumericsError:
            if not self.checks:
                raise
            # Training has spoilt the weights: nothing that they draft is verified.
            alphas = (Interval(0.0, 0.0, 0.0, 0.95),)
        alphas = _of_first(alphas)
        tau = expected_tokens([alphas[min(i, len(alphas) - 1)].value for i in range(max(self.costs))])
        speeds = {k: tau[k] / self.costs[k] for k in sorted(self.costs)}
        k = max(speeds, key=speeds.__getitem__)
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        found = Check(self.num_steps, self.seconds, loss, alphas, k, speeds[k])
        self.checks.append(found)
        self.losses, self.num_idle = [], self.num_idle + 1
        if found.mean_alpha > self.best_alpha:
            self.best_alpha, self.num_idle = found.mean_alpha, 0
            if PartialState().is_main_process:
                self._keep()
        self.on_check(found)

    def _keep(self) -> None:
        """Save the draft beside the existing one, then replace it file by file, the weights last."""
        part = self.output / "training" / "best.part"
        shutil.rmtree(part, ignore_errors=True)
        with without_bars():
            self.student.save(part, self.save_dtype)
        for path in sorted(part.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.replace(self.output / path.name)
        part.rmdir()

    def save(self, optimizer: Any) -> None:
        """Replace the checkpoint. In several processes only the first writes."""
        if not PartialState().is_main_process:
            return
        progress: dict[str, Any] = {name: getattr(self, name) for name in _PROGRESS}
        progress["checks"] = [asdict(check) for check in self.checks]
        state = {"module": self.student.module.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
        part = self.checkpoint.with_suffix(".part")
        with part.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())  # or a loss of power could leave a damaged checkpoint
        part.replace(self.checkpoint)

    def resume(self, optimizer: Any) -> None:
        """Go on from the checkpoint, if there is one. Raises FileError."""
        if not self.checkpoint.exists():
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            return
        try:
            state = torch.load(self.checkpoint, map_location=self.student.target.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise FileError(f"{self.checkpoint} cannot be read ({error}): remove it to start again") from None
        self.student.module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        progress = state["progress"]
        for one in progress["checks"]:
            alphas = tuple(Interval(**alpha) for alpha in one["alphas"])
            self.checks.append(Check(**one | {"alphas": alphas}))
        for name in _PROGRESS:
            setattr(self, name, progress[name])


def _of_first(value: Any) -> Any:
    if PartialState().num_processes == 1:
        return value
    values = [value]
    broadcast_object_list(values)
    return values[0]


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

    if places >= target_logits.shape[1]:
        sums = [part(target_logits, draft_logits)]
    else:
        parts = zip(torch.split(target_logits, places, 1), torch.split(draft_logits, places, 1), strict=True)
        sums = [checkpoint_part(part, p, q, use_reentrant=False) for p, q in parts]
    return torch.stack(sums).sum() / target_logits.shape[:2].numel()


def _rate(spent: float) -> float:
    """Factor of the learning rate: warm-up, plateau, linear decay to zero, in 2%, 38% and 60% of the budget."""
    return min(1.0, (spent + 1e-3) / 0.02, (1.0 - spent) / 0.6)


def check_same_run(output: Path, settings: dict[str, Any]) -> None:
    """Store the settings of a run in its folder, or compare them with the stored ones. Raises FileError: the folder
    belongs to another run."""
    path = output / "training" / "settings.json"
    if not path.exists():
        if (output / "config.json").exists():
            raise FileError(f"{output} already holds a model: choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(settings, indent=2).encode())
        return
    found = parse_row(str(path), read_bytes(path))
    differing = ", ".join(sorted(key for key in settings.keys() | found.keys() if settings.get(key) != found.get(key)))
    if differing:
        raise FileError(
            f"{output} holds another run (its {differing} differ): choose another folder, or remove this one"
        )
