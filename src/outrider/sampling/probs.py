"""Logits to probabilities, for p and q alike, and drawing from them.

Order and meaning of the processors are those of Hugging Face's ``generate``: logit bias, repetition penalty,
temperature, top-k, top-p, min-p. The penalties of OpenAI's API (presence, frequency) and min_tokens come after the
repetition penalty, as in vLLM. All arithmetic is in float32 or better. Temperature 0 is a one-hot row at
the largest logit (the lowest id on ties), so that greedy decoding is sampling from a distribution like any other.

Every function works row by row: the result for a row does not depend on the other rows.

Rows of probabilities are tensors [..., V], or candidates (candidates.py): ``probs_of`` makes whichever is fast here,
and the functions below take either. ``to_probs`` is the definition.

This module does not know models, drafts or acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.runtime.shape_buckets import power_of_two
from outrider.runtime.vocabulary import spread
from outrider.sampling.candidates import CandidateBuffers, Candidates
from outrider.sampling.history import NO_HISTORY, History
from outrider.sampling.masks import Masked, mask

Probs: TypeAlias = Tensor | Candidates
"""Rows of probabilities, up to a factor for each row. [..., V]"""

_TINY = torch.finfo(torch.float32).tiny
_MOST_TOKENS = torch.iinfo(torch.int32).max  # in a sequence


@dataclass(frozen=True, slots=True)
class Settings:
    """The sampling options of B rows as tensors. A field is None until a row uses it."""

    temperature: Tensor  # [B]
    top_k: Tensor | None = None  # [B], V where off
    largest_top_k: int = 1  # at least the largest in use: a power of two, since shapes depend on it
    top_p: Tensor | None = None  # [B]
    min_p: Tensor | None = None  # [B]
    repetition_penalty: Tensor | None = None  # [B]
    presence_penalty: Tensor | None = None  # [B]
    frequency_penalty: Tensor | None = None  # [B]
    logit_bias: Tensor | None = None  # [B, V]
    min_tokens: Tensor | None = None  # [B]
    is_end: Tensor | None = None  # tokens forbidden before min_tokens; set together with it. [B, V]
    has_greedy: bool = False
    has_sampled: bool = False
    candidates: CandidateBuffers | None = None  # for rows; None: rows are tensors, as steps that are captured need

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocab_size: int, device: torch.device) -> Settings:
        """Settings of these rows, with all end tokens among their ``stop_token_ids`` (``Sampling.with_ends``).
        Constraints are not part of the settings."""
        assert not any(row.is_constrained for row in rows)
        settings = cls.neutral(len(rows), device)
        for index, row in enumerate(rows):
            settings = settings.with_row(index, row, vocab_size)
        return settings

    @classmethod
    def neutral(cls, num_rows: int, device: torch.device, candidates: CandidateBuffers | None = None) -> Settings:
        return cls(torch.ones(num_rows, device=device), candidates=candidates)

    @property
    def has_counts(self) -> bool:
        """Whether an option needs the counts of tokens in the output."""
        return self.presence_penalty is not None or self.frequency_penalty is not None

    def with_room(self, history: History, num_rows: int, vocab_size: int) -> History:
        """Add the fields that these options need to a history. (Rows that began without them have neutral values.)"""

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=self.temperature.device)

        if self.repetition_penalty is not None and history.seen is None:
            history = replace(history, seen=empty(torch.bool, vocab_size))
        if self.has_counts and history.counts is None:
            history = replace(history, counts=empty(torch.int32, vocab_size))
        if self.min_tokens is not None and history.num_generated is None:
            history = replace(history, num_generated=empty(torch.int32))
        return history

    def with_row(self, index: int, row: Sampling, vocab_size: int) -> Settings:
        """Set the options of one row, in place where tensors exist. Options that no row has used before are added;
        those in use stay, also if this row does not use them."""
        top_k = min(row.top_k or vocab_size, vocab_size)
        largest = self.largest_top_k if top_k == vocab_size else max(self.largest_top_k, power_of_two(top_k))
        like = self.temperature
        # A temperature that float32 would round to 0 must not become greedy by accident.
        like[index] = max(row.temperature, _TINY) if row.temperature > 0 else 0.0
        ends = dict.fromkeys(row.stop_token_ids, 1.0) if row.min_tokens else {}
        min_tokens = min(row.min_tokens, _MOST_TOKENS) if ends else 0
        return replace(
            self,
            top_k=_with_value(self.top_k, like, index, top_k, vocab_size, torch.long),
            largest_top_k=min(vocab_size, largest),
            top_p=_with_value(self.top_p, like, index, row.top_p, 1.0),
            min_p=_with_value(self.min_p, like, index, row.min_p, 0.0),
            repetition_penalty=_with_value(self.repetition_penalty, like, index, row.repetition_penalty, 1.0),
            presence_penalty=_with_value(self.presence_penalty, like, index, row.presence_penalty, 0.0),
            frequency_penalty=_with_value(self.frequency_penalty, like, index, row.frequency_penalty, 0.0),
            logit_bias=_with_tokens(self.logit_bias, like, index, row.logit_bias or {}, vocab_size),
            min_tokens=_with_value(self.min_tokens, like, index, min_tokens, 0, torch.int32),
            is_end=_with_tokens(self.is_end, like, index, ends, vocab_size, torch.bool),
            has_greedy=self.has_greedy or row.temperature == 0,
            has_sampled=self.has_sampled or row.temperature > 0,
        )

    def greedy(self) -> Settings:
        """A copy at temperature 0, where the filters change nothing."""
        zeros = torch.zeros_like(self.temperature)
        return replace(self, temperature=zeros, top_k=None, top_p=None, min_p=None, has_greedy=True, has_sampled=False)

    def first(self, num_rows: int) -> Settings:
        if num_rows == len(self.temperature):
            return self
        tensors = {name: value for name in _PER_ROW if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value[:num_rows] for name, value in tensors.items()})


_PER_ROW = tuple(one.name for one in fields(Settings) if "Tensor" in one.type)


def _with_value(
    values: Tensor | None, like: Tensor, index: int, value: float, neutral: float, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """One option of all rows [B]; None if no row has used it so far."""
    if values is None:
        if value == neutral:
            return None
        # float32, so that the values do not depend on the dtype of the logits.
        values = torch.full_like(like, neutral, dtype=dtype)
    values[index] = value
    return values


def _with_tokens(
    values: Tensor | None,
    like: Tensor,
    index: int,
    given: Mapping[int, float],
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """One per-token option of all rows [B, V]; None if no row has used it so far."""
    if values is None:
        if not given:
            return None
        values = torch.zeros(len(like), vocab_size, dtype=dtype, device=like.device)
    row = torch.zeros(vocab_size, dtype=dtype)
    if given:  # it may name the whole vocabulary
        row[list(given)] = torch.tensor(list(given.values()), dtype=dtype)
    values[index] = row.to(values.device)  # one copy, not one per value
    return values


def wide(x: Tensor) -> Tensor:
    """Convert to float64, where the device has it."""
    return x if x.device.type == "mps" else x.to(torch.float64)


def wide_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, in float64 where the device has it. [..., V] -> [...]"""
    return x.sum(dim=-1, dtype=None if x.device.type == "mps" else torch.float64)


def normalise(rows: Tensor) -> Tensor:
    """Normalise rows to sum to 1, in float64 where the device has it; rows of zeros stay. [..., V]"""
    total = wide_sum(rows)[..., None]
    return wide(rows) / torch.where(total > 0, total, 1.0)


def is_finite(logits: Tensor) -> Tensor:
    """Whether rows of logits can be sampled from: no NaN, no +inf, something above -inf. [..., V] -> [...]"""
    return logits.amax(dim=-1).isfinite()


def one_hot(ids: Tensor, like: Tensor) -> Tensor:
    """ids [B, T] -> [B, T, V], with V and dtype as in ``like`` [..., V]."""
    return (ids[..., None] == torch.arange(like.shape[-1], device=like.device)).to(like.dtype)


def change(logits: Tensor, settings: Settings, history: History = NO_HISTORY, allowed: Masked = None) -> Tensor:
    """Logits after the options that change those of single tokens: the given ones where nothing changes them, else
    [B, T, V] in the dtype of ``to_probs``, whose arguments these are."""
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if settings.logit_bias is not None:
        x = x + settings.logit_bias[:, None]
    if settings.repetition_penalty is not None:
        assert history.seen is not None, "a repetition penalty needs the tokens seen"
        penalty = settings.repetition_penalty[:, None, None]
        x = torch.where(history.seen, torch.where(x < 0, x * penalty, x / penalty), x)
    if settings.has_counts:
        assert history.counts is not None, "presence and frequency penalties need counts"
        if settings.frequency_penalty is not None:
            x = x - settings.frequency_penalty[:, None, None] * history.counts
        if settings.presence_penalty is not None:
            x = x - settings.presence_penalty[:, None, None] * (history.counts > 0)
    if settings.min_tokens is not None:
        assert history.num_generated is not None and settings.is_end is not None
        is_early = history.num_generated < settings.min_tokens[:, None]
        x = x.masked_fill(is_early[..., None] & settings.is_end[:, None], -torch.inf)
    return mask(x, allowed)


def to_probs(logits: Tensor, settings: Settings, history: History = NO_HISTORY, allowed: Masked = None) -> Tensor:
    """Probabilities from logits.

    Args:
        logits: [B, T, V]
        history: before each of T positions, with the fields that the settings need.
        allowed: the effects of constraints (masks.py). [B, T, V]

    Returns:
        [B, T, V] in float32, or float64 where the logits are.
    """
    return _to_probs(change(logits, settings, history, allowed), settings)


def _to_probs(x: Tensor, settings: Settings) -> Tensor:
    """Probabilities from logits that are changed already. [B, T, V]"""
    if not settings.has_sampled:
        return one_hot(x.argmax(dim=-1), x)
    temperature = settings.temperature[:, None, None]
    # Subtracting the maximum first keeps tiny temperatures from overflowing; rows at temperature 0 are replaced below.
    scores = (x - x.amax(dim=-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
    if settings.top_k is not None:
        scores = scores.masked_fill(_is_below_top_k(x, settings.top_k, settings.largest_top_k), -torch.inf)
    if settings.top_p is not None:
        scores = _keep_top_p(scores, settings.top_p)
    if settings.min_p is not None:  # the largest score is 0
        scores = scores.masked_fill(scores < wide(settings.min_p).log().float()[:, None, None], -torch.inf)
    probs = scores.softmax(dim=-1)
    if settings.has_greedy:
        probs = torch.where(temperature > 0, probs, one_hot(x.argmax(dim=-1), x))
    return probs


def probs_of(
    logits: Tensor,
    settings: Settings,
    history: History = NO_HISTORY,
    allowed: Masked = None,
    token_ids: Tensor | None = None,
    vocab_size: int = 0,
) -> tuple[Probs, Tensor]:
    """Rows of probabilities for the loop, and whether each is a distribution: the logits are finite, and the options
    leave a token. [B, T, V], [B, T] The arguments are those of ``to_probs``, which says what the rows are. If the
    logits are those of D tokens alone, ``token_ids`` are these, ascending, and ``vocab_size`` is V."""
    buffers = None if logits.dtype == torch.float64 else settings.candidates
    if token_ids is not None:
        assert logits.shape[-1] == len(token_ids)
        own = settings.logit_bias, settings.repetition_penalty, settings.min_tokens, allowed  # of single tokens
        if buffers is None or settings.has_counts or any(one is not None for one in own):
            logits, token_ids = spread(logits, token_ids, vocab_size), None
    x = change(logits, settings, history, allowed)
    if buffers is None:
        return _to_probs(x, settings), is_finite(x)
    return buffers.of_logits(x, settings.temperature, settings.top_k, settings.top_p, settings.min_p, token_ids)


def full(probs: Probs) -> Tensor:
    """Rows as a tensor. [..., V]"""
    return probs.full() if isinstance(probs, Candidates) else probs


def only_ids(rows: Probs) -> Tensor:
    """The tokens of one-hot rows. [B, V] -> [B]"""
    if isinstance(rows, Candidates):
        return rows.draw(torch.full(rows.index.shape, 0.5, dtype=torch.float64))
    return rows.argmax(dim=-1)


def certain_rows(ids: Tensor, vocab_size: int, settings: Settings) -> Probs:
    """Rows of one token each. ids [B, T] -> [B, T, V]"""
    if settings.candidates is not None:
        return settings.candidates.one_hot(ids)
    return one_hot(ids, torch.empty(vocab_size, device=ids.device))


def certain_where(is_certain: Tensor, ids: Tensor, rows: Probs) -> Probs:
    """The rows, but those of one token where a sequence is certain. [B], ids [B, T], [B, T, V] -> [B, T, V]"""
    if isinstance(rows, Candidates):
        certain = rows.buffers.one_hot(ids).index
        return replace(rows, index=torch.where(is_certain[:, None], certain, rows.index))
    return torch.where(is_certain[:, None, None], one_hot(ids, rows), rows)


def stack_places(parts: Sequence[Any]) -> Any:
    """Stack tensors, or rows of either kind, one place after the other. T of [B, ...] -> [B, T, ...]"""
    if isinstance(parts[0], Candidates):
        return replace(parts[0], index=torch.stack([part.index for part in parts], dim=1))
    return torch.stack(tuple(parts), dim=1)


def _is_below_top_k(x: Tensor, top_k: Tensor, largest: int) -> Tensor:
    vocab_size = x.shape[-1]
    values = x.topk(largest, dim=-1).values  # [B, T, largest]
    index = (top_k - 1).clamp_max(largest - 1)[:, None, None].expand(*x.shape[:2], 1)
    is_off = (top_k == vocab_size)[:, None, None]
    return (x < values.gather(-1, index)) & ~is_off


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    # Ascending, as in Hugging Face: cut the lower tail of mass at most 1 - top_p.
    ascending, order = scores.sort(dim=-1, stable=True)
    is_cut = wide(ascending.softmax(dim=-1)).cumsum(dim=-1) <= (1.0 - top_p)[:, None, None]
    is_cut[..., -1] = False  # the most probable token always stays
    return scores.masked_fill(torch.zeros_like(is_cut).scatter_(-1, order, is_cut), -torch.inf)


def draw(weights: Probs, uniform: Tensor) -> Tensor:
    """Draw from each row by inverting its cumulative sum.

    Args:
        weights: non-negative, not all zero; need not be normalised. [B, V]
        uniform: 0 < u < 1. [B]

    Returns:
        [B]; never a token of weight zero.
    """
    if isinstance(weights, Candidates):
        return weights.draw(uniform)
    cumulative = wide(weights).cumsum(dim=-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    # The first index whose cumulative sum is above the threshold: never one of weight zero if the sum is sequential, as
    # on the CPU.
    ids = torch.searchsorted(cumulative, threshold, right=True).clamp_max_(weights.shape[-1] - 1)
    if weights.device.type != "cpu":  # a parallel sum may increase at weight zero in its last bits
        ids = torch.where(weights.gather(-1, ids) > 0, ids, weights.argmax(dim=-1, keepdim=True))
    return ids.squeeze(-1)


def draw_gumbel(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw by the Gumbel-max trick: argmax of log-probability plus noise. [..., V] -> [...]"""
    return (wide(probs).log() + noise).argmax(dim=-1)
