"""Training: the draft comes nearer, a killed run goes on as if nothing had been, and the best is what is kept."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.distill import train
from outrider.distill.data import Mixture
from outrider.distill.heads import HeadStudent, new_eagle3
from outrider.distill.student import ModelStudent, Student, new_draft
from outrider.distill.train import LOSSES, Check, Recipe, check_same_run, distil, kl, lk, tv
from outrider.drafters.model import model_drafter
from outrider.errors import FileError, OptionError
from outrider.measure.along import measure_alpha, overlap
from outrider.measure.teacher_forcing import Text
from outrider.models.loading import Checkpoint, build_lm
from pairs import random_llama, word_tokenizer

WRITTEN = torch.randint(97, (40, 24), generator=torch.Generator().manual_seed(0))
HELD_OUT = [Text(ids, 4) for ids in torch.randint(97, (6, 24), generator=torch.Generator().manual_seed(1)).tolist()]
TARGET = random_llama().float()


def run(
    output: Path, *, kind: str = "model", on_step: Callable[[float], None] = lambda spent: None, **more: Any
) -> list[Check]:
    lm = build_lm(Checkpoint("target", TARGET, None), 97)
    student: Student
    if kind == "model":
        student = ModelStudent(lm, new_draft(TARGET.config, (1, 16), seed=0), word_tokenizer())
    else:
        student = HeadStudent(lm, new_eagle3(lm, torch.arange(0, 97, 2), seed=0), 3)
    return distil(
        student,
        output,
        Mixture(None, WRITTEN, 24, 1.0, 0),
        HELD_OUT,
        Recipe(**{"batch_size": 4, "learning_rate": 1e-2, "save_s": 0.0} | more),
        save_dtype=torch.float32,
        on_step=on_step,
    )


def alpha_of(folder: Path) -> float:
    lms = [build_lm(Checkpoint("m", m, None), 97) for m in (TARGET, AutoModelForCausalLM.from_pretrained(folder))]
    return measure_alpha(lms[0], model_drafter(lms[1]), HELD_OUT).value


def test_training_raises_alpha(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By losses in parts of two rows."""
    monkeypatch.setattr(train, "_LOSS_NUMBERS", 2 * 97)
    checks = run(tmp_path, num_steps=40, loss="lk", save_s=1e9)
    assert len(checks) == 21 and [check.step for check in checks[:3]] == [0, 2, 4]
    best = max(check.alphas[0].value for check in checks)
    assert best > checks[0].alphas[0].value + 0.05
    assert checks[0].loss is None and checks[1].loss is not None and checks[-1].tokens_per_s > 0
    assert alpha_of(tmp_path) == pytest.approx(best, abs=1e-5)


def check_finished(output: Path, checks: list[Check], **how: Any) -> None:
    """Given again, the command does nothing."""
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    steps: list[float] = []
    assert repr(run(output, on_step=steps.append, **how)) == repr(checks)  # a loss may be NaN
    assert not steps and {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_training_resumes_after_a_kill(tmp_path: Path) -> None:
    """Bit for bit as if it had not been killed, twice."""
    kind = "eagle3"
    whole = run(tmp_path / "whole", num_steps=20, kind=kind)

    for at in (0.4, 0.75):

        def on_step(spent: float, at: float = at) -> None:
            if spent >= at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", num_steps=20, kind=kind, on_step=on_step)
    resumed = run(tmp_path / "cut", num_steps=20, kind=kind)
    assert [(c.step, c.loss, c.alphas) for c in resumed] == [(c.step, c.loss, c.alphas) for c in whole]
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_run_goes_on_with_more_steps_and_refuses_a_damaged_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, num_steps=3)
    checks = run(tmp_path, num_steps=6)
    assert [path.name for path in (tmp_path / "training").iterdir()] == ["checkpoint.pt"]
    check_finished(tmp_path, checks, num_steps=6)
    checkpoint = tmp_path / "training" / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-99])
    with pytest.raises(FileError, match="remove it to start again"):
        run(tmp_path, num_steps=6)


def test_training_stops_early_and_keeps_the_best_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that throws the weights about: the weights of the beginning stay. It also ends by a (made-up) clock."""
    monkeypatch.setattr(train, "_rate", lambda spent: 1.0)
    how: dict[str, Any] = {"num_steps": 100, "learning_rate": 30.0, "patience": 3}
    checks = run(tmp_path, **how)
    best = max(range(len(checks)), key=lambda i: checks[i].alphas[0].value)
    assert len(checks) == best + 4 < 21
    assert alpha_of(tmp_path) == pytest.approx(checks[best].alphas[0].value, abs=1e-5)
    check_finished(tmp_path, checks, **how)
    ticks = iter(range(10**6))
    monkeypatch.setattr(train.time, "perf_counter", lambda: float(next(ticks)))
    last = run(tmp_path / "timed", seconds=10.0, patience=20)[-1]
    assert (last.seconds, last.step) == (10.0, 10)


def test_another_run_is_left_alone_and_bad_options_are_refused(tmp_path: Path) -> None:
    check_same_run(tmp_path, {"loss": "kl", "seed": 1})
    check_same_run(tmp_path, {"loss": "kl", "seed": 1})
    with pytest.raises(FileError, match=r"its loss, seed differ"):
        check_same_run(tmp_path, {"loss": "tv", "seed": 2})
    random_llama().save_pretrained(tmp_path / "model")
    with pytest.raises(FileError, match="already holds a model"):
        check_same_run(tmp_path / "model", {})
    for name, options in (("steps", {"num_steps": None}), ("steps", {"seconds": 1.0}), ("loss", {"loss": "mse"})):
        with pytest.raises(OptionError, match=f"{name} = "):
            Recipe(**{"num_steps": 5} | options)


P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)


def test_losses_by_hand() -> None:
    """Values and gradients; the weight of lk, exp(-3 alpha), is not itself a way to a lower loss."""
    values = {kl: 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4), tv: 0.3}
    weight = math.exp(-3 * 0.7)  # alpha of P and Q
    values[lk] = weight * values[kl] + (1 - weight) * values[tv]
    grads = {}
    for loss, want in values.items():
        logits = Q.log().clone().requires_grad_()
        value = loss(P.log(), logits)
        value.backward()
        assert float(value.detach()) == pytest.approx(want, abs=1e-12)
        grads[loss] = logits.grad
    torch.testing.assert_close(grads[kl], Q - P)
    torch.testing.assert_close(grads[lk], weight * grads[kl] + (1 - weight) * grads[tv])


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_zero_for_equal_distributions_alone(name: str) -> None:
    """Row by row; a constant added to the logits changes nothing; logits that underflow to zero give numbers."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 4, 5, 11, dtype=torch.float64, generator=generator)
    value = LOSSES[name](p, q)
    assert value.shape == (4, 5) and bool((value > 1e-3).all())
    torch.testing.assert_close(LOSSES[name](p, p + 1), torch.zeros(4, 5, dtype=torch.float64))
    torch.testing.assert_close(tv(p, q), 1 - overlap(p.softmax(-1), q.softmax(-1)))
    far = torch.tensor([200.0, 0.0, -200.0])
    logits = far.flip(0).clone().requires_grad_()
    loss = LOSSES[name](far, logits)
    loss.backward()
    assert bool(loss.isfinite()) and logits.grad is not None and bool(logits.grad.isfinite().all())
