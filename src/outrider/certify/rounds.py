"""The law of one round and of two under a rule, by enumeration.

- ``round_gap``: the law of three tokens, the first from one round with two drafted tokens. Every draft is followed. The
  rule itself is evaluated: its draws and its verdict are piecewise constant in its uniform numbers, and bisection
  locates the edges of the pieces, so that the law is a sum over pieces. This assumes that each coin has one edge,
  whatever the other coins are, and that ids rise with the uniform number that they are drawn with.
- ``two_rounds_gap``: the law of four tokens of a toy, from two rounds, with the noise that the loop would give them.
- ``coupling_gap`` and ``noise_gap``, for ``gumbel``, which has other noise: its tokens, against those that the target
  alone takes; and its noise, which must depend on the position of a token and not on the round.

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
# A toy on which many drafts are rejected, and what was rejected says much about the tokens drafted next with the same
# numbers: the draft hardly ever proposes 0, which the target often generates.
_TOY_TARGET = ((0.3, 0.3, 0.4), (0.3, 0.5, 0.2), (0.4, 0.3, 0.3))
_TOY_DRAFT = ((0.01, 0.29, 0.7), (0.1, 0.2, 0.7), (0.35, 0.35, 0.3))
_TOY_LAST = 1  # token before the first round
_NUM_TOKENS = 4  # whose law two rounds are judged by
_START = 5  # length at which the first round begins; any will do
_NUM_SEEDS = 8  # by which numbers are compared


@dataclass(frozen=True, slots=True)
class Tree:
    """p and q after a context and after the tokens that may follow, restricted to M tokens after each prefix.

    Attributes:
        p: after 0, 1 and 2 tokens. [M], [M, M], [M, M, M]
        q: after 0 and 1 tokens. [M], [M, M]
    """

    p: tuple[Tensor, Tensor, Tensor]
    q: tuple[Tensor, Tensor]

    def target_law(self) -> Tensor:
        """The target's distribution of three tokens. [M, M, M]"""
        p0, p1, p2 = self.p
        return p0[:, None, None] * p1[:, :, None] * p2


def round_gap(rule: Rule, tree: Tree) -> float:
    """The largest difference between probabilities of three tokens, under the rule and under the target alone."""
    return float((round_law(rule, tree) - tree.target_law()).abs().max())


def round_law(rule: Rule, tree: Tree) -> Tensor:
    """The distribution of three tokens: a round with two drafted ones under a rule, then the target. [M, M, M]"""
    _, p1, p2 = tree.p
    pieces = _pieces(rule, tree)
    law = torch.zeros_like(p2)
    for (a, *others), volume in zip(pieces.committed, pieces.bounds.diff(dim=2).prod(dim=1)[:, 0], strict=True):
        if not others:
            law[a] += volume * p1[a][:, None] * p2[a]
        elif len(others) == 1:
            law[a, others[0]] += volume * p2[a, others[0]]
        else:
            law[a, others[0], others[1]] += volume
    return law


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A round, cut up: each piece is a box of uniform numbers that lead to the same tokens.

    Attributes:
        bounds: of the numbers, in the order of ``RoundUniforms.values``. [C, 2K+1, 2]
        committed: the tokens of each piece.
    """

    bounds: Tensor
    committed: list[tuple[int, ...]]


def _pieces(rule: Rule, tree: Tree) -> _Pieces:
    """The pieces of a round with two drafted tokens, but for those without volume."""
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

    def judge(index: Tensor, coins: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Number of accepted tokens and the next token, for the drafts of this index. [N'], [N', 2], [N'] -> [N'],
        [N']"""
        draft = Draft(ids[index], q_rows[index], torch.full((len(index),), _K))
        verdict = rule.verify(rows[index], draft, RoundUniforms.of(torch.full_like(coins, torch.nan), coins, uniforms))
        return verdict.num_accepted, verdict.next_ids

    edges = _coin_edges(judge, len(ids))  # [N, 2]
    below = torch.tensor(list(product((True, False), repeat=_K)))[:, None]  # [4, 1, 2]
    ends = torch.where(below, 0.0, edges), torch.where(below, edges, 1.0)
    tossed = torch.stack(ends, dim=3).flatten(0, 1)  # [4N, 2, 2]: the coins of all drafts, for each outcome of them
    (boxes,) = tossed.diff(dim=2).prod(dim=1)[:, 0].nonzero(as_tuple=True)  # [N']
    tossed, index = tossed[boxes], boxes % len(ids)
    coins = tossed.mean(dim=2)
    num_accepted, _ = judge(index, coins, torch.full((len(index),), 0.5, dtype=torch.float64))
    following = _intervals_of_ids(partial(_next_ids, judge, index, coins), len(index), m)  # [N', M, 2]
    at, next_ids = (following[..., 0] < following[..., 1]).nonzero(as_tuple=True)  # [C]
    pairs = torch.stack((tossed, drafts[index]), dim=2).flatten(1, 2)  # [N', 4, 2]
    lengths, drafted = num_accepted.tolist(), ids[index].tolist()
    committed = [
        (*drafted[i][: lengths[i]], next_id) for i, next_id in zip(at.tolist(), next_ids.tolist(), strict=True)
    ]
    return _Pieces(torch.cat((following[at, next_ids][:, None], pairs[at]), dim=1), committed)


Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _next_ids(judge: Judge, index: Tensor, coins: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
    """The next tokens, for rows of an index and its coins. [N']"""
    return judge(index[rows], coins[rows], uniforms)[1]


def _coin_edges(judge: Judge, num_paths: int) -> Tensor:
    """The edge of each coin, with the other coins at either end; 1 for a coin without an edge. [N, K]"""
    cases = list(product(range(_K), (_LEAST, _MOST)))  # bisected together
    moved = torch.tensor([[coin] for coin, _ in cases]).repeat_interleave(num_paths, dim=0)  # [2K N, 1]
    others = torch.tensor([[other] * _K for _, other in cases], dtype=torch.float64).repeat_interleave(num_paths, dim=0)
    index = torch.arange(num_paths).repeat(len(cases))
    half = torch.full((len(index),), 0.5, dtype=torch.float64)

    def lengths(values: Tensor) -> Tensor:
        return judge(index, others.scatter(1, moved, values[:, None]), half)[0]

    low, high = torch.full_like(half, _LEAST), torch.full_like(half, _MOST)
    before = lengths(low)
    turns = lengths(high) != before
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        is_same = lengths(middle) == before
        low, high = torch.where(is_same, middle, low), torch.where(is_same, high, middle)
    return torch.where(turns, high, 1.0).view(_K, 2, num_paths).amin(dim=1).T


def _intervals_of_ids(ids_of: Callable[[Tensor, Tensor], Tensor], num_rows: int, m: int) -> Tensor:
    """The uniform numbers that lead to each id, where ids are non-decreasing in them.

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
    """The share of noises with which ``gumbel`` commits a token other than the target alone would take."""
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
    """The largest difference between probabilities of four tokens, of two rounds of a toy and of its target alone. The
    toy is a chain, whose p and q depend on the last token only; if the rounds commit fewer tokens, the target goes on.

    Which numbers the second round shares with the first is seen from the numbers themselves, as the loop gets them.
    """
    p, q = (torch.tensor(rows, dtype=torch.float64) for rows in (_TOY_TARGET, _TOY_DRAFT))
    m = len(p)
    pieces = [_pieces(rule, Tree((p[last], p, p.expand(m, m, m)), (q[last], q))) for last in range(m)]
    law = torch.zeros((m,) * _NUM_TOKENS, dtype=torch.float64)
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
                law[text] += volumes[index] * _chain_law(p, text[-1], _NUM_TOKENS - len(text))
    return float((law - _chain_law(p, _TOY_LAST, _NUM_TOKENS)).abs().max())


def _chain_law(p: Tensor, last: int, num_tokens: int) -> Tensor:
    """The distribution of the next tokens of a chain. [M, M ...]"""
    law = torch.ones_like(p[0])
    for _ in range(num_tokens):
        law = p.view(*p.shape, *[1] * (law.ndim - 1)) * law
    return law[last]


def _uses(rule: Rule, length: int, vocab_size: int) -> Tensor:
    """For each number of a round, and then of the next, which begins ``length`` tokens later, the first that is always
    equal to it. [2 (2K+1)]"""
    seeds = torch.arange(_NUM_SEEDS)
    ahead = NoiseAhead(rule.make_noise, _K, vocab_size)
    both = []
    for start in (_START, _START + length):
        starts = [start] * _NUM_SEEDS
        both.append(ahead.at(seeds, torch.tensor(starts), starts, starts, _K).values)
    values = torch.cat(both, dim=1)
    return (values[:, :, None] == values[:, None, :]).all(dim=0).long().argmax(dim=1)


def _shared_volumes(one: Tensor, others: Tensor, uses: Tensor) -> Tensor:
    """The volume of a piece of one round together with each of the pieces of the next, where some of their numbers are
    the same. [N, 2], [C, N, 2], [2N] -> [C]"""
    bounds = torch.cat((one.expand_as(others), others), dim=1)  # [C, 2N, 2]
    volumes = torch.ones(len(others), dtype=bounds.dtype)
    for number in uses.unique():
        own = bounds[:, uses == number]
        volumes *= (own[..., 1].amin(dim=1) - own[..., 0].amax(dim=1)).clamp_min(0.0)
    return volumes


def noise_gap(make_noise: Callable[[Tensor, Tensor, int, int], GumbelNoise]) -> float:
    """The share of the noise in two successive rounds that is not a function of its position: other in one round than
    in the other, or the same in two positions."""
    seeds = torch.arange(_NUM_SEEDS)
    ahead = NoiseAhead(make_noise, _K, len(_TOY_TARGET))
    is_wrong = []
    for length in range(1, _K + 2):
        starts = [[start] * _NUM_SEEDS for start in (_START, _START + length)]
        rounds = [ahead.at(seeds, torch.tensor(own), own, own, _K) for own in starts]
        for i, j in product(range(_K + 1), repeat=2):
            one, other = rounds[0].at(i).values(), rounds[1].at(j).values()  # [S, V]
            is_wrong.append((one == other) != (i == length + j))
    return float(torch.stack(is_wrong).double().mean())
