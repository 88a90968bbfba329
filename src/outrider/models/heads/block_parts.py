"""Parts of block heads: the candidate selector and the convolutions of DFlash 2.

The slots of a block do not see each other's tokens, so tokens that are likely by themselves may not fit together. A
candidate selector adds to the logits of the most probable tokens what the token before tells, and drops the others.

Source: DFlash 2 (inco.ai/blog/dflash2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runtime.vocabulary import UNKNOWN


class CandidateSelector(nn.Module):
    """Keeps the most probable tokens of a slot, with a score for each pair of the token before and a candidate, which
    depends on the output of the slot.

    Args:
        tensors: its weights.
        size: H, of the outputs of slots.
        num_candidates: tokens that it keeps.
    """

    def __init__(self, tensors: Mapping[str, Tensor], size: int, num_candidates: int) -> None:
        super().__init__()
        num_tokens, rank = tensors["predecessor_codebook"].shape
        self.predecessor_codebook = nn.Parameter(torch.empty(num_tokens, rank))
        self.successor_codebook = nn.Parameter(torch.empty(num_tokens, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)
        self.num_candidates = num_candidates

    def forward(self, logits: Tensor, output: Tensor, ids: Tensor) -> Tensor:
        """Correct the logits of a slot: [B, D] -> [B, D]

        Args:
            output: of the slot. [B, H]
            ids: the token before. [B]
        """
        values, candidates = logits.topk(min(self.num_candidates, logits.shape[1]), dim=-1)  # [B, C]
        context = functional.embedding(ids, self.predecessor_codebook) * self.hidden_projection(output)  # [B, R]
        successors = functional.embedding(candidates, self.successor_codebook)  # [B, C, R]
        scores = values + (context[:, None] * successors).sum(dim=-1)
        return torch.full_like(logits, UNKNOWN).scatter(1, candidates, scores)


class DynamicConvolution(nn.Module):
    """Convolutions along a block, before and after another module. Their kernels are a sum of weights and of a function
    of each token; a slot sees itself and those before it.

    Args:
        tensors: its weights.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        _, num_taps, size = tensors["base_kernel"].shape
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, size))
        self.kernel_projection = nn.Linear(size, len(tensors["kernel_projection.weight"]), bias=False)

    def forward(self, hidden: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        _, num_taps, size = self.base_kernel.shape
        changes = self.kernel_projection(hidden).unflatten(-1, (2, num_taps, -1))  # [B, T, 2, taps, groups]
        kernels = self.base_kernel + changes.repeat_interleave(size // changes.shape[-1], dim=-1)
        return _convolved(inner(_convolved(hidden, kernels[:, :, 0])), kernels[:, :, 1])


def _convolved(hidden: Tensor, kernels: Tensor) -> Tensor:
    """[B, T, H], and kernels [B, T, taps, H] -> [B, T, H]"""
    length, results = hidden.shape[1], torch.zeros_like(hidden)
    for tap in range(min(kernels.shape[2], length)):
        results = results + kernels[:, :, tap] * functional.pad(hidden[:, : length - tap], (0, 0, tap, 0))
    return results


def part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Weights of a part, by their names in it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
