"""The acceptance rule on a pair's real probabilities, to float64 accuracy: no randomness, no sample size.

At contexts from real texts p and q are computed over the full vocabulary, and two laws are compared with p:

- ``identity_gap``: min(p, q) + (1 - sum min(p, q)) residual, the law of one token under ``rejection``;
- the law of a round (outrider.certify.rounds), for which p and q are restricted to a few tokens that both find likely.
  The law of two rounds is that of a toy.

In addition ``forcing_gap`` compares the reference of all layers, teacher forcing, with the model's own forward without
a cache or a mask of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.certify.constrained import NewConstraint
from outrider.certify.observed import draft_rows
from outrider.certify.rounds import Tree, coupling_gap, noise_gap, round_gap, two_rounds_gap
from outrider.drafters.base import Drafter
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.probs import normalised, wide
from outrider.sampling.rules import GUMBEL, Rule, residual
from outrider.scoring.teacher_forcing import Text, force

TOLERANCE = 1e-9  # float64 leaves about 1e-15; a mistake in a formula leaves far more
# In total variation. On the embedded pair 5e-7 was seen in float32 and 0.018 in bfloat16; a wrong mask gave 0.6.
_FORCING_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
NUM_LIKELY = 4  # tokens that a round's law is restricted to, after each prefix
_ROWS = 32  # prefixes in one forward


@dataclass(frozen=True, slots=True)
class ExactReport:
    """The largest deviations over all contexts.

    Attributes:
        num_rows: pairs of rows on which the identity was computed.
        identity: of a probability, over the whole vocabulary.
        round_law: of the probability of three tokens; for ``gumbel`` the share of noises that led to another token.
        two_rounds: of the probability of four tokens of a toy, from two rounds under this rule; for ``gumbel`` the
            share of the noise that is not a function of its position.
        distance: TV(p, q), the mean over the contexts, for which the rule has to compensate.
        forcing: of the law of a token under teacher forcing, in total variation, from that of a plain forward.
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
        return all(is_ok for *_, is_ok in comparisons(asdict(self)))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_ok": self.is_ok}


def comparisons(exact: Mapping[str, Any]) -> Iterator[tuple[str, float | None, float, bool]]:
    """Each comparison: its name, the deviation, the tolerance, and whether the deviation is within it.

    Args:
        exact: a report as in JSON, where None means not a number. (Older ones have no ``two_rounds``.)
    """
    for name, key, tolerance in (
        ("one token", "identity", exact["tolerance"]),
        ("one round", "round_law", exact["tolerance"]),
        ("two rounds", "two_rounds", exact["tolerance"]),
        ("teacher forcing", "forcing", exact["forcing_tolerance"]),
    ):
        if key in exact:
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
    is_coupled = rule.name == GUMBEL.name
    for context in contexts:
        tree, p, q = _tree(partial(_rows_after, target, drafter, sampling, new_constraint), context)
        identities.append(identity_gap(p, q))
        distances.append(float((p - q).abs().sum(1).mean() / 2))
        laws.append(coupling_gap(tree) if is_coupled else round_gap(rule, tree))
        num_rows += len(p)
    return ExactReport(
        num_contexts=len(contexts),
        num_rows=num_rows,
        identity=_largest(identities),
        round_law=_largest(laws),
        two_rounds=noise_gap(rule.make_noise) if is_coupled else two_rounds_gap(rule),
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
