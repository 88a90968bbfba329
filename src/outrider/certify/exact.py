"""The acceptance rule on a pair's real probabilities, to float64 accuracy: no randomness, no sample size.

At contexts from real texts p and q are computed over the full vocabulary, and two laws are compared with p:

- ``identity_gap``: min(p, q) + (1 - sum min(p, q)) residual, the law of one token under ``rejection``;
- ``round_gap``: the law of three tokens, the first from one round with two drafted tokens. For that p and
  q are restricted to a few tokens that both find likely, and every draft is followed. The rule itself is evaluated: its
  draws and its verdict are piecewise constant in its uniform numbers, and bisection locates the edges of the pieces, so
  that the law is a sum over pieces. This assumes that each coin has one edge, whatever the other coins are, and that
  ids rise with the uniform number that they are drawn with.
- ``coupling_gap``, for ``gumbel``, which has other noise: its tokens, against those that the target alone takes.

In addition ``forcing_gap`` compares the reference of all layers, teacher forcing, with the model's own forward without
a cache or a mask of ours.

This module knows the rules' noise, but none of their formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from outrider.certify.constrained import NewConstraint
from outrider.certify.observed import draft_rows
from outrider.drafters.base import Drafter
from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.noise import RoundUniforms
from outrider.sampling.probs import draw_gumbel, normalised, wide
from outrider.sampling.rules import GUMBEL, Rule, residual
from outrider.scoring.teacher_forcing import Text, force

TOLERANCE = 1e-9  # float64 leaves about 1e-15; a mistake in a formula leaves far more
# In total variation. On the embedded pair 5e-7 was seen in float32 and 0.018 in bfloat16; a wrong mask gave 0.6.
_FORCING_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
NUM_LIKELY = 4  # tokens that a round's law is restricted to, after each prefix
_K = 2
_LEAST, _MOST = 2.0**-60, 1 - 2.0**-53  # as small and as large as a uniform number may be
_NUM_HALVINGS = 54  # below the resolution of float64 in [0, 1]
_NUM_NOISES = 256  # for gumbel, in each context
_ROWS = 32  # prefixes in one forward


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
        """Of three tokens. [M, M, M]"""
        p0, p1, p2 = self.p
        return p0[:, None, None] * p1[:, :, None] * p2


@dataclass(frozen=True, slots=True)
class ExactReport:
    """The largest deviations over all contexts.

    Attributes:
        num_rows: pairs of rows on which the identity was computed.
        identity: of a probability, over the whole vocabulary.
        round_law: of the probability of three tokens; for ``gumbel`` the share of noises that led to another token.
        distance: TV(p, q), the mean over the contexts, for which the rule has to compensate.
        forcing: of the law of a token under teacher forcing, in total variation, from that of a plain forward.
        forcing_tolerance: the part that rounding may explain.
    """

    num_contexts: int
    num_rows: int
    identity: float
    round_law: float
    distance: float
    forcing: float
    forcing_tolerance: float
    tolerance: float = TOLERANCE

    @property
    def is_ok(self) -> bool:
        return all(is_ok for *_, is_ok in comparisons(asdict(self)))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_ok": self.is_ok}


def comparisons(exact: Mapping[str, Any]) -> Iterator[tuple[str, float | None, float, bool]]:
    """Each comparison: its name, the deviation, the tolerance, and whether the deviation is within it.

    Args:
        exact: a report as in JSON, where None means not a number.
    """
    for name, key, tolerance in (
        ("one token", "identity", exact["tolerance"]),
        ("one round", "round_law", exact["tolerance"]),
        ("teacher forcing", "forcing", exact["forcing_tolerance"]),
    ):
        yield name, exact[key], tolerance, exact[key] is not None and exact[key] <= tolerance


def check_exactly(
    target: LM,
    drafter: Drafter,
    sampling: Sampling,
    rule: Rule,
    contexts: Sequence[Text],
    new_constraint: NewConstraint = lambda: None,
) -> ExactReport:
    """The rule after these contexts, each shorter by three tokens than both models can take. What comes after their
    given tokens is output, under a constraint if there is one."""
    identities, laws, distances, num_rows = [], [], [], 0
    for context in contexts:
        tree, p, q = _tree(partial(_rows_after, target, drafter, sampling, new_constraint), context)
        identities.append(identity_gap(p, q))
        distances.append(float((p - q).abs().sum(1).mean() / 2))
        laws.append(coupling_gap(tree) if rule.name == GUMBEL.name else round_gap(rule, tree))
        num_rows += len(p)
    return ExactReport(
        num_contexts=len(contexts),
        num_rows=num_rows,
        identity=_largest(identities),
        round_law=_largest(laws),
        distance=sum(distances) / len(distances),
        forcing=_largest([forcing_gap(target, context.ids) for context in contexts]),
        forcing_tolerance=_FORCING_TOLERANCE[target.dtype],
    )


@torch.inference_mode()
def forcing_gap(target: LM, text: Sequence[int]) -> float:
    """The largest total variation, over the tokens of a text but the first, between the model's law of the token under
    teacher forcing and under its own forward of the whole text, without a cache."""
    if len(text) < 2:
        return 0.0
    ids = torch.tensor([list(text)], device=target.device)
    plain = target.model(input_ids=ids, use_cache=False).logits[0, :-1, : target.vocab_size]
    gaps, begin = [], 0
    for chunk in force(target, [Text(text)]):
        forced = wide(chunk.logits).softmax(-1)
        gaps.append(float((wide(plain[begin : begin + len(forced)]).softmax(-1) - forced).abs().sum(-1).max() / 2))
        begin += len(forced)
    return _largest(gaps)


def _largest(gaps: Sequence[float]) -> float:
    """NaN if one of them is, which ``max`` would lose."""
    return float(torch.tensor(gaps, dtype=torch.float64).max())


def identity_gap(p: Tensor, q: Tensor) -> float:
    """The largest |min(p, q) + (1 - sum min(p, q)) residual - p|. [N, V], [N, V]"""
    p, q = normalised(p), normalised(q)
    both = torch.minimum(p, q)
    rest = normalised(residual(p, q))
    return float((both + (1 - both.sum(-1, keepdim=True)) * rest - p).abs().max())


def round_gap(rule: Rule, tree: Tree) -> float:
    """The largest difference between probabilities of three tokens, under the rule and under the target alone."""
    return float((round_law(rule, tree) - tree.target_law()).abs().max())


def round_law(rule: Rule, tree: Tree) -> Tensor:
    """Of three tokens: one round with two drafted tokens under a rule of uniform numbers, then the target. [M, M, M]"""
    (p0, p1, p2), (q0, q1) = tree.p, tree.q
    m = len(p0)
    nodes = torch.cat((q0[None], q1))  # [M+1, M]
    drawn = _law_of_ids(lambda index, uniforms: rule.draw(nodes[index], uniforms), m + 1, m)
    joint = drawn[0, :, None] * drawn[1:]  # [M, M]
    ids = joint.nonzero()  # [N, 2]
    first, second = ids.T
    rows = torch.stack((p0.expand(len(ids), m), p1[first], p2[first, second]), dim=1)  # [N, 3, M]
    q_rows = torch.stack((q0.expand(len(ids), m), q1[first]), dim=1)  # [N, 2, M]
    weights = joint[first, second]  # [N]

    def judge(index: Tensor, coins: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Number of accepted tokens and the next token, for the drafts of this index. [N'], [N', 2], [N'] -> [N'],
        [N']"""
        draft = Draft(ids[index], q_rows[index], torch.full((len(index),), _K))
        verdict = rule.verify(rows[index], draft, RoundUniforms.of(torch.full_like(coins, torch.nan), coins, uniforms))
        return verdict.num_accepted, verdict.next_ids

    edges = _coin_edges(judge, len(ids))  # [N, 2]
    law = torch.zeros(m, m, m, dtype=torch.float64)
    for is_below in product((True, False), repeat=_K):
        below = torch.tensor(is_below)
        chances = torch.where(below, edges, 1 - edges).prod(dim=1) * weights
        index = chances.nonzero().flatten()
        coins = torch.where(below, edges / 2, (1 + edges) / 2)[index]
        if not len(index):
            continue
        num_accepted, _ = judge(index, coins, torch.full((len(index),), 0.5, dtype=torch.float64))
        following = _law_of_ids(partial(_next_ids, judge, index, coins), len(index), m)  # [N', M]
        for n, one, (a, b) in zip(num_accepted.tolist(), chances[index, None] * following, ids[index], strict=True):
            if n == 0:
                law += one[:, None, None] * p1[:, :, None] * p2
            elif n == 1:
                law[a] += one[:, None] * p2[a]
            else:
                law[a, b] += one
    return law


Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _next_ids(judge: Judge, index: Tensor, coins: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
    """The next tokens, for rows of an index and its coins. [N']"""
    return judge(index[rows], coins[rows], uniforms)[1]


def _coin_edges(judge: Judge, num_paths: int) -> Tensor:
    """The edge of each coin, with the other coins at either end; 1 for a coin without an edge. [N, K]"""
    index = torch.arange(num_paths)
    half = torch.full((num_paths,), 0.5, dtype=torch.float64)
    edges = torch.ones(num_paths, _K, dtype=torch.float64)
    for coin in range(_K):
        for other in (_LEAST, _MOST):
            coins = torch.full((num_paths, _K), other, dtype=torch.float64)

            def lengths(values: Tensor, coin: int = coin, coins: Tensor = coins) -> Tensor:
                coins[:, coin] = values
                return judge(index, coins, half)[0]

            low, high = torch.full_like(half, _LEAST), torch.full_like(half, _MOST)
            before = lengths(low)
            turns = lengths(high) != before
            for _ in range(_NUM_HALVINGS):
                middle = (low + high) / 2
                is_same = lengths(middle) == before
                low, high = torch.where(is_same, middle, low), torch.where(is_same, high, middle)
            edges[:, coin] = torch.where(turns, high, edges[:, coin])
    return edges


def _law_of_ids(ids_of: Callable[[Tensor, Tensor], Tensor], num_rows: int, m: int) -> Tensor:
    """The law of ids that are non-decreasing in their uniform numbers.

    Args:
        ids_of: rows and their uniform numbers -> ids. [N'], [N'] -> [N']

    Returns:
        [N, M]
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
    return torch.cat((ends, edges, ends + 1), dim=1).diff(dim=1)


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


def _tree(
    rows_after: Callable[[Sequence[tuple[int, ...]], int], tuple[Tensor, Tensor]], context: Text
) -> tuple[Tree, Tensor, Tensor]:
    """The tree of a context; and the full rows of p and of q behind it. [N, V] each"""
    root, num_prompt = tuple(context.ids), context.num_given
    p0, q0 = rows_after([root], num_prompt)
    m = min(NUM_LIKELY, p0.shape[1])
    first = _likely(p0, q0, m)[0].tolist()
    prefixes = [(*root, a) for a in first]
    p1, q1 = rows_after(prefixes, num_prompt)
    second = _likely(p1, q1, m)
    leaves = [(*prefix, b) for prefix, row in zip(prefixes, second.tolist(), strict=True) for b in row]
    p2, q2 = rows_after(leaves, num_prompt)
    tree = Tree(
        p=(
            _cut(p0, _likely(p0, q0, m))[0],
            _cut(p1, second),
            _cut(p2, _likely(p2, p2, m)).view(m, m, m),
        ),
        q=(_cut(q0, _likely(p0, q0, m))[0], _cut(q1, second)),
    )
    return tree, torch.cat((p0, p1, p2)), torch.cat((q0, q1, q2))


def _likely(p: Tensor, q: Tensor, m: int) -> Tensor:
    """M tokens for each row, including the likeliest of p and of q, so that neither loses all its mass. [N, M]"""
    merit = p + q
    for row in (p, q):
        merit = merit.scatter_add(1, row.argmax(dim=1, keepdim=True), torch.full_like(row[:, :1], 2.0))
    return merit.topk(m, dim=1).indices


def _cut(rows: Tensor, ids: Tensor) -> Tensor:
    return normalised(rows.gather(1, ids)).cpu()


def _rows_after(
    target: LM,
    drafter: Drafter,
    sampling: Sampling,
    new_constraint: NewConstraint,
    prefixes: Sequence[tuple[int, ...]],
    num_prompt: int,
) -> tuple[Tensor, Tensor]:
    """p and q after each prefix, which begins with so many tokens of a prompt. [N, V], [N, V]"""
    p_rows: list[Tensor] = []
    q_rows: list[Tensor] = []
    for begin in range(0, len(prefixes), _ROWS):
        # Judging needs a token in that place; any will do.
        texts = [Text((*prefix, 0), len(prefix), num_prompt) for prefix in prefixes[begin : begin + _ROWS]]
        for _, p, q in draft_rows(target, drafter, sampling, texts, new_constraint):
            p_rows.append(p)
            q_rows.append(q)
    return torch.cat(p_rows), torch.cat(q_rows)
