"""The one door from logits to probabilities, for p and q alike, and the ways to draw from them.

Order and meaning of the processors are those of Hugging Face's ``generate``: logit bias, repetition penalty,
temperature, top-k, top-p, min-p. All arithmetic is in float32 or better. Temperature 0 is a one-hot row at the largest
logit (the lowest id of several), so that greedy decoding is sampling from a distribution like any other.

Every function works row by row: what comes out for a row does not depend on the rows beside it.

This module does not know models, drafts or acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.runtime.shape_buckets import power_of_two


@dataclass(frozen=True, slots=True)
class Settings:
    """The sampling options of B rows as tensors. A field is None where no row uses it."""

    temperature: Tensor  # [B]
    top_k: Tensor | None  # [B], V where off
    largest_top_k: int  # at least the largest of those that are on: few different numbers, since shapes follow from it
    top_p: Tensor | None  # [B]
    min_p: Tensor | None  # [B]
    repetition_penalty: Tensor | None  # [B]
    logit_bias: Tensor | None  # [B, V]
    has_greedy: bool
    has_sampled: bool

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocab_size: int, device: torch.device) -> Settings:
        def column(values: list[float], neutral: float) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            # float32 everywhere: the numbers are the same whatever the dtype of the logits.
            return torch.tensor(values, dtype=torch.float32, device=device)

        # A temperature that float32 would round to 0 must not become greedy by accident.
        tiny = torch.finfo(torch.float32).tiny
        temperatures = [max(row.temperature, tiny) if row.temperature > 0 else 0.0 for row in rows]
        top_k = [min(row.top_k or vocab_size, vocab_size) for row in rows]
        bias = None
        if any(row.logit_bias for row in rows):
            bias = torch.zeros(len(rows), vocab_size)
            for index, row in enumerate(rows):
                for token_id, value in (row.logit_bias or {}).items():
                    bias[index, token_id] = value
            bias = bias.to(device)  # at once, not number by number
        return cls(
            temperature=torch.tensor(temperatures, dtype=torch.float32, device=device),
            top_k=None if min(top_k) == vocab_size else torch.tensor(top_k, device=device),
            largest_top_k=min(vocab_size, power_of_two(max((k for k in top_k if k < vocab_size), default=1))),
            top_p=column([row.top_p for row in rows], 1.0),
            min_p=column([row.min_p for row in rows], 0.0),
            repetition_penalty=column([row.repetition_penalty for row in rows], 1.0),
            logit_bias=bias,
            has_greedy=any(row.temperature == 0 for row in rows),
            has_sampled=any(row.temperature > 0 for row in rows),
        )


def wide(x: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return x if x.device.type == "mps" else x.to(torch.float64)


def wide_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, in float64 where the device has it. [..., V] -> [...]"""
    return x.sum(dim=-1, dtype=None if x.device.type == "mps" else torch.float64)


def normalised(rows: Tensor) -> Tensor:
    """Rows that sum to 1, in float64 where the device has it; rows of zeros stay. [..., V]"""
    total = wide_sum(rows)[..., None]
    return wide(rows) / torch.where(total > 0, total, 1.0)


def is_finite(logits: Tensor) -> Tensor:
    """Whether rows of logits can be sampled from: no NaN, no +inf, something above -inf. [..., V] -> [...]"""
    return logits.amax(dim=-1).isfinite()


def one_hot(ids: Tensor, like: Tensor) -> Tensor:
    """ids [B, T] -> [B, T, V], with V and dtype as in ``like`` [..., V]."""
    return (ids[..., None] == torch.arange(like.shape[-1], device=like.device)).to(like.dtype)


def mark_seen(seen: Tensor, ids: Tensor) -> Tensor:
    """The tokens seen before each of T+1 positions, when ``ids`` follow one another.

    Args:
        seen: tokens in the text so far. [B, V]
        ids: [B, T]

    Returns:
        [B, T+1, V]; row 0 is ``seen``.
    """
    steps = torch.cat((seen[:, None], one_hot(ids, seen)), dim=1)
    return steps.cumsum(dim=1) > 0


def to_probs(logits: Tensor, settings: Settings, seen: Tensor | None = None) -> Tensor:
    """Probabilities from logits.

    Args:
        logits: [B, T, V]
        seen: which tokens occur in prompt and output before each position; needed for a repetition penalty. [B, T, V]

    Returns:
        [B, T, V] in float32, or float64 where the logits are.
    """
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if settings.logit_bias is not None:
        x = x + settings.logit_bias[:, None]
    if settings.repetition_penalty is not None:
        assert seen is not None, "a repetition penalty needs to know the tokens seen"
        penalty = settings.repetition_penalty[:, None, None]
        x = torch.where(seen, torch.where(x < 0, x * penalty, x / penalty), x)
    if not settings.has_sampled:
        return one_hot(x.argmax(dim=-1), x)
    temperature = settings.temperature[:, None, None]
    # Subtracting the maximum first keeps tiny temperatures from overflowing; rows at temperature 0 are replaced below.
    scores = (x - x.amax(dim=-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
    if settings.top_k is not None:
        scores = _keep_top_k(scores, settings.top_k, settings.largest_top_k)
    if settings.top_p is not None:
        scores = _keep_top_p(scores, settings.top_p)
    if settings.min_p is not None:
        scores = _keep_min_p(scores, settings.min_p)
    probs = scores.softmax(dim=-1)
    if settings.has_greedy:
        probs = torch.where(temperature > 0, probs, one_hot(x.argmax(dim=-1), x))
    return probs


def _keep_top_k(scores: Tensor, top_k: Tensor, largest: int) -> Tensor:
    vocab_size = scores.shape[-1]
    values = scores.topk(largest, dim=-1).values  # [B, T, largest]
    index = (top_k - 1).clamp_max(largest - 1)[:, None, None].expand(*scores.shape[:2], 1)
    threshold = values.gather(-1, index)
    is_off = (top_k == vocab_size)[:, None, None]
    return scores.masked_fill((scores < threshold) & ~is_off, -torch.inf)


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    # Ascending, as Hugging Face does it: what is cut off is the lower tail of mass at most 1 - top_p.
    ascending, order = scores.sort(dim=-1, stable=True)
    is_cut = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1.0 - top_p)[:, None, None]
    is_cut[..., -1] = False  # the most probable token always stays
    return scores.masked_fill(torch.zeros_like(is_cut).scatter_(-1, order, is_cut), -torch.inf)


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    probs = scores.softmax(dim=-1)
    return scores.masked_fill(probs < min_p[:, None, None] * probs.amax(dim=-1, keepdim=True), -torch.inf)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw from each row by inverting its cumulative sum.

    Args:
        weights: non-negative, not all zero; need not be normalised. [B, V]
        uniform: 0 < u < 1. [B]

    Returns:
        [B]; never a token of weight zero.
    """
    cumulative = wide(weights).cumsum(dim=-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    # The first index whose cumulative sum is above the threshold. On a flat stretch (weight zero) that is never it, if
    # the sum is made in order, as on the CPU.
    ids = torch.searchsorted(cumulative, threshold, right=True).clamp_max_(weights.shape[-1] - 1)
    if weights.device.type != "cpu":  # a parallel sum may not be flat in its last bits
        ids = torch.where(weights.gather(-1, ids) > 0, ids, weights.argmax(dim=-1, keepdim=True))
    return ids.squeeze(-1)


def draw_gumbel(probs: Tensor, noise: Tensor) -> Tensor:
    """The Gumbel-max trick: argmax of log-probability plus noise follows the probabilities. [..., V] -> [...]"""
    return (wide(probs).log() + noise).argmax(dim=-1)
