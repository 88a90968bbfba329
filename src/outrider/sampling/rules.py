"""The acceptance rules: how many drafted tokens are accepted, and the token after them.

All rules here are lossless: whatever the draft, the committed tokens follow the target's distribution. Each is a pure
function of p, q, the drafted ids and the round's noise. Proofs: docs/how-it-works/proofs.md.

- ``rejection``: accept x with probability min(1, p(x)/q(x)), one by one, else draw from the residual (p - q)+.
  Leviathan, Kalman, Matias 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
- ``block``: verify the drafted tokens together, so that a token with p < q may be saved by those after it. It never
  accepts fewer on average. Sun et al. 2403.10444, algorithm 2.
- ``gumbel``: draft and target take the argmax of log-probability plus the *same* Gumbel noise; a drafted token is
  accepted if the target takes it too. Same seed, same output as plain decoding, whatever the draft. Daliri, Musco,
  Suresh 2408.07978 (with Gumbel noise in place of exponential, an equivalent race).

The noise may have more offsets than were drafted; the rest is unused.

A rule also defines how drafts are drawn and which noise it needs, since the three belong together. This module does not
know where p and q come from.

On rows of candidates (candidates.py) each rule is the same function in C++; the functions here are its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.records import Draft, Verdict
from outrider.sampling.candidates import Candidates
from outrider.sampling.noise import GumbelNoise, RoundUniforms, round_uniforms
from outrider.sampling.probs import Probs, draw, draw_gumbel, full, normalise, one_hot, wide, wide_sum


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with its noise, whose type is private to the rule.

    Attributes:
        make_noise: (seeds [B], round starts [B], K, V) -> noise of one round.
        draw: (q rows [B, V], ``noise.at(offset)``) -> ids [B]; how drafters draw the token at an offset. Rows are
            ``Probs``, here and below.
        verify: (p [B, K+1, V], draft, noise) -> verdict.
    """

    name: str
    make_noise: Callable[[Tensor, Tensor, int, int], Any]
    draw: Callable[[Any, Any], Tensor]
    verify: Callable[[Any, Draft, Any], Verdict]


def _draft_probs(target_probs: Tensor, draft: Draft) -> Tensor:
    """q [B, K, V], materialised where it is one-hot."""
    return draft.probs if draft.probs is not None else one_hot(draft.ids, target_probs)


def _at(probs: Tensor, ids: Tensor) -> Tensor:
    """probs [B, K, V] at ids [B, K] -> [B, K]"""
    return probs.gather(-1, ids[..., None]).squeeze(-1)


def _normalised_at(probs: Tensor, ids: Tensor) -> Tensor:
    """probs [B, K, V] at ids [B, K] -> [B, K] in float64 (comparing with u must not round)."""
    # A softmax in float32 sums to 1 only up to 1e-6.
    return wide(_at(probs, ids)) / wide_sum(probs)


def _is_drafted(draft: Draft) -> Tensor:
    """Mask of the drafted columns, without padding. [B, K]"""
    return torch.arange(draft.ids.shape[1], device=draft.ids.device) < draft.num_drafted[:, None]


def _prefix_length(is_accepted: Tensor) -> Tensor:
    """Number of leading True. [B, K] -> [B]"""
    return is_accepted.long().cumprod(dim=1).sum(dim=1)


def _row_at(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B, T, ...] at index [B] -> [B, ...]"""
    return rows[torch.arange(rows.shape[0], device=rows.device), index]


def residual(target_rows: Tensor, draft_rows: Tensor) -> Tensor:
    """(p - q)+, not normalised; p if that is zero everywhere (p = q up to rounding, so that only rounding can reject).
    [..., V] in float64"""
    p, q = normalise(target_rows), normalise(draft_rows)
    rest = (p - q).clamp_min_(0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def rejection(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Accept each token with probability min(1, p/q); at the first rejection draw from the residual. ``target_probs``
    are p, at the K drafted positions and the one after. [B, K+1, V]"""
    draft_probs = _draft_probs(target_probs, draft)
    p_x, q_x = _normalised_at(target_probs[:, :-1], draft.ids), _normalised_at(draft_probs, draft.ids)
    accept = noise.accept[:, : draft.ids.shape[1]]
    num_accepted = _prefix_length((accept * q_x < p_x) & _is_drafted(draft))
    # After full acceptance there is no q: the residual is p itself, for the bonus.
    next_rows = _row_at(target_probs, num_accepted)
    is_rejected = num_accepted < draft.num_drafted
    q_rows = _draft_row(draft_probs, num_accepted, is_rejected)
    next_ids = draw(residual(next_rows, q_rows), noise.next)
    return Verdict(num_accepted, next_ids, torch.stack((p_x, q_x), dim=-1))


def _draft_row(draft_probs: Tensor, index: Tensor, is_valid: Tensor) -> Tensor:
    """q at index [B], zero where it is not valid. [B, V]"""
    num_rows, k, vocab_size = draft_probs.shape
    if k == 0:
        return draft_probs.new_zeros(num_rows, vocab_size)
    return torch.where(is_valid[:, None], _row_at(draft_probs, index.clamp_max(k - 1)), 0.0)


def block(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Accept the longest prefix that passes its own test, with a probability from its joint weight.

    With w_0 = 1, w_i = min(1, w_{i-1} p(x_i)/q(x_i)) and R_i = sum_v (w_i p_i(v) - q_i(v))+, where p_i and q_i are the
    rows after i drafted tokens, prefix i passes with probability R_i / (R_i + 1 - w_i), the full draft with w_n. The
    longest prefix that passes is accepted, and the next token is drawn from (w_i p_i - q_i)+. The arguments are those
    of ``rejection``."""
    draft_probs = _draft_probs(target_probs, draft)
    k = draft.ids.shape[1]
    p_sums, q_sums = wide_sum(target_probs), wide_sum(draft_probs)
    p_x = wide(_at(target_probs[:, :-1], draft.ids)) / p_sums[:, :-1]
    q_x = wide(_at(draft_probs, draft.ids)) / q_sums
    weights = [torch.ones_like(draft.num_drafted, dtype=p_x.dtype)]
    for i in range(k):
        # q(x) = 0 only in padding columns, whose weights are unused.
        weights.append((weights[-1] * p_x[:, i] / q_x[:, i]).clamp_max(1.0))
    w = torch.stack(weights, dim=1)  # [B, K+1]
    num_accepted = torch.zeros_like(draft.num_drafted)
    if k:
        # R_1 .. R_{K-1}: prefix K is a full draft, or padding. Rows are normalised and weighted in one pass, since each
        # pass is slow for a large vocabulary.
        inner, w_tail = slice(1, k), w[:, 1:]
        p_scales, q_scales = (w / p_sums)[:, inner], 1.0 / q_sums[:, inner]
        rest = _rest(target_probs[:, inner], p_scales, draft_probs[:, inner], q_scales).sum(-1)
        rest = torch.cat((rest, w_tail[:, -1:]), dim=1)
        is_full = torch.arange(1, k + 1, device=w.device) == draft.num_drafted[:, None]
        pass_probs = torch.where(is_full, w_tail, rest / (rest + 1.0 - w_tail))  # 0/0 is NaN, and never passes
        passes = (noise.accept[:, :k] < pass_probs) & _is_drafted(draft)
        num_accepted = (torch.arange(1, k + 1, device=w.device) * passes).amax(dim=1)
    p_row = normalise(_row_at(target_probs, num_accepted))
    q_row = normalise(_draft_row(draft_probs, num_accepted, num_accepted < draft.num_drafted))
    rows = (_row_at(w, num_accepted)[:, None] * p_row - q_row).clamp_min_(0.0)
    # As in residual(): all zeros means p = q up to rounding.
    rows = torch.where(rows.sum(-1, keepdim=True) > 0, rows, p_row)
    return Verdict(num_accepted, draw(rows, noise.next), torch.stack((p_x, q_x), dim=-1))


def _rest(p: Tensor, p_scales: Tensor, q: Tensor, q_scales: Tensor) -> Tensor:
    """(p p_scale - q q_scale)+ of rows [..., V] and their scales [...], in float64"""
    return (wide(p) * p_scales[..., None] - wide(q) * q_scales[..., None]).clamp_min_(0.0)


def gumbel(target_probs: Probs, draft: Draft, noise: GumbelNoise) -> Verdict:
    """Commit the tokens that the target draws with this noise; drafted tokens are accepted as long as they agree.

    Args:
        target_probs: p, at the K drafted positions and the one after, in its own kind whatever that of q: it decides
            the last bits of a draw, which must be those of plain decoding. [B, K+1, V]
        noise: the drafts were drawn with it, too.
    """
    rows = [_draw_gumbel(target_probs[:, i], noise.at(i)) for i in range(target_probs.shape[1])]
    target_ids = torch.stack(rows, dim=1)  # [B, K+1]
    num_accepted = _prefix_length((draft.ids == target_ids[:, :-1]) & _is_drafted(draft))
    p_x = prob_at(target_probs[:, :-1], draft.ids)
    q_x = torch.ones_like(p_x) if draft.probs is None else prob_at(draft.probs, draft.ids)
    return Verdict(num_accepted, _row_at(target_ids, num_accepted), torch.stack((p_x, q_x), dim=-1))


def prob_at(probs: Probs, ids: Tensor) -> Tensor:
    """Probability of one token of each row: [B, K, V] at ids [B, K] -> float64 [B, K]"""
    return _at(probs.full(), ids) if isinstance(probs, Candidates) else _normalised_at(probs, ids)


def _verify(
    definition: Callable[[Any, Draft, Any], Verdict], number: int, target_probs: Probs, draft: Draft, noise: Any
) -> Verdict:
    """The verdict of a rule: its number in C++ on candidates, and else its definition, on full rows but for gumbel."""
    q = target_probs if draft.probs is None else draft.probs
    if isinstance(target_probs, Candidates) and isinstance(q, Candidates):
        return target_probs.verify(number, draft, noise.arguments)
    if definition is not gumbel and isinstance(target_probs, Candidates) != isinstance(q, Candidates):
        target_probs, draft = full(target_probs), replace(draft, probs=full(q))
    return definition(target_probs, draft, noise)


def _make_uniforms(seeds: Tensor, round_starts: Tensor, k: int, vocab_size: int) -> RoundUniforms:
    return round_uniforms(seeds, round_starts, k)


def _draw_gumbel(rows: Probs, noise: GumbelNoise) -> Tensor:
    if isinstance(rows, Candidates):
        return rows.draw_with_noise(noise.seeds, noise.round_starts)
    return draw_gumbel(rows, noise.values())


REJECTION = Rule("rejection", _make_uniforms, draw, partial(_verify, rejection, 0))
BLOCK = Rule("block", _make_uniforms, draw, partial(_verify, block, 1))
GUMBEL = Rule(
    "gumbel", lambda seeds, starts, _, size: GumbelNoise(seeds, starts, size), _draw_gumbel, partial(_verify, gumbel, 2)
)
RULES = {"rejection": REJECTION, "block": BLOCK, "gumbel": GUMBEL}
