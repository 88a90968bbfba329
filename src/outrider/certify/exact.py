"""Exact check of the acceptance rule on a pair's real probabilities, in float64: no randomness, no sample size.

In real contexts p and q are computed over the full vocabulary, and two distributions are compared with p:

- ``identity_gap``: min(p, q) + (1 - sum min(p, q)) residual, the distribution of one token under ``rejection``;
- the distribution of a round (outrider.certify.rounds), with p and q restricted to a few tokens that both find likely.
  Two rounds are enumerated on a toy.

In addition ``forcing_gap`` compares the reference of all layers, teacher forcing, with the model's own forward, without
Outrider's cache and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.certify.observed import NewConstraint, draft_rows
from outrider.certify.rounds import Tree, coupling_gap, noise_gap, round_gap, two_rounds_gap
from outrider.drafters.base import Drafter
from outrider.models.probe import rounding_off
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.probs import normalise, wide
from outrider.sampling.rules import GUMBEL, Rule, residual
from outrider.scoring.teacher_forcing import Text, force

TOLERANCE = 1e-9  # float64 leaves about 1e-15; a mistake in a formula leaves far more
# Total variation. The embedded pair gave 5e-7 in float32 and 0.018 in bfloat16; a wrong mask gave 0.6.
_FORCING_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
NUM_LIKELY = 4  # tokens after each prefix that a round is restricted to
_ROWS = 32  # prefixes in one forward


@dataclass(frozen=True, slots=True)
class ExactReport:
    """Largest deviations over all contexts.

    Attributes:
        num_rows: pairs of rows on which the identity was computed.
        identity: deviation of a probability, over the whole vocabulary.
        round_law: deviation of the probability of three tokens; for ``gumbel`` the share of noises that led to another
            token.
        two_rounds: deviation of the probability of four tokens of a toy after two rounds; for ``gumbel`` the share of
            the noise that is not a function of its position.
        distance: mean TV(p, q) over the contexts, for which the rule has to compensate.
        forcing: total variation of a token's distribution between teacher forcing and a plain forward.
        forcing_tolerance: the part that rounding may explain.
    """

    num_contexts: int
    num_rows: int
    identity: float
    round_law: float
    two_rounds: float
    distance: float
    forcing: float
    forcing_tolerance: float
    tolerance: float = TOLERANCE

    @property
    def is_ok(self) -> bool:
        return all(gap <= tolerance for _, gap, tolerance in self.comparisons())

    def comparisons(self) -> Iterator[tuple[str, float, float]]:
        """Yield each comparison: name, deviation, which may be NaN, and tolerance."""
        yield "one token", self.identity, self.tolerance
        yield "one round", self.round_law, self.tolerance
        yield "two rounds", self.two_rounds, self.tolerance
        yield "teacher forcing", self.forcing, self.forcing_tolerance


def check_exactly(
    target: LM,
    drafter: Drafter,
    sampling: Sampling,
    rule: Rule,
    contexts: Sequence[Text],
    new_constraint: NewConstraint = lambda prompt_ids: None,
) -> ExactReport:
    """Check the rule after these contexts.

    Args:
        contexts: at least three tokens shorter than the target allows; tokens after the given ones are output,
            subject to the constraint, if any.
    """
    identities, round_gaps, distances, num_rows = [], [], [], 0
    is_coupled = rule.name == GUMBEL.name
    for context in contexts:
        tree, p, q = _tree(partial(_rows_after, target, drafter, sampling, new_constraint), context)
        identities.append(identity_gap(p, q))
        distances.append(float((p - q).abs().sum(1).mean() / 2))
        round_gaps.append(coupling_gap(tree) if is_coupled else round_gap(rule, tree))
        num_rows += len(p)
    return ExactReport(
        num_contexts=len(contexts),
        num_rows=num_rows,
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
    both = torch.minimum(p, q)
    rest = normalise(residual(p, q))
    return float((both + (1 - both.sum(-1, keepdim=True)) * rest - p).abs().max())


def _tree(
    rows_after: Callable[[Sequence[tuple[int, ...]], int], tuple[Tensor, Tensor]], context: Text
) -> tuple[Tree, Tensor, Tensor]:
    """Tree of a context, and the full rows of p and of q that it was cut from. [N, V] each"""
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
    """Likely tokens of each row, always with the argmax of p and of q, so that neither loses all its mass. [N, M]"""
    merit = p + q
    for row in (p, q):
        merit = merit.scatter_add(1, row.argmax(dim=1, keepdim=True), torch.full_like(row[:, :1], 2.0))
    return merit.topk(m, dim=1).indices


def _cut(rows: Tensor, ids: Tensor) -> Tensor:
    return normalise(rows.gather(1, ids)).cpu()


def _rows_after(
    target: LM,
    drafter: Drafter,
    sampling: Sampling,
    new_constraint: NewConstraint,
    prefixes: Sequence[tuple[int, ...]],
    num_prompt: int,
) -> tuple[Tensor, Tensor]:
    """p and q after each prefix, whose first ``num_prompt`` tokens are the prompt. [N, V], [N, V]"""
    p_rows: list[Tensor] = []
    q_rows: list[Tensor] = []
    for begin in range(0, len(prefixes), _ROWS):
        # Scoring needs a token there; any will do.
        texts = [Text((*prefix, 0), len(prefix), num_prompt) for prefix in prefixes[begin : begin + _ROWS]]
        for _, p, q in draft_rows(target, drafter, sampling, texts, new_constraint):
            p_rows.append(p)
            q_rows.append(q)
    return torch.cat(p_rows), torch.cat(q_rows)
