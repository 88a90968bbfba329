"""The losses: by their definitions, in float64, and as gradients."""

import math

import pytest
import torch

from outrider.distill.train import LOSSES, kl, lk, tv
from outrider.measure.along import overlap

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)


def test_by_hand() -> None:
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
    """Row by row; a constant added to the logits changes nothing; logits that underflow to probability zero on one side
    or the other give numbers, with numbers for gradients."""
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
