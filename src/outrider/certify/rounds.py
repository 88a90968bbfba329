"""The output distribution of one round and of two under a rule, by enumeration.

- ``round_gap``: the distribution of three tokens, the first from one round with two drafted tokens. Every draft is
  followed. The rule itself is evaluated: its draws and its verdict are piecewise constant in its uniform numbers, and
  bisection locates the edges of the pieces, so that the distribution is a sum over pieces. This assumes that each
  accept number has one edge, whatever the others are, and that ids rise with the uniform number that draws them.
- ``two_rounds_gap``: the distribution of four tokens of a toy, from two rounds, with the noise that the loop would use.
- ``coupling_gap`` and ``noise_gap``, for ``gumbel``, which has other noise: its tokens, compared with those of the
  target alone; and its noise, which must depend on the position of a token and not on the round.

This module knows the rules' noise, but none of their formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from outrider.records import Draft
from outrider.sampling.noise import GumbelNoise, NoiseAhead, RoundUniforms
from outrider.sampling.probs import draw_gumbel
from outrider.sampling.rules import GUMBEL, Rule

_K = 2
_LEAST, _MOST = 2.0**-60, 1 - 2.0**-53  # as small and as large as a uniform number may be
_NUM_HALVINGS = 54  # below the resolution of float64 in [0, 1]
_NUM_NOISES = 256  # for gumbel, in each context
# A toy with many rejections, which reveal much about the tokens that the same numbers draft next: the draft hardly ever
# proposes 0, which the target often generates.
_TOY_TARGET = ((0.3, 0.3, 0.4), (0.3, 0.5, 0.2), (0.4, 0.3, 0.3))
_TOY_DRAFT = ((0.01, 0.29, 0.7), (0.1, 0.2, 0.7), (0.35, 0.35, 0.3))
_TOY_LAST = 1  # token before the first round
_NUM_TOKENS = 4  # compared after two rounds
_START = 5  # length at which the first round begins; any will do
_NUM_SEEDS = 8  # for comparing random numbers


@dataclass(frozen=True, slots=True)
class Tree:
    """p and q after a context and after the tokens that may follow, restricted to M tokens after each prefix.

    Attributes:
        p: after 0, 1 and 2 tokens. [M], [M, M], [M, M, M]
        q: after 0 and 1 tokens. [M], [M, M]
    """

    p: tuple[Tensor, Tensor, Tensor]
    q: tuple[Tensor, Tensor]

    def target_distribution(self) -> Tensor:
        """Target's distribution of three tokens. [M, M, M]"""
        p0, p1, p2 = self.p
        return p0[:, None, None] * p1[:, :, None] * p2


def round_gap(rule: Rule, tree: Tree) -> float:
    """Largest difference of a probability of three tokens between the rule and the target alone."""
    return float((round_distribution(rule, tree) - tree.target_distribution()).abs().max())


def round_distribution(rule: Rule, tree: Tree) -> Tensor:
    """Distribution of three tokens: a round with two drafted ones under a rule, then the target. [M, M, M]"""
    _, p1, p2 = tree.p
    pieces = _pieces(rule, tree)
    distribution = torch.zeros_like(p2)
    for (a, *others), volume in zip(pieces.committed, pieces.bounds.diff(dim=2).prod(dim=1)[:, 0], strict=True):
        if not others:
            distribution[a] += volume * p1[a][:, None] * p2[a]
        elif len(others) == 1:
            distribution[a, others[0]] += volume * p2[a, others[0]]
        else:
            distribution[a, others[0], others[1]] += volume
    return distribution


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Partition of a round: each piece is a box of uniform numbers that lead to the same tokens.

    Attributes:
        bounds: of the numbers, in the order of ``RoundUniforms.values``. [C, 2K+1, 2]
        committed: the tokens of each piece.
    """

    bounds: Tensor
    committed: list[tuple[int, ...]]


def _pieces(rule: Rule, tree: Tree) -> _Pieces:
    """Partition a round with two drafted tokens; pieces without volume are left out."""
    (p0, p1, p2), (q0, q1) = tree.p, tree.q
    m = len(p0)
    nodes = torch.cat((q0[None], q1))  # [M+1, M]
    drawn = _intervals_of_ids(lambda index, uniforms: rule.draw(nodes[index], uniforms), m + 1, m)  # [M+1, M, 2]
    widths = drawn.diff(dim=2)[..., 0]
    ids = (widths[0, :, None] * widths[1:]).nonzero()  # [N, 2]
    first, second = ids.T
    drafts = torch.stack((drawn[0, first], drawn[1 + first, second]), dim=1)  # [N, 2, 2]
    rows = torch.stack((p0.expand(len(ids), m), p1[first], p2[first, second]), dim=1)  # [N, 3, M]
    q_rows = torch.stack((q0.expand(len(ids), m), q1[first]), dim=1)  # [N, 2, M]

    def verify(index: Tensor, coins: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Number of accepted tokens and next token, for drafts by index. [N'], [N', 2], [N'] -> [N'], [N']"""
        draft = Draft(ids[index], q_rows[index], torch.full((len(index),), _K))
        verdict = rule.verify(rows[index], draft, RoundUniforms.of(torch.full_like(coins, torch.nan), coins, uniforms))
        return verdict.num_accepted, verdict.next_ids

    edges = _coin_edges(verify, len(ids))  # [N, 2]
    below = torch.tensor(list(product((True, False), repeat=_K)))[:, None]  # [4, 1, 2]
    ends = torch.where(below, 0.0, edges), torch.where(below, edges, 1.0)
    tossed = torch.stack(ends, dim=3).flatten(0, 1)  # [4N, 2, 2]: the accept numbers of all drafts, for each outcome
    (boxes,) = tossed.diff(dim=2).prod(dim=1)[:, 0].nonzero(as_tuple=True)  # [N']
    tossed, index = tossed[boxes], boxes % len(ids)
    coins = tossed.mean(dim=2)
    num_accepted, _ = verify(index, coins, torch.full((len(index),), 0.5, dtype=torch.float64))
    following = _intervals_of_ids(partial(_next_ids, verify, index, coins), len(index), m)  # [N', M, 2]
    at, next_ids = (following[..., 0] < following[..., 1]).nonzero(as_tuple=True)  # [C]
    pairs = torch.stack((tossed, drafts[index]), dim=2).flatten(1, 2)  # [N', 4, 2]
    lengths, drafted = num_accepted.tolist(), ids[index].tolist()
    committed = [
        (*drafted[i][: lengths[i]], next_id) for i, next_id in zip(at.tolist(), next_ids.tolist(), strict=True)
    ]
    return _Pieces(torch.cat((following[at, next_ids][:, None], pairs[at]), dim=1), committed)


Verify = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _next_ids(verify: Verify, index: Tensor, coins: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
    """Next tokens, for rows of an index and its accept numbers. [N']"""
    return verify(index[rows], coins[rows], uniforms)[1]


def _coin_edges(verify: Verify, num_paths: int) -> Tensor:
    """Edge of each accept number, with the others at either end; 1 for one without an edge. [N, K]"""
    cases = list(product(range(_K), (_LEAST, _MOST)))  # bisected together
    moved = torch.tensor([[coin] for coin, _ in cases]).repeat_interleave(num_paths, dim=0)  # [2K N, 1]
    others = torch.tensor([[other] * _K for _, other in cases], dtype=torch.float64).repeat_interleave(num_paths, dim=0)
    index = torch.arange(num_paths).repeat(len(cases))
    half = torch.full((len(index),), 0.5, dtype=torch.float64)

    def lengths(values: Tensor) -> Tensor:
        return verify(index, others.scatter(1, moved, values[:, None]), half)[0]

    low, high = torch.full_like(half, _LEAST), torch.full_like(half, _MOST)
    before = lengths(low)
    turns = lengths(high) != before
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        is_same = lengths(middle) == before
        low, high = torch.where(is_same, middle, low), torch.where(is_same, high, middle)
    return torch.where(turns, high, 1.0).view(_K, 2, num_paths).amin(dim=1).T


def _intervals_of_ids(ids_of: Callable[[Tensor, Tensor], Tensor], num_rows: int, m: int) -> Tensor:
    """Intervals of uniform numbers that lead to each id; ids must be non-decreasing in them.

    Args:
        ids_of: rows and their uniform numbers -> ids. [N'], [N'] -> [N']

    Returns:
        [N, M, 2]
    """
    rows = torch.arange(num_rows).repeat(m - 1)
    tokens = torch.arange(m - 1).repeat_interleave(num_rows)
    low = torch.zeros(len(rows), dtype=torch.float64)
    high = torch.ones(len(rows), dtype=torch.float64)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        is_below = ids_of(rows, middle) <= tokens
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    edges = high.view(m - 1, num_rows).T  # [N, M-1]
    ends = torch.zeros(num_rows, 1, dtype=torch.float64)
    return torch.cat((ends, edges, ends + 1), dim=1).unfold(1, 2, 1)


def coupling_gap(tree: Tree) -> float:
    """Share of noises with which ``gumbel`` commits other tokens than the target alone."""
    (p0, p1, p2), (q0, q1) = tree.p, tree.q
    seeds = torch.arange(_NUM_NOISES)
    noise = GUMBEL.make_noise(seeds, torch.ones_like(seeds), _K, len(p0))
    a = GUMBEL.draw(q0.expand(_NUM_NOISES, -1), noise.at(0))
    b = GUMBEL.draw(q1[a], noise.at(1))
    rows = torch.stack((p0.expand(_NUM_NOISES, -1), p1[a], p2[a, b]), dim=1)
    q_rows = torch.stack((q0.expand(_NUM_NOISES, -1), q1[a]), dim=1)
    ids = torch.stack((a, b), dim=1)
    verdict = GUMBEL.verify(rows, Draft(ids, q_rows, torch.full_like(seeds, _K)), noise)
    x = draw_gumbel(p0.expand(_NUM_NOISES, -1), noise.at(0).values())
    y = draw_gumbel(p1[x], noise.at(1).values())
    z = draw_gumbel(p2[x, y], noise.at(2).values())
    alone = torch.stack((x, y, z), dim=1)
    n = verdict.num_accepted[:, None]
    offsets = torch.arange(_K + 1)
    committed = torch.where(offsets < n, torch.cat((ids, ids[:, :1]), dim=1), verdict.next_ids[:, None])
    return float(((committed != alone) & (offsets <= n)).any(dim=1).double().mean())


@cache
def two_rounds_gap(rule: Rule) -> float:
    """Largest difference of a probability of four tokens between two rounds of a toy and its target alone. The toy is a
    Markov chain; if the rounds commit fewer tokens, the target continues.

    Numbers that the second round shares with the first are found by comparing the numbers that the loop would use.
    """
    p, q = (torch.tensor(rows, dtype=torch.float64) for rows in (_TOY_TARGET, _TOY_DRAFT))
    m = len(p)
    pieces = [_pieces(rule, Tree((p[last], p, p.expand(m, m, m)), (q[last], q))) for last in range(m)]
    distribution = torch.zeros((m,) * _NUM_TOKENS, dtype=torch.float64)
    first = pieces[_TOY_LAST]
    for length in range(1, _K + 2):
        uses = _uses(rule, length, m)
        for bounds, committed in zip(first.bounds, first.committed, strict=True):
            if len(committed) != length:
                continue
            second = pieces[committed[-1]]
            volumes = _shared_volumes(bounds, second.bounds, uses)
            for index in volumes.nonzero().flatten().tolist():
                text = (*committed, *second.committed[index])[:_NUM_TOKENS]
                distribution[text] += volumes[index] * _chain_distribution(p, text[-1], _NUM_TOKENS - len(text))
    return float((distribution - _chain_distribution(p, _TOY_LAST, _NUM_TOKENS)).abs().max())


def _chain_distribution(p: Tensor, last: int, num_tokens: int) -> Tensor:
    """Distribution of the next tokens of a Markov chain. [M, M ...]"""
    distribution = torch.ones_like(p[0])
    for _ in range(num_tokens):
        distribution = p.view(*p.shape, *[1] * (distribution.ndim - 1)) * distribution
    return distribution[last]


def _uses(rule: Rule, length: int, vocab_size: int) -> Tensor:
    """Index of the first equal number, for each number of a round and of the next, ``length`` tokens later.
    [2 (2K+1)]"""
    seeds = torch.arange(_NUM_SEEDS)
    ahead = NoiseAhead(rule.make_noise, _K, vocab_size)
    both = []
    for start in (_START, _START + length):
        both.append(ahead.at(seeds, torch.full_like(seeds, start), _K).values)
    values = torch.cat(both, dim=1)
    return (values[:, :, None] == values[:, None, :]).all(dim=0).long().argmax(dim=1)


def _shared_volumes(one: Tensor, others: Tensor, uses: Tensor) -> Tensor:
    """Joint volume of a piece of one round with each piece of the next, which may share numbers.
    [N, 2], [C, N, 2], [2N] -> [C]"""
    bounds = torch.cat((one.expand_as(others), others), dim=1)  # [C, 2N, 2]
    volumes = torch.ones(len(others), dtype=bounds.dtype)
    for number in uses.unique():
        own = bounds[:, uses == number]
        volumes *= (own[..., 1].amin(dim=1) - own[..., 0].amax(dim=1)).clamp_min(0.0)
    return volumes


def noise_gap(make_noise: Callable[[Tensor, Tensor, int, int], GumbelNoise]) -> float:
    """Share of the noise in two successive rounds that is not a function of its position: different between rounds, or
    equal in two positions."""
    seeds = torch.arange(_NUM_SEEDS)
    is_wrong = []
    for length in range(1, _K + 2):
        ahead = NoiseAhead(make_noise, _K, len(_TOY_TARGET))
        rounds = [ahead.at(seeds, torch.full_like(seeds, start), _K) for start in (_START, _START + length)]
        for i, j in product(range(_K + 1), repeat=2):
            one, other = rounds[0].at(i).values(), rounds[1].at(j).values()  # [S, V]
            is_wrong.append((one == other) != (i == length + j))
    return float(torch.stack(is_wrong).double().mean())
