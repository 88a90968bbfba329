"""Candidates: probabilities of few tokens in place of a number for each token of the vocabulary, on the CPU.

The rows of a round are functions of V logits, and most tokens cannot be drawn. The C++ library (candidates.cpp) reads
each row of logits once and keeps the tokens that can; the rules, in C++ as well (verdicts.cpp), read these alone. A row
that keeps all of its tokens is one of V weights, without ids. Nothing else differs from full rows of probabilities
(probs.py), which are the definition, and the path of other devices and types.

All rows of a round, those of p and of q, lie in buffers that the next round uses again. Moving rows moves their numbers
in the buffers.

This module does not know sampling options.
"""

from __future__ import annotations

import math
from ctypes import byref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.library import call, check, library
from outrider.kernels.structures import native
from outrider.records import Draft, Verdict

_ALIGNMENT = 16  # of rows (token_rows.h)


def candidate_buffers(vocab_size: int, device: torch.device) -> CandidateBuffers | None:
    """Empty buffers; None where rows are tensors: on other devices, or without the C++ library."""
    return CandidateBuffers(vocab_size) if device.type == "cpu" and library() is not None else None


class CandidateBuffers:
    """The rows of a round: tokens that can be drawn, with weights. The probability of a token is its weight over the
    row's sum."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # Of the tokens of all rows; ids are ascending in a row. int32 [N], float32 [N]
        self.ids, self.weights = torch.empty(0, dtype=torch.int32), torch.empty(0)
        # Where the tokens of each row start, and how many they are; -1: all of the vocabulary, without ids. [R]
        self.starts, self.counts = torch.empty(2, 0, dtype=torch.long)
        self.sums = torch.empty(0, dtype=torch.float64)  # of the weights of each row. [R]
        # The same in C++ (token_rows.h), with the numbers of rows and of tokens.
        self.native = native().CandidateBuffers(vocab_size=vocab_size)

    def clear(self) -> None:
        """Drop all rows. Later ones are written over them."""
        self.native.num_rows = self.native.num_tokens = 0

    def of_logits(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> tuple[Candidates, Tensor]:
        """Add rows of logits, float32 [B, T, V], or [B, T, D] of the D ``token_ids``, ascending. The options [B] mean
        what they mean in probs.py. Returns the [B, T] rows, and whether each row of logits is finite [B, T]."""
        num_rows, num_places, num_tokens = logits.shape
        check(num_tokens == (self.vocab_size if token_ids is None else len(token_ids)), "a logit for each token")
        flat = logits.reshape(-1, num_tokens)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        is_finite = torch.empty(num_rows, num_places, dtype=torch.bool)
        options = temperature, top_k, top_p, None if min_p is None else min_p.double().log().float()
        check(all(one is None or one.shape == (num_rows,) for one in options), "options of each row")
        rows = self._new_rows(num_rows, num_places, num_tokens=num_tokens)
        given = flat, len(flat), flat.stride(0), num_tokens, num_places, token_ids
        call("candidates", byref(self.native), *given, *options, is_finite)
        return rows, is_finite

    def one_hot(self, ids: Tensor) -> Candidates:
        """Add rows of one token each. [B, T]"""
        rows = self._new_rows(*ids.shape, num_tokens=1)
        call("one_hot", byref(self.native), ids.contiguous(), ids.numel())
        return rows

    def _new_rows(self, *shape: int, num_tokens: int) -> Candidates:
        """The rows that are added next, and room for as many tokens in each. [*shape]"""
        used, num_new = self.native, math.prod(shape)
        num_rows, end = used.num_rows + num_new, used.num_tokens + num_new * (num_tokens + _ALIGNMENT)
        if num_rows > len(self.sums) or end > len(self.ids):
            self.ids, self.weights = (_enlarged(one, used.num_tokens, end) for one in (self.ids, self.weights))
            of_rows = self.starts, self.counts, self.sums
            self.starts, self.counts, self.sums = (_enlarged(one, used.num_rows, num_rows) for one in of_rows)
            for name in ("ids", "weights", "starts", "counts", "sums"):
                setattr(used, name, getattr(self, name).data_ptr())
        return Candidates(self, torch.arange(used.num_rows, num_rows).view(shape))


def _enlarged(values: Tensor, num_used: int, num: int) -> Tensor:
    """The first numbers, with room for at least ``num``. Memory that is never written costs nothing."""
    more = values.new_empty(max(num, 2 * len(values)))
    more[:num_used] = values[:num_used]
    return more


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of the buffers, until these are cleared."""

    buffers: CandidateBuffers
    index: Tensor  # the numbers of the rows. [...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor. [..., V]"""
        return *self.index.shape, self.buffers.vocab_size

    def __getitem__(self, index: Any) -> Candidates:
        return replace(self, index=self.index[index])

    def full(self) -> Tensor:
        """Probabilities of all tokens. float64 [..., V]"""
        buffers, vocab_size = self.buffers, self.buffers.vocab_size
        probs = torch.zeros(self.shape, dtype=torch.float64)
        for row, number in zip(probs.view(-1, vocab_size), self.index.flatten().tolist(), strict=True):
            start, count = int(buffers.starts[number]), int(buffers.counts[number])
            place = slice(start, start + (vocab_size if count < 0 else count))
            row[slice(None) if count < 0 else buffers.ids[place].long()] = (
                buffers.weights[place].double() / buffers.sums[number]
            )
        return probs

    def draw(self, uniforms: Tensor) -> Tensor:
        """Draw from each row by inverting its cumulative sum. [B] -> [B]"""
        return self._draw(uniforms.contiguous(), None, None)

    def draw_with_noise(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw with the Gumbel noise of these seeds and positions (noise.py). [B] -> [B]"""
        return self._draw(None, seeds.contiguous(), positions.contiguous())

    def _draw(self, *noise: Tensor | None) -> Tensor:
        check(all(one is None or one.shape == self.index.shape for one in noise), "noise of each row")
        ids = torch.empty(self.index.shape, dtype=torch.long)
        call("draw", byref(self.buffers.native), self.index.contiguous(), ids.numel(), *noise, ids)
        return ids

    def verify(self, rule: int, draft: Draft, noise: tuple[Tensor | int | None, ...]) -> Verdict:
        """The verdict of a rule of rules.py, on rows of p [B, K+1] and a draft with candidates in the same buffers. The
        noise: uniform numbers, the number of each row's, seeds and positions, as far as the rule has them."""
        num_rows, k = draft.ids.shape
        check(self.index.shape == (num_rows, k + 1), "rows of p at each drafted token, and after them")
        check(all(len(one) == num_rows for one in noise if isinstance(one, Tensor)), "noise of each row")
        check(draft.probs is None or draft.probs.buffers is self.buffers, "rows of p and q in the same buffers")
        num_accepted, next_ids = torch.empty(2, num_rows, dtype=torch.long)
        drafted_probs = torch.zeros(num_rows, k, 2, dtype=torch.float64)
        p, q = self.index.contiguous(), None if draft.probs is None else draft.probs.index.contiguous()
        given = p, q, draft.ids.contiguous(), draft.num_drafted.contiguous(), *noise
        call("verify", byref(self.buffers.native), rule, num_rows, k, *given, num_accepted, next_ids, drafted_probs)
        return Verdict(num_accepted, next_ids, drafted_probs)
