"""Parts of block heads: the Markov and confidence heads of DSpark, the candidate selector and convolutions of DFlash 2.

The slots of a block do not see each other's tokens, so tokens that are likely by themselves may not fit together. A
Markov head adds to the logits of each slot what the token before it tells; a candidate selector does so for the most
probable tokens, and drops the others. A confidence head predicts whether a token will be accepted, before it is drawn.

Sources: DSpark (2607.05147); DFlash 2 (inco.ai/blog/dflash2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runtime.vocabulary import UNKNOWN


class MarkovHead(nn.Module):
    """Adds a product of low rank, a row of logits for each token before. It may be gated by the output of the slot, or
    be a recurrence along the block.

    Args:
        tensors: its weights; they decide which.
        size: H, of the outputs of slots.
    """

    def __init__(self, tensors: Mapping[str, Tensor], size: int) -> None:
        super().__init__()
        self.rank = rank = tensors["markov_w1.weight"].shape[1]
        self.markov_w1 = nn.Embedding(*tensors["markov_w1.weight"].shape)
        self.markov_w2 = nn.Linear(rank, len(tensors["markov_w2.weight"]), bias=False)
        self.gate_proj = nn.Linear(size + rank, rank) if "gate_proj.weight" in tensors else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if "joint_proj.weight" in tensors else None

    @property
    def num_known(self) -> int:
        """Number of tokens that may come before."""
        return self.markov_w1.num_embeddings

    def embed(self, ids: Tensor) -> Tensor:
        """[B] -> [B, R]"""
        embedded: Tensor = self.markov_w1(ids)
        return embedded

    def start(self, outputs: Tensor, last_ids: Tensor) -> Tensor:
        """State before the first draft.

        Args:
            outputs: of the slots before it. [B, S, H]
            last_ids: of the sequences. [B]

        Returns:
            [B, R]
        """
        embedded = self.embed(last_ids)
        state = torch.zeros_like(embedded)
        for i in range(outputs.shape[1]):
            _, state = self._step(outputs[:, i], embedded, state)
        return state

    def forward(self, logits: Tensor, output: Tensor, ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Correct the logits of a slot.

        Args:
            logits: [B, D]
            output: of the slot. [B, H]
            ids: the token before. [B]
            state: [B, R]

        Returns:
            logits [B, D], and the next state [B, R]
        """
        values, state = self._step(output, self.embed(ids), state)
        return logits + self.markov_w2(values)[:, : logits.shape[1]], state

    def _step(self, output: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.gate_proj is not None:
            return embedded * self.gate_proj(torch.cat((output, embedded), dim=-1)).sigmoid(), state
        if self.joint_proj is not None:
            gate, new, value = self.joint_proj(torch.cat((state, embedded, output), dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            return value.tanh(), gate * state + (1 - gate) * new.tanh()
        return embedded, state


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

    @property
    def num_known(self) -> int:
        """Number of tokens that may come before."""
        return len(self.predecessor_codebook)

    def start(self, outputs: Tensor, last_ids: Tensor) -> Tensor:
        """State before the first draft: nothing. [B, 0]"""
        return outputs.new_zeros(len(last_ids), 0)

    def forward(self, logits: Tensor, output: Tensor, ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Correct the logits of a slot; see ``MarkovHead``."""
        values, candidates = logits.topk(min(self.num_candidates, logits.shape[1]), dim=-1)  # [B, C]
        context = functional.embedding(ids, self.predecessor_codebook) * self.hidden_projection(output)  # [B, R]
        successors = functional.embedding(candidates, self.successor_codebook)  # [B, C, R]
        scores = values + (context[:, None] * successors).sum(dim=-1)
        return torch.full_like(logits, UNKNOWN).scatter(1, candidates, scores), state


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


class ConfidenceHead(nn.Module):
    """Probability that the token of a slot will be accepted, from the output of the slot, and from the embedding of the
    token before if its weights are wide enough."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(tensors["proj.weight"].shape[1], 1, bias="proj.bias" in tensors)

    def forward(self, output: Tensor, embedded: Tensor) -> Tensor:
        """[B, H], [B, R] -> [B]"""
        inputs = torch.cat((output, embedded), dim=-1)[:, : self.proj.in_features]
        probs: Tensor = self.proj(inputs).squeeze(-1).sigmoid()
        return probs


def part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Weights of a part, by their names in it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
