"""The bounds of overlap and agreement: against all that p may be, and against simulated races."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from outrider.replay.bounds import Bounds, _excess, bounds
from outrider.replay.log import TopProbs
from outrider.sampling.noise import gumbels
from outrider.sampling.probs import draw_gumbel


def rows(num_rows: int, vocab_size: int, seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64)).softmax(-1)


def known_of(p: Tensor, ids: Tensor, n: int) -> TopProbs:
    top = p.topk(n, dim=-1)
    tail = p.scatter(1, top.indices, 0.0).sum(-1)
    return TopProbs(p.gather(1, ids[:, None])[:, 0], top.indices, top.values, tail)


def exact(p: Tensor, q: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    c = p.gather(1, ids[:, None]) / q.gather(1, ids[:, None])
    return torch.minimum(p, q).sum(-1), 1 / torch.maximum(p, c * q).sum(-1)


def assert_holds(found: Bounds, want: tuple[Tensor, Tensor]) -> None:
    for (low, high), value in zip((found.overlap, found.agreement), want, strict=True):
        assert bool((low <= value + 1e-12).all()) and bool((value <= high + 1e-12).all())


@pytest.mark.parametrize("n", [1, 5, 11, 12])
def test_they_hold_the_exact_value(n: int) -> None:
    """Whether or not the token of the text is among the N; and with all V known there is nothing between them."""
    p, q = rows(500, 12, 0), rows(500, 12, 1)
    ids = torch.arange(500) % 12
    found = bounds(q, ids, known_of(p, ids, n))
    assert_holds(found, exact(p, q, ids))
    width = float((found.overlap[1] - found.overlap[0]).max())
    # Of eleven, the mass of the twelfth is known as well.
    assert width == 0.0 if n == 12 else width < 1e-12 if n == 11 else width > 1e-3


def test_both_ends_are_attained() -> None:
    """By linear programs: the least of a convex sum, and the most over all corners of the set."""
    generator = np.random.default_rng(0)
    for _ in range(60):
        size, cap = int(generator.integers(1, 5)), float(generator.uniform(0.05, 0.3))
        weights = np.sort(generator.uniform(0, 0.4, size))
        mass = float(generator.uniform(0, size * cap))
        # Least: excess e_v >= p_v - w_v, e_v >= 0.
        program = linprog(
            c=[0] * size + [1] * size,
            A_ub=np.hstack((np.eye(size), -np.eye(size))),
            b_ub=weights,
            A_eq=[[1] * size + [0] * size],
            b_eq=[mass],
            bounds=[(0, cap)] * size + [(0, None)] * size,
        )
        num_full = int(mass / cap)
        corners = []
        for order in itertools.permutations(range(size)):
            p = np.zeros(size)
            p[list(order[:num_full])] = cap
            if num_full < size:
                p[order[num_full]] = mass - num_full * cap
            corners.append(float(np.maximum(p - weights, 0).sum()))
        least, most = _excess(*(torch.tensor(x, dtype=torch.float64)[None] for x in (weights, [mass], [cap])))
        assert float(least) == pytest.approx(program.fun, abs=1e-7)
        assert float(most) == pytest.approx(max(corners), abs=1e-12)


def test_agreement_is_that_of_two_races_with_the_same_noise() -> None:
    """Given the target's token. 200,000 races; a share is off by more than 5.1 standard deviations in less than one of
    a million. The overlap, which is what independent coins reach, is not what comes out."""
    p, q = rows(1, 6, 3, 1.0), rows(1, 6, 4, 1.0)
    num_races = 200_000
    noise = gumbels(torch.arange(num_races), torch.zeros(num_races, 1, dtype=torch.long), 6)[:, 0]
    of_target, of_draft = draw_gumbel(p, noise), draw_gumbel(q, noise)
    for token in range(6):
        ids = torch.tensor([token])
        is_there = of_target == token
        share = float((of_draft[is_there] == token).double().mean())
        low, high = bounds(q, ids, known_of(p, ids, 6)).agreement
        spread = (float(low) * (1 - float(low)) / int(is_there.sum())) ** 0.5
        assert low == high and abs(share - float(low)) <= 5.1 * spread
    agree = float((of_target == of_draft).double().mean())
    assert float(torch.minimum(p, q).sum()) - agree > 0.01


def test_greedy_and_impossible_rows() -> None:
    """One-hot rows: agreement is 1 or 0; and what the draft cannot draw does not agree."""
    p = torch.eye(3, dtype=torch.float64)
    q = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    ids = torch.tensor([0, 1, 2])
    found = bounds(q, ids, known_of(p, ids, 1))
    assert found.agreement[0].tolist() == found.agreement[1].tolist() == [1.0, 0.0, 0.5]
    assert found.overlap[0].tolist() == found.overlap[1].tolist() == [1.0, 0.0, 0.5]
