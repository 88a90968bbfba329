"""Bounds on functions of p and q at a position where only the largest probabilities of p are known.

Known are p at the sequence's token x, the N largest probabilities, and hence the mass m of the others. Each of these is
at most P, the smallest of the known N. Bounded are:

- the overlap sum_v min(p(v), q(v)), whose mean is alpha;
- g = 1 / sum_v max(p(v), c q(v)) with c = p(x)/q(x): the probability that the argmax of log q plus Gumbel noise is x,
  given that the argmax of log p plus the same noise is. (Both are v with probability 1 / sum_u max(p(u)/p(v),
  q(u)/q(v)): the smallest of independent exponential times, one for each u, of rate max(...). Maddison et al.
  1411.0030 for the race; Daliri et al. 2408.07978 for the pair.)

Over the unknown tokens both reduce to one sum, by min(p, q) = p - (p - q)+ and max(p, c q) = c q + (p - c q)+:

    E = sum_v (p(v) - c q(v))+    with 0 <= p(v) <= P and sum_v p(v) = m.

*Least:* each v takes up to min(P, c q(v)) without adding to E, any excess counts in full, so min E = (m -
sum_v min(P, c q(v)))+. *Most:* E is convex in p, so it is largest at a corner of the set: P at some tokens, the rest at
one more, nothing elsewhere. Giving P to v adds (P - c q(v))+, which falls with q(v); exchanging two tokens shows that
the tokens of smallest q are the best choice, and the one of largest q among them for the rest. Both ends are attained.

This module knows tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.replay.log import TopProbs
from outrider.sampling.probs import wide

_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower and upper bounds of the overlap and of g at M places; equal where p is known in full."""

    overlap: tuple[Tensor, Tensor]  # [M], [M]
    agreement: tuple[Tensor, Tensor]  # [M], [M]


def agreement(target_probs: Tensor, draft_probs: Tensor, token_ids: Tensor) -> Tensor:
    """g where p is known in full. [M, V], [M, V], [M] -> [M]"""
    ids = token_ids[:, None]
    p_x, q_x = target_probs.gather(1, ids).clamp_min(_TINY), draft_probs.gather(1, ids)
    can_agree = q_x > 0
    c = p_x / torch.where(can_agree, q_x, 1.0)
    total = torch.maximum(target_probs, c * draft_probs).sum(dim=1, keepdim=True)
    return torch.where(can_agree, (1.0 / total).clamp_max(1.0), 0.0)[:, 0]


def bounds(draft_probs: Tensor, token_ids: Tensor, known: TopProbs) -> Bounds:
    """Bound the overlap and g.

    Args:
        draft_probs: q, rows that sum to 1. [M, V]
        token_ids: the sequence's tokens. [M]
        known: the known part of p at these places.
    """
    q = wide(draft_probs)
    ids = token_ids[:, None]
    p_x = wide(known.token_probs)[:, None].clamp_min(_TINY)  # [M, 1]; a sampled token has p > 0, up to rounding
    top_probs = wide(known.top_probs)
    q_x = q.gather(1, ids)
    is_listed = torch.zeros_like(q, dtype=torch.bool).scatter_(1, known.top_ids, True)
    is_alone = ~is_listed.gather(1, ids)  # x is known, though not among the N  [M, 1]
    is_unknown = ~is_listed.scatter(1, ids, True)
    mass = (wide(known.tail)[:, None] - torch.where(is_alone, p_x, 0.0)).clamp_min(0.0)
    cap = top_probs[:, -1:]
    q_unknown = torch.where(is_unknown, q, torch.inf).sort(dim=1).values  # known ones sort last, as infinite

    def known_sum(of: Tensor, of_x: Tensor) -> Tensor:
        return of.sum(dim=1, keepdim=True) + torch.where(is_alone, of_x, 0.0)

    q_top = q.gather(1, known.top_ids)
    overlap = known_sum(torch.minimum(top_probs, q_top), torch.minimum(p_x, q_x)) + mass
    least, most = _excess(q_unknown, mass, cap)
    # Where q(x) = 0 the draft cannot have drawn x, and c has no meaning.
    can_agree = q_x > 0
    c = p_x / torch.where(can_agree, q_x, 1.0)
    q_rest = torch.where(is_unknown, q, 0.0).sum(dim=1, keepdim=True)
    total = known_sum(torch.maximum(top_probs, c * q_top), p_x) + c * q_rest
    c_least, c_most = _excess(c * q_unknown, mass, cap)

    def agreement(excess: Tensor) -> Tensor:
        return torch.where(can_agree, (1.0 / (total + excess)).clamp_max(1.0), 0.0)[:, 0]

    return Bounds(
        overlap=((overlap - most)[:, 0], (overlap - least)[:, 0]),
        agreement=(agreement(c_most), agreement(c_least)),
    )


def _excess(weights: Tensor, mass: Tensor, cap: Tensor) -> tuple[Tensor, Tensor]:
    """Bound sum_v (p(v) - weight(v))+ from below and above.

    Args:
        weights: ascending; infinite where p is known. [M, V]
        mass, cap: m and P. [M, 1]

    Returns:
        [M, 1], [M, 1]
    """
    room = torch.where(weights.isfinite(), torch.minimum(weights, cap), 0.0).sum(dim=1, keepdim=True)
    least = (mass - room).clamp_min(0.0)
    num_tokens = weights.shape[1]
    num_full = torch.where(cap > 0, mass / cap, 0.0).floor().clamp_max(num_tokens - 1).long()
    gains = (cap - weights).clamp_min(0.0).cumsum(dim=1)
    full_gain = torch.where(num_full > 0, gains.gather(1, (num_full - 1).clamp_min(0)), 0.0)
    most = full_gain + (mass - num_full * cap - weights.gather(1, num_full)).clamp_min(0.0)
    return least, torch.maximum(least, most)
