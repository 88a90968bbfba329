"""Exact check of the acceptance rule on a pair's real probabilities, in float64: no randomness, no sample size.

In real contexts p and q are computed over the full vocabulary, and two distributions are compared with p:

- ``identity_gap``: min(p, q) + (1 - sum min(p, q)) residual, the distribution of one token under ``rejection``;
- ``round_gap``: the distribution of three tokens, the first from one round with two drafted tokens, with p and q
  restricted to a few tokens that both find likely. Every draft is followed. The rule itself is evaluated: its draws and
  its verdict are piecewise constant in its uniform numbers, and bisection locates the edges of the pieces, so that the
  distribution is a sum over pieces. This assumes that each accept number has one edge, whatever the others are, and
  that ids rise with the uniform number that draws them.

Two more enumerations need no context: ``two_rounds_gap``, the distribution of four tokens of a toy, from two rounds,
with the noise that the loop would use; and for ``gumbel``, which has other noise, ``coupling_gap``, its tokens compared
with those of the target alone, and ``noise_gap``: its noise must depend on the position of a token, not on the round.
None of them knows the rules' formulas.

In addition ``forcing_gap`` compares the reference of all layers, teacher forcing, with the model's own forward, without
Outrider's cache and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from outrider.certify.observed import NewConstraint, draft_rows
from outrider.drafters.base import Drafter
from outrider.measure.teacher_forcing import Text, force
from outrider.models.probe import rounding_off
from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.noise import GumbelNoise, NoiseAhead, RoundUniforms
from outrider.sampling.probs import draw_gumbel, normalise, wide
from outrider.sampling.rules import GUMBEL, Rule, residual

# Total variation. The embedded pair gave 5e-7 in float32 and 0.018 in bfloat16; a wrong mask gave 0.6.
_FORCING_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
NUM_LIKELY = 4  # tokens after each prefix that a round is restricted to
_K = 2
_LEAST, _MOST = 2.0**-60, 1 - 2.0**-53  # as small and as large as a uniform number may be
# A toy with many rejections, which reveal much about the tokens that the same numbers draft next: the draft hardly ever
# proposes 0, which the target often generates.
_TOY_TARGET = ((0.3, 0.3, 0.4), (0.3, 0.5, 0.2), (0.4, 0.3, 0.3))
_TOY_DRAFT = ((0.01, 0.29, 0.7), (0.1, 0.2, 0.7), (0.35, 0.35, 0.3))
_TOY_LAST = 1  # token before the first round
_NUM_TOKENS = 4  # compared after two rounds


@dataclass(frozen=True, slots=True)
class ExactReport:
    """Largest deviations over all contexts.

    Attributes:
        round_law: deviation of the probability of three tokens; for ``gumbel`` the share of noises that led to another
            token.
        two_rounds: deviation of the probability of four tokens of a toy after two rounds; for ``gumbel`` the share of
            the noise that is not a function of its position.
    """

    num_contexts: int
    num_rows: int  # pairs of rows on which the identity was computed
    identity: float  # deviation of a probability, over the whole vocabulary
    round_law: float
    two_rounds: float
    distance: float  # mean TV(p, q) over the contexts, for which the rule has to compensate
    forcing: float  # total variation of a token's distribution between teacher forcing and a plain forward
    forcing_tolerance: float  # the part that rounding may explain
    tolerance: float = 1e-9  # float64 leaves about 1e-15; a mistake in a formula leaves far more

    @property
    def is_ok(self) -> bool:
        return all(gap <= tolerance for _, gap, tolerance in self.comparisons())

    def comparisons(self) -> list[tuple[str, float, float]]:
        """Name, deviation, which may be NaN, and tolerance of each comparison."""
        exact = {"one token": self.identity, "one round": self.round_law, "two rounds": self.two_rounds}
        found = [(name, gap, self.tolerance) for name, gap in exact.items()]
        return [*found, ("teacher forcing", self.forcing, self.forcing_tolerance)]


def check_exactly(
    target: LM,
    drafter: Drafter,
    sampling: Sampling,
    rule: Rule,
    contexts: Sequence[Text],
    new_constraint: NewConstraint = lambda prompt_ids: None,
) -> ExactReport:
    """Check the rule after these contexts, at least three tokens shorter than the target allows. Tokens after the given
    ones are output, subject to the constraint, if any."""
    found, is_coupled = [], rule.name == GUMBEL.name
    for context in contexts:

        def rows_after(prefixes: Sequence[tuple[int, ...]], num_prompt: int = context.num_given) -> list[Tensor]:
            """p and q after each prefix. [N, V], [N, V]"""
            # Scoring needs a token there; any will do.
            texts = [Text((*prefix, 0), len(prefix), num_prompt) for prefix in prefixes]
            parts = [rows for _, *rows in draft_rows(target, drafter, sampling, texts, new_constraint)]
            return [torch.cat(rows) for rows in zip(*parts, strict=True)]

        tree, p, q = _tree(rows_after, tuple(context.ids))
        distance = float((p - q).abs().sum(1).mean() / 2)
        found.append(
            (identity_gap(p, q), coupling_gap(tree) if is_coupled else round_gap(rule, tree), distance, len(p))
        )
    identities, round_gaps, distances, numbers = zip(*found, strict=True)
    return ExactReport(
        num_contexts=len(contexts),
        num_rows=sum(numbers),
        identity=_largest(identities),
        round_law=_largest(round_gaps),
        two_rounds=noise_gap(rule.make_noise) if is_coupled else two_rounds_gap(rule),
        distance=sum(distances) / len(distances),
        forcing=_largest([forcing_gap(target, context.ids) for context in contexts]),
        forcing_tolerance=_FORCING_TOLERANCE[target.dtype],
    )


@torch.inference_mode()
def forcing_gap(target: LM, text: Sequence[int]) -> float:
    """Largest total variation, over all tokens but the first, between teacher forcing and one forward of the model over
    the whole sequence without a cache, in which activations are not rounded."""
    if len(text) < 2:
        return 0.0
    ids = torch.tensor([list(text)], device=target.device)
    gaps, begin = [], 0
    with rounding_off(target):
        plain = target.uncached(ids)[0, :-1, : target.vocab_size]
        for chunk in force(target, [Text(text)]):
            forced = wide(chunk.logits).softmax(-1)
            gaps.append(float((wide(plain[begin : begin + len(forced)]).softmax(-1) - forced).abs().sum(-1).max() / 2))
            begin += len(forced)
    return _largest(gaps)


def _largest(gaps: Sequence[float]) -> float:
    """Maximum; NaN if any is NaN, unlike ``max``."""
    return float(torch.tensor(gaps, dtype=torch.float64).max())


def identity_gap(p: Tensor, q: Tensor) -> float:
    """Largest |min(p, q) + (1 - sum min(p, q)) residual - p|. [N, V], [N, V]"""
    p, q = normalise(p), normalise(q)
    both, rest = torch.minimum(p, q), normalise(residual(p, q))
    return float((both + (1 - both.sum(-1, keepdim=True)) * rest - p).abs().max())


def _tree(
    rows_after: Callable[[Sequence[tuple[int, ...]]], Sequence[Tensor]], root: tuple[int, ...]
) -> tuple[Tree, Tensor, Tensor]:
    """Tree of a context, and the full rows of p and of q that it was cut from. [N, V] each"""
    p0, q0 = rows_after([root])
    m = min(NUM_LIKELY, p0.shape[1])
    likely = _likely(p0, q0, m)
    prefixes = [(*root, a) for a in likely[0].tolist()]
    p1, q1 = rows_after(prefixes)
    second = _likely(p1, q1, m)
    p2, q2 = rows_after([(*prefix, b) for prefix, row in zip(prefixes, second.tolist(), strict=True) for b in row])
    p_rows = _cut(p0, likely)[0], _cut(p1, second), _cut(p2, _likely(p2, p2, m)).view(m, m, m)
    tree = *p_rows, _cut(q0, likely)[0], _cut(q1, second)
    return tree, torch.cat((p0, p1, p2)), torch.cat((q0, q1, q2))


def _likely(p: Tensor, q: Tensor, m: int) -> Tensor:
    """Likely tokens of each row, always with the argmax of p and of q, so that neither loses all its mass. [N, M]"""
    merit = p + q
    for row in (p, q):
        merit = merit.scatter_add(1, row.argmax(dim=1, keepdim=True), torch.full_like(row[:, :1], 2.0))
    return merit.topk(m, dim=1).indices


def _cut(rows: Tensor, ids: Tensor) -> Tensor:
    return normalise(rows.gather(1, ids)).cpu()


Tree = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""p after a context and after 1 and 2 tokens that may follow, and q after 0 and 1, restricted to M tokens after each
prefix. [M], [M, M], [M, M, M], [M], [M, M]"""


def round_gap(rule: Rule, tree: Tree) -> float:
    """Largest difference of a probability of three tokens between a round with two drafted ones under a rule, then the
    target, and the target alone."""
    p0, p1, p2, *_ = tree
    bounds, committed = _pieces(rule, tree)
    distribution = torch.zeros_like(p2)  # [M, M, M]
    for (a, *others), volume in zip(committed, bounds.diff(dim=2).prod(dim=1)[:, 0], strict=True):
        rest = p1[a][:, None] * p2[a] if not others else p2[a, others[0]] if len(others) == 1 else 1.0
        distribution[(a, *others)] += volume * rest
    return float((distribution - p0[:, None, None] * p1[:, :, None] * p2).abs().max())


def _pieces(rule: Rule, tree: Tree) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Boxes of uniform numbers that lead to the same tokens in a round with two drafted ones, but those without
    volume: bounds of the numbers, in the order of ``RoundUniforms.values`` [C, 2K+1, 2]; and the tokens of each box."""
    p0, p1, p2, q0, q1 = tree
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
    following = _intervals_of_ids(lambda i, uniforms: verify(index[i], coins[i], uniforms)[1], len(index), m)
    at, next_ids = (following[..., 0] < following[..., 1]).nonzero(as_tuple=True)  # [C] of [N', M, 2]
    pairs = torch.stack((tossed, drafts[index]), dim=2).flatten(1, 2)  # [N', 4, 2]
    columns = ids[index[at]].tolist(), num_accepted[at].tolist(), next_ids.tolist()
    committed = [(*drafted[:num], next_id) for drafted, num, next_id in zip(*columns, strict=True)]
    return torch.cat((following[at, next_ids][:, None], pairs[at]), dim=1), committed


def _coin_edges(verify: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], num_paths: int) -> Tensor:
    """Edge of each accept number, with the others at either end; 1 for one without an edge. [N, K]"""
    cases = list(product(range(_K), (_LEAST, _MOST)))  # bisected together
    moved = torch.tensor([[coin] for coin, _ in cases]).repeat_interleave(num_paths, dim=0)  # [2K N, 1]
    others = torch.tensor([[other] * _K for _, other in cases], dtype=torch.float64).repeat_interleave(num_paths, dim=0)
    index = torch.arange(num_paths).repeat(len(cases))
    half = torch.full((len(index),), 0.5, dtype=torch.float64)

    def lengths(values: Tensor) -> Tensor:
        return verify(index, others.scatter(1, moved, values[:, None]), half)[0]

    before = lengths(torch.full_like(half, _LEAST))
    return _edges(lambda values: lengths(values) == before, len(index)).view(_K, 2, num_paths).amin(dim=1).T


def _edges(is_below: Callable[[Tensor], Tensor], num: int) -> Tensor:
    """Where a condition on each of some uniform numbers ceases to hold, by bisection; 1 if nowhere. [N]"""
    low, high = torch.zeros(num, dtype=torch.float64), torch.ones(num, dtype=torch.float64)
    for _ in range(53):  # the resolution of float64 in [0, 1]
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


def _intervals_of_ids(ids_of: Callable[[Tensor, Tensor], Tensor], num_rows: int, m: int) -> Tensor:
    """Intervals of uniform numbers that lead to each id [N, M, 2]. ``ids_of`` maps rows [N'] and numbers [N'], in
    which ids are non-decreasing, to ids [N']."""
    rows = torch.arange(num_rows).repeat(m - 1)
    tokens = torch.arange(m - 1).repeat_interleave(num_rows)
    edges = _edges(lambda values: ids_of(rows, values) <= tokens, len(rows)).view(m - 1, num_rows).T
    ends = torch.zeros(num_rows, 1, dtype=torch.float64)
    return torch.cat((ends, edges, ends + 1), dim=1).unfold(1, 2, 1)


def coupling_gap(tree: Tree) -> float:
    """Share of noises with which ``gumbel`` commits other tokens than the target alone."""
    p0, p1, p2, q0, q1 = tree
    seeds = torch.arange(256)
    noise = GUMBEL.make_noise(seeds, torch.ones_like(seeds), _K, len(p0))
    p0, q0 = (row.expand(len(seeds), -1) for row in (p0, q0))
    a = GUMBEL.draw(q0, noise.at(0))
    b = GUMBEL.draw(q1[a], noise.at(1))
    ids, rows = torch.stack((a, b), dim=1), torch.stack((p0, p1[a], p2[a, b]), dim=1)
    draft = Draft(ids, torch.stack((q0, q1[a]), dim=1), torch.full_like(seeds, _K))
    verdict = GUMBEL.verify(rows, draft, noise)
    x = draw_gumbel(p0, noise.at(0).values())
    y = draw_gumbel(p1[x], noise.at(1).values())
    alone = torch.stack((x, y, draw_gumbel(p2[x, y], noise.at(2).values())), dim=1)
    n, offsets = verdict.num_accepted[:, None], torch.arange(_K + 1)
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
    pieces = [_pieces(rule, (p[last], p, p.expand(m, m, m), q[last], q)) for last in range(m)]
    distribution = torch.zeros((m,) * _NUM_TOKENS, dtype=torch.float64)
    first_bounds, first_committed = pieces[_TOY_LAST]
    uses = {length: _uses(rule, length, m) for length in range(1, _K + 2)}
    for bounds, committed in zip(first_bounds, first_committed, strict=True):
        second_bounds, second_committed = pieces[committed[-1]]
        volumes = _shared_volumes(bounds, second_bounds, uses[len(committed)])
        for index in volumes.nonzero().flatten().tolist():
            text = (*committed, *second_committed[index])[:_NUM_TOKENS]
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
    values = torch.cat([one.values for one in _two_noises(rule.make_noise, length, vocab_size)], dim=1)
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
    is_wrong = []
    for length in range(1, _K + 2):
        rounds = _two_noises(make_noise, length, len(_TOY_TARGET))
        for i, j in product(range(_K + 1), repeat=2):
            one, other = rounds[0].at(i).values(), rounds[1].at(j).values()  # [S, V]
            is_wrong.append((one == other) != (i == length + j))
    return float(torch.stack(is_wrong).double().mean())


def _two_noises(make_noise: Callable[[Tensor, Tensor, int, int], Any], length: int, vocab_size: int) -> list[Any]:
    """Noise of a round that begins at any length, and of the next, ``length`` tokens later."""
    seeds, ahead = torch.arange(8), NoiseAhead(make_noise, _K, vocab_size)
    return [ahead.at(seeds, torch.full_like(seeds, start), _K) for start in (5, 5 + length)]
