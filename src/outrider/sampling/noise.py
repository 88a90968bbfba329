"""Randomness as a pure function of (seed, position, offset, use).

A counter-based generator has no state, so that noise can be made anywhere, in any order and for any subset of the rows,
and its words are the same on every device. The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw:
Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011), written in tensor operations.

Two kinds of keys, for two kinds of rules:

- ``round_uniforms``: (seed, position at which the round began, offset in the round, use). Under block verification
  the acceptance of a token depends on tokens drafted *after* it. Noise keyed by position alone would be reused in the
  next round, no longer independent of the committed tokens; the round in the key prevents that.
- ``gumbels``: (seed, position, token id), for the rule in which draft and target must see the same noise.

This module does not know what the numbers are used for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

# The last word of the counter: the use of the numbers. No two uses share a counter.
_USE_DRAFT_AND_ACCEPT = 0
_USE_NEXT = 1
_USE_GUMBEL = 2
_USE_LEAST = 3

_BLOCK = 64  # token ids with a least exponential

_MAX_STARTS_AHEAD, _MAX_COUNTERS_AHEAD = 256, 16384


def philox_4x32(counters: Tensor, keys: Tensor) -> Tensor:
    """Philox-4x32-10.

    Args:
        counters: 32-bit words in int64. [..., 4]
        keys: 32-bit words in int64, one key for each row of counters. [..., 2]

    Returns:
        Random 32-bit words in int64. [..., 4]
    """
    device = counters.device
    # Made on the device: nothing may be copied from the host while a CUDA graph is captured.
    is_first = torch.arange(2, device=device) == 0
    multipliers, steps = torch.where(is_first, *_MULTIPLIERS), torch.where(is_first, *_KEY_STEPS)
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
    """Split non-negative int64 [...] into two 32-bit words, low word first [..., 2]."""
    return torch.stack((values & _MASK, values >> 32), dim=-1)


def _to_uniform(low: Tensor, high: Tensor) -> Tensor:
    """Convert two 32-bit words to a number in (0, 1) on a grid of 2**-53 (2**-24 where the device lacks float64). The
    half step excludes 0, so that logarithms are finite; 1 is out of reach in any case."""
    if low.device.type == "mps":
        return ((low >> 9).to(torch.float32) + 0.5) * 2.0**-23
    bits = ((low >> 6) << 26) | (high >> 6)  # 52 bits: the half step must fit into the mantissa
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class RoundUniforms:
    """All uniform numbers of a round, each used once; in one tensor, since the loop selects from them in each round."""

    values: Tensor  # ``next``, then ``accept`` and ``draft`` of each offset. [B, 2K+1]

    @classmethod
    def of(cls, draft: Tensor, accept: Tensor, next: Tensor) -> RoundUniforms:
        """Pack draft, accept [B, K] and next [B]."""
        return cls(torch.cat((next[:, None], torch.stack((accept, draft), dim=-1).flatten(1)), dim=1))

    @property
    def draft(self) -> Tensor:
        """For drawing the drafts. [B, K]"""
        return self.values[:, 2::2]

    @property
    def accept(self) -> Tensor:
        """For the tests of acceptance. [B, K]"""
        return self.values[:, 1::2]

    @property
    def next(self) -> Tensor:
        """For drawing the token after them. [B]"""
        return self.values[:, 0]

    def at(self, offset: int) -> Tensor:
        """For drawing the drafted token at this offset. [B]"""
        return self.draft[:, offset]

    def select(self, rows: Tensor, k: int) -> RoundUniforms:
        """Select rows [B'], for rounds of at most ``k`` drafted tokens."""
        return RoundUniforms(self.values[:, : 2 * k + 1].index_select(0, rows))

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        return self.values.contiguous(), self.values.shape[1], None, None


def round_uniforms(seeds: Tensor, round_starts: Tensor, k: int) -> RoundUniforms:
    """Uniform numbers for one round of each row.

    Args:
        seeds: 0 <= seed < 2**63. [B]
        round_starts: number of tokens (prompt included) committed before the round. [B]
        k: offsets 0..k-1 are drafted.
    """
    offsets = torch.arange(k + 1, device=seeds.device) % max(k, 1)  # the last column is the next token's: offset 0
    uses = torch.full_like(offsets, _USE_DRAFT_AND_ACCEPT)
    uses[k] = _USE_NEXT
    words = _words(seeds[:, None], round_starts[:, None], offsets, uses)  # [B, K+1, 4]
    first = _to_uniform(words[..., 0], words[..., 1])
    second = _to_uniform(words[..., 2], words[..., 3])
    return RoundUniforms.of(first[:, :k], second[:, :k], first[:, k])


def gumbels(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, keyed by (seed, position, token id): -log of exponential noise.

    Each block of 64 token ids has a least exponential, a 64th of a standard one, and a token at random that holds it.
    The other tokens add a standard exponential each: exponential noise has no memory, so all are independent and
    standard. A draw can leave out a block whose least exponential is too large for all of its tokens (verdicts.cpp).

    Source: drawing the largest of many first, Maddison, Tarlow, Minka 1411.0030 (A* sampling).

    Args:
        seeds: [B]
        positions: the positions of the tokens that the noise chooses. [B, T]

    Returns:
        [B, T, V]
    """
    ids = torch.arange(vocab_size, device=positions.device)
    rows = seeds[:, None, None], positions[..., None]
    pairs = ids[: (vocab_size + 1) // 2]
    words = _words(*rows, pairs, torch.full_like(pairs, _USE_GUMBEL))  # four words make the noise of two tokens
    uniforms = torch.stack(
        (_to_uniform(words[..., 0], words[..., 1]), _to_uniform(words[..., 2], words[..., 3])), dim=-1
    ).flatten(-2)  # [B, T, V or V+1]
    blocks = ids[: (vocab_size + _BLOCK - 1) // _BLOCK]
    of_blocks = _words(*rows, blocks, torch.full_like(blocks, _USE_LEAST))
    least = -_to_uniform(of_blocks[..., 0], of_blocks[..., 1]).log() / _BLOCK
    block = ids // _BLOCK
    holds = of_blocks[..., 2][..., block] % _BLOCK == ids % _BLOCK
    more = torch.where(holds, 0.0, -uniforms[..., :vocab_size].log())
    return -(least[..., block] + more).log()


def _words(seeds: Tensor, positions: Tensor, indices: Tensor, uses: Tensor) -> Tensor:
    """Random words of counters (position, index, 0, use). All [...], which broadcast -> [..., 4]"""
    places = torch.broadcast_tensors(positions, indices, torch.zeros_like(indices), uses)
    return philox_4x32(torch.stack(places, dim=-1), split_words(seeds))


@dataclass(frozen=True, slots=True)
class GumbelNoise:
    """The Gumbel noise of one round, computed lazily and once: without drafts, the noise of one token is enough."""

    seeds: Tensor  # [B]
    round_starts: Tensor  # [B]
    vocab_size: int
    _values: list[Tensor] = field(default_factory=list, init=False)
    _later: list[GumbelNoise] = field(default_factory=list, init=False)

    def values(self) -> Tensor:
        """Noise of the round's first token. [B, V]"""
        if not self._values:
            self._values.append(gumbels(self.seeds, self.round_starts[:, None], self.vocab_size)[:, 0])
        return self._values[0]

    def at(self, offset: int) -> GumbelNoise:
        """Noise of the token at this offset in the round, and of those after it."""
        while len(self._later) < offset:
            starts = self.round_starts + len(self._later) + 1
            self._later.append(GumbelNoise(self.seeds, starts, self.vocab_size))
        return self._later[offset - 1] if offset else self

    def select(self, rows: Tensor, k: int) -> GumbelNoise:
        """Select rows [B']. The noise is computed lazily, so ``k`` has no effect."""
        return GumbelNoise(self.seeds[rows], self.round_starts[rows], self.vocab_size)

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        return None, 0, self.seeds.contiguous(), self.round_starts.contiguous()


class NoiseAhead:
    """Noise of coming rounds, made for many possible starts at once.

    On the CPU the generator's cost is mostly call overhead: the noise of 256 rounds takes twice as long as that of one.
    Since it is a pure function of where a round begins, unused noise does no harm.
    """

    def __init__(self, make: Callable[[Tensor, Tensor, int, int], Any], k: int, vocab_size: int) -> None:
        """``make`` maps seeds [B], round starts [B], K and V to noise with a method ``select``; a round drafts at most
        ``k`` tokens."""
        self._make, self._k, self._vocab_size = make, k, vocab_size
        self._num_rows = self._num_left = 0  # rounds may still begin at this many positions after the last, at least

    def invalidate(self) -> None:
        """Drop the noise after a change of rows: another seed, or another sequence."""
        self._num_left = 0

    def at(self, seeds: Tensor, lengths: Tensor, k: int) -> Any:
        """Noise for a round of each row, of these seeds [B] and lengths at its beginning [B], with at most ``k``
        drafted tokens, which lengthens the row by k + 1 at most."""
        num_rows = len(seeds)
        if self._num_left < 1 or self._num_rows != num_rows:
            num_starts = max(1, min(_MAX_STARTS_AHEAD, _MAX_COUNTERS_AHEAD // (num_rows * (self._k + 1))))
            round_starts = (lengths[:, None] + torch.arange(num_starts, device=seeds.device)).flatten()
            self._noise = self._make(seeds.repeat_interleave(num_starts), round_starts, self._k, self._vocab_size)
            self._shift = num_starts * torch.arange(num_rows, device=seeds.device) - lengths
            self._num_rows, self._num_left = num_rows, num_starts
        self._num_left -= k + 1
        return self._noise.select(self._shift + lengths, k)
