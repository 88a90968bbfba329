"""Parts of block heads that look at the tokens drafted before: the Markov and confidence heads of DSpark.

The slots of a block do not see each other's tokens, so tokens that are likely by themselves may not fit together. A
Markov head adds to the logits of each slot what the token before it tells. A confidence head predicts whether a token
will be accepted, before it is drawn.

Sources: DSpark (2607.05147).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


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
