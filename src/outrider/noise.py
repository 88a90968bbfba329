"""Randomness as a pure function of (seed, position, offset, use).

A counter-based generator has no state to carry, so that noise can be made anywhere, in any order and for any subset of
the rows, and its words are the same on every device. The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw:
Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011), written in tensor operations.

Two kinds of keys, for two kinds of rules:

- ``round_uniforms``: (seed, position at which the round began, offset in the round, use). Under block verification a
  token's fate depends on tokens drafted *after* it. Noise keyed by the token's own position alone would be met again by
  the next round, no longer independent of what was committed; the round in the key prevents that.
- ``gumbels``: (seed, position, token id), for the rule in which draft and target must see the same noise.

This module does not know what the numbers are used for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

# The last word of the counter: what the numbers are for. No two uses ever share a counter.
_USE_DRAFT_AND_ACCEPT = 0
_USE_NEXT = 1
_USE_GUMBEL = 2


def philox_4x32(counters: Tensor, keys: Tensor) -> Tensor:
    """Philox-4x32-10.

    Args:
        counters: 32-bit words in int64. [..., 4]
        keys: 32-bit words in int64, one key for each row of counters. [..., 2]

    Returns:
        Random 32-bit words in int64. [..., 4]
    """
    device = counters.device
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device)
    steps = torch.tensor(_KEY_STEPS, dtype=torch.int64, device=device)
    # The even words (0 and 2) are multiplied, the odd ones (1 and 3) are mixed in: two lanes of the same arithmetic.
    even, odd = counters[..., 0::2], counters[..., 1::2]
    for _ in range(_NUM_ROUNDS):
        # int64 products wrap around, which keeps the low 64 bits; the mask makes the shift a logical one.
        products = (even * multipliers).flip(-1)
        even = ((products >> 32) & _MASK) ^ odd ^ keys
        odd = products & _MASK
        keys = (keys + steps) & _MASK
    return torch.stack((even, odd), dim=-1).flatten(-2)


def split_words(values: Tensor) -> Tensor:
    """Non-negative int64 [...] as two 32-bit words, low word first [..., 2]."""
    return torch.stack((values & _MASK, values >> 32), dim=-1)


def _to_uniform(low: Tensor, high: Tensor) -> Tensor:
    """Two 32-bit words to a number in (0, 1) on a grid of 2**-53 (2**-24 where the device lacks float64).

    The half step keeps 0 out, so that logarithms are finite; 1 is out of reach in any case.
    """
    if low.device.type == "mps":
        return ((low >> 9).to(torch.float32) + 0.5) * 2.0**-23
    bits = ((low >> 6) << 26) | (high >> 6)  # 52 bits: the half step must fit into the mantissa
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class RoundUniforms:
    """All uniform numbers of one round, each used once. ``draft`` and ``accept`` [B, K], ``next`` [B]."""

    draft: Tensor
    accept: Tensor
    next: Tensor


def round_uniforms(seeds: Tensor, round_starts: Tensor, k: int) -> RoundUniforms:
    """Uniform numbers for one round of each row.

    Args:
        seeds: 0 <= seed < 2**63. [B]
        round_starts: number of tokens (prompt included) committed before the round. [B]
        k: offsets 0..k-1 are drafted.
    """
    num_rows = seeds.shape[0]
    offsets = torch.arange(k + 1, device=seeds.device) % max(k, 1)  # the last column is the next token's: offset 0
    uses = torch.full_like(offsets, _USE_DRAFT_AND_ACCEPT)
    uses[k] = _USE_NEXT
    counters = torch.stack(
        (
            round_starts[:, None].expand(num_rows, k + 1),
            offsets.expand(num_rows, k + 1),
            torch.zeros_like(offsets).expand(num_rows, k + 1),
            uses.expand(num_rows, k + 1),
        ),
        dim=-1,
    )  # [B, K+1, 4]
    words = philox_4x32(counters, split_words(seeds)[:, None])
    first = _to_uniform(words[..., 0], words[..., 1])
    second = _to_uniform(words[..., 2], words[..., 3])
    return RoundUniforms(draft=first[:, :k], accept=second[:, :k], next=first[:, k])


def gumbels(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, -log(-log(u)), keyed by (seed, position, token id).

    Args:
        seeds: [B]
        positions: index of the token that the noise is to choose. [B, T]

    Returns:
        [B, T, V]
    """
    num_rows, num_positions = positions.shape
    num_pairs = (vocab_size + 1) // 2  # four words make the noise of two tokens
    pairs = torch.arange(num_pairs, device=positions.device)
    shape = (num_rows, num_positions, num_pairs)
    counters = torch.stack(
        (
            positions[..., None].expand(shape),
            pairs.expand(shape),
            torch.zeros_like(pairs).expand(shape),
            torch.full_like(pairs, _USE_GUMBEL).expand(shape),
        ),
        dim=-1,
    )  # [B, T, V/2, 4]
    words = philox_4x32(counters, split_words(seeds)[:, None, None])
    uniforms = torch.stack(
        (_to_uniform(words[..., 0], words[..., 1]), _to_uniform(words[..., 2], words[..., 3])), dim=-1
    ).flatten(-2)  # [B, T, V or V+1]
    return -(-uniforms[..., :vocab_size].log()).log()


class GumbelNoise:
    """The Gumbel noise of one round, made when it is asked for: a row without drafts needs that of one token."""

    def __init__(self, seeds: Tensor, round_starts: Tensor, vocab_size: int) -> None:
        self._seeds, self._round_starts, self._vocab_size = seeds, round_starts, vocab_size
        self._rows: list[Tensor] = []

    def at(self, offset: int) -> Tensor:
        """Noise of the token at this offset in the round. [B, V]"""
        while len(self._rows) <= offset:
            positions = self._round_starts[:, None] + len(self._rows)
            self._rows.append(gumbels(self._seeds, positions, self._vocab_size)[:, 0])
        return self._rows[offset]
