"""The losses: by their definitions, in float64, and as gradients."""

import math

import pytest
import torch

from outrider.distill.losses import LOSSES, kl, lk, tv
from outrider.measure.along import overlap

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)


def test_by_hand() -> None:
    forward = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)
    for loss, want in ((kl, forward), (tv, 0.3)):
        assert float(loss(P.log(), Q.log())) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_shape_shift_and_zero(name: str) -> None:
    """Row by row; a constant added to the logits changes nothing; equal distributions have no loss, others have one."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 4, 5, 11, dtype=torch.float64, generator=generator)
    value = LOSSES[name](p, q)
    assert value.shape == (4, 5) and bool((value > 1e-3).all())
    torch.testing.assert_close(LOSSES[name](p + 3, q - 2), value)
    torch.testing.assert_close(LOSSES[name](p, p + 1), torch.zeros(4, 5, dtype=torch.float64))


def test_lk_goes_from_kl_to_tv() -> None:
    """Weight and gradient: the weight exp(-3 alpha) is not itself a way to a lower loss."""
    weight = math.exp(-3 * 0.7)  # alpha of P and Q
    logits = Q.log().clone().requires_grad_()
    lk(P.log(), logits).backward()
    parts = []
    for loss in (kl, tv):
        one = Q.log().clone().requires_grad_()
        value = loss(P.log(), one)
        value.backward()
        assert one.grad is not None
        parts.append((float(value.detach()), one.grad))
    assert float(lk(P.log(), Q.log())) == pytest.approx(weight * parts[0][0] + (1 - weight) * parts[1][0], abs=1e-12)
    torch.testing.assert_close(logits.grad, weight * parts[0][1] + (1 - weight) * parts[1][1])


def test_tv_is_what_alpha_lacks() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 7, 11, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(tv(p, q), 1 - overlap(p.softmax(-1), q.softmax(-1)))


def test_gradient_of_kl_is_q_minus_p() -> None:
    logits = Q.log().clone().requires_grad_()
    kl(P.log(), logits).backward()
    torch.testing.assert_close(logits.grad, Q - P)


@pytest.mark.parametrize("name", LOSSES)
def test_far_apart_is_finite(name: str) -> None:
    """Logits that underflow to probability zero on one side or the other give numbers, with numbers for gradients."""
    far = torch.tensor([200.0, 0.0, -200.0])
    logits = far.flip(0).clone().requires_grad_()
    loss = LOSSES[name](far, logits)
    loss.backward()
    assert bool(loss.isfinite()) and logits.grad is not None and bool(logits.grad.isfinite().all())
