"""Candidates: probabilities of few tokens in place of a number for each token of the vocabulary, on the CPU.

The rows of a round are functions of V logits, and most tokens cannot be drawn. The C++ library (candidates.cpp) reads
each row of logits once and keeps the tokens that can; the rules, in C++ as well (verdicts.cpp), read these alone. A row
that keeps all of its tokens is one of V weights, without ids. Nothing else differs from full rows of probabilities
(probs.py), which are the definition, and the path of other devices and types.

A row's tokens lie where they were written. What is stacked, cut and selected is the table that says where.

This module does not know sampling options.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.library import check, is_done, library
from outrider.records import Draft, Verdict

_BYTES = 4  # of an id, and of a weight
_FREE: dict[int, list[tuple[Tensor, Tensor]]] = {}  # rooms in no use, by their size
_DTYPES = {"f": torch.float32, "d": torch.float64, "i": torch.int32, "l": torch.int64, "b": torch.bool}
_ARGUMENTS = {  # n: a number
    "outrider_candidates": "fnnnniflfflb",
    "outrider_probabilities": "lnld",
    "outrider_draw": "lndl",
    "outrider_draw_with_noise": "lnlll",
    "outrider_verify": "nnnlllldnlllld",
}
_MOVES = (torch.stack, torch.cat, torch.where)


@lru_cache
def _library() -> ctypes.CDLL | None:
    kernels = library()
    if kernels is not None:
        for name, kinds in _ARGUMENTS.items():
            types = (ctypes.c_int64 if kind == "n" else ctypes.c_void_p for kind in kinds)
            getattr(kernels, name).argtypes = [*types]
        kernels.outrider_candidates.restype = kernels.outrider_verify.restype = is_done
    return kernels


class _Room:
    """Memory for the tokens of a row, as many as can be. It is used again, since a system's new pages cost more than
    the rest of a draw."""

    __slots__ = ("_free", "memory")

    def __init__(self, num_tokens: int) -> None:
        self._free = _FREE.setdefault(num_tokens, [])
        try:
            self.memory = self._free.pop()
        except IndexError:
            # Pages that are never written cost nothing.
            self.memory = torch.empty(num_tokens, dtype=torch.int32), torch.empty(num_tokens)

    def __del__(self) -> None:
        self._free.append(self.memory)


def are_here(device: torch.device) -> bool:
    """Whether rows on this device can be candidates."""
    return device.type == "cpu" and _library() is not None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of tokens that can be drawn, with weights; the probability of a token is its weight over the row's sum.

    Attributes:
        table: of each row: address of its ids, int32 and ascending (0: all tokens); address of its weights, float32;
            their number; and the bits of their sum in float64. Zeros: a row without tokens. [..., 4]
        vocab_size: V
        owners: hold the memory at these addresses.
    """

    table: Tensor
    vocab_size: int
    owners: tuple[Any, ...]

    @classmethod
    def of_logits(
        cls,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        token_ids: Tensor | None = None,
        vocab_size: int = 0,
    ) -> tuple[Candidates, Tensor]:
        """Candidates of logits under these options, whose meaning is that of probs.py.

        Args:
            logits: float32 [B, T, V], or of D tokens [B, T, D]
            temperature, top_k, top_p, min_p: [B]
            token_ids: these tokens, ascending; None for all. D numbers
            vocab_size: V, if they are given.

        Returns:
            [B, T] rows, and whether each row of logits is finite. [B, T]
        """
        num_rows, num_places, num_tokens = logits.shape
        flat = logits.reshape(-1, num_tokens)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        ids = None if token_ids is None else token_ids.to(torch.int32)
        rooms = tuple(_Room(num_tokens) for _ in range(len(flat)))
        places = [[*map(Tensor.data_ptr, room.memory), 0, 0] for room in rooms]
        table = torch.tensor(places, dtype=torch.long).view(num_rows, num_places, 4)
        is_finite = torch.empty(num_rows, num_places, dtype=torch.bool)
        options = temperature, top_k, top_p, None if min_p is None else min_p.double().log().float()
        _call(
            "outrider_candidates",
            *(flat, len(flat), flat.stride(0), num_tokens, num_places, ids),
            *(None if one is None else one.contiguous() for one in options),
            *(table, is_finite),
        )
        owners = rooms if ids is None else (*rooms, ids)
        return cls(table, num_tokens if ids is None else vocab_size, owners), is_finite

    @classmethod
    def one_hot(cls, ids: Tensor, vocab_size: int) -> Candidates:
        """Rows of one token each. [B, T]"""
        own, weights = ids.to(torch.int32, memory_format=torch.contiguous_format), torch.ones(1)
        if own is ids:
            own = ids.clone()
        one = torch.ones(1, dtype=torch.float64).view(torch.long)
        table = torch.empty(*ids.shape, 4, dtype=torch.long)
        table[..., 0] = own.data_ptr() + _BYTES * torch.arange(ids.numel()).view(ids.shape)
        table[..., 1], table[..., 2], table[..., 3] = weights.data_ptr(), 1, one
        return cls(table, vocab_size, (own, weights))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor. [..., V]"""
        return *self.table.shape[:-1], self.vocab_size

    @property
    def sums(self) -> Tensor:
        """[...]"""
        return self.table.view(torch.float64)[..., 3]

    def __getitem__(self, index: Any) -> Candidates:
        return replace(self, table=self.table[index])

    def clone(self) -> Candidates:
        """These rows themselves: nothing writes over them."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Tensor], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Candidates:
        """Torch's functions that move rows act on the tables."""
        if function not in _MOVES:
            raise TypeError(f"{function.__name__} of candidates: use full rows")
        found: list[Candidates] = []

        def table_of(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [table_of(one) for one in value]
            if isinstance(value, Candidates):
                found.append(value)
                return value.table
            return value

        table = function(*map(table_of, args), **kwargs or {})
        owners = {id(owner): owner for one in found for owner in one.owners}
        return Candidates(table, found[0].vocab_size, tuple(owners.values()))

    def full(self) -> Tensor:
        """Probabilities of all tokens. float64 [..., V]"""
        probs = torch.zeros(self.shape, dtype=torch.float64)
        rows = probs.view(-1, self.vocab_size)
        for row, (ids, weights, count, _), total in zip(
            rows, self.table.reshape(-1, 4).tolist(), self.sums.flatten().tolist(), strict=True
        ):
            values = _numbers(ctypes.c_float, weights, count, torch.float32).double() / (total or 1.0)
            row[_numbers(ctypes.c_int32, ids, count, torch.int32).long() if ids else slice(None, count)] = values
        return probs

    def at(self, ids: Tensor) -> Tensor:
        """Probability of one token of each row. [...] -> float64 [...]"""
        probs = torch.empty(ids.shape, dtype=torch.float64)
        _call("outrider_probabilities", self.table.contiguous(), ids.numel(), ids.contiguous(), probs)
        return probs

    def draw(self, uniforms: Tensor) -> Tensor:
        """Draw from each row by inverting its cumulative sum. [B] -> [B]"""
        ids = torch.empty(len(self.table), dtype=torch.long)
        _call("outrider_draw", self.table.contiguous(), len(ids), uniforms.contiguous(), ids)
        return ids

    def draw_with_noise(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw with the Gumbel noise of these seeds and positions (noise.py). [B] -> [B]"""
        ids = torch.empty(len(self.table), dtype=torch.long)
        given = self.table.contiguous(), len(ids), seeds.contiguous(), positions.contiguous()
        _call("outrider_draw_with_noise", *given, ids)
        return ids

    def verify(self, rule: int, draft: Draft, noise: tuple[Tensor | int | None, ...]) -> Verdict:
        """The verdict of a rule of rules.py, on rows of p [B, K+1].

        Args:
            draft: with candidates.
            noise: uniform numbers, the number of each row's, seeds and positions, as far as the rule has them.
        """
        num_rows, k = draft.ids.shape
        num_accepted, next_ids = torch.empty(2, num_rows, dtype=torch.long)
        drafted_probs = torch.zeros(num_rows, k, 2, dtype=torch.float64)
        q = None if draft.probs is None else draft.probs.table.contiguous()
        given = draft.ids.contiguous(), draft.num_drafted.contiguous()
        found = num_accepted, next_ids, drafted_probs
        _call("outrider_verify", rule, num_rows, k, self.table.contiguous(), q, *given, *noise, *found)
        return Verdict(num_accepted, next_ids, drafted_probs)


def _call(name: str, *arguments: Tensor | int | None) -> None:
    """Call a function of the library. The arguments outlive it."""
    kernels = _library()
    assert kernels is not None
    kinds = zip(arguments, _ARGUMENTS[name], strict=True)
    check(
        all(one.dtype == _DTYPES.get(kind) for one, kind in kinds if isinstance(one, Tensor)), "arguments as declared"
    )
    getattr(kernels, name)(*(one.data_ptr() if isinstance(one, Tensor) else one for one in arguments))


def _numbers(kind: Any, address: int, count: int, dtype: torch.dtype) -> Tensor:
    """A copy of numbers in memory. [N]"""
    return torch.frombuffer((kind * count).from_address(address), dtype=dtype).clone() if count else torch.empty(0)
