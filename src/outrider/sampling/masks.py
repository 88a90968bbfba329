"""Masks: the tokens that constraints allow at each position of a round.

A mask follows from the tokens before it, drafts included, and is made on the host. p and q are masked alike, so that
the output follows the target's masked distribution, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.records import Constraint, Draft


@dataclass(slots=True)
class _Walk:
    """One constraint, advanced over drafted tokens.

    Attributes:
        masks: at the positions so far; None where all tokens are allowed.
        num_pushed: tokens that the constraint was advanced by. It stops at a forbidden token: that one will be
            rejected, and no mask after it matters.
    """

    constraint: Constraint
    masks: list[NDArray[np.bool_] | None] = field(init=False)
    num_pushed: int = 0

    def __post_init__(self) -> None:
        self.masks = [self.constraint.allowed()]

    def push(self, token_id: int) -> None:
        is_behind = self.num_pushed < len(self.masks) - 1
        if is_behind or not self.constraint.push(token_id):
            self.masks.append(None)
            return
        self.num_pushed += 1
        self.masks.append(self.constraint.allowed())


class Masks:
    """The masks of one round. ``push`` advances by a drafted token, ``along`` ends the round.

    Args:
        constraints: of the B rows, advanced to the end of the committed tokens.
    """

    def __init__(self, constraints: Sequence[Constraint | None], vocab_size: int, device: torch.device) -> None:
        self._walks = [None if one is None else _Walk(one) for one in constraints]
        self._vocab_size, self._device = vocab_size, device

    def here(self) -> Tensor:
        """Mask of the allowed next tokens. [B, V]"""
        return self._tensor([() if walk is None else walk.masks[-1:] for walk in self._walks], 1)[:, 0]

    def push(self, ids: Tensor, is_drafted: Tensor) -> None:
        """Advance by a token, in rows that have one. [B], [B]"""
        for walk, token_id, is_meant in zip(self._walks, ids.tolist(), is_drafted.tolist(), strict=True):
            if walk is not None and is_meant:
                walk.push(token_id)

    def along(self, draft: Draft) -> Tensor:
        """Masks at the K positions of the draft and the one after; rolls the constraints back to the committed tokens.
        [B, K+1, V]"""
        for walk, ids, num_drafted in zip(self._walks, draft.ids.tolist(), draft.num_drafted.tolist(), strict=True):
            if walk is not None:
                for token_id in ids[len(walk.masks) - 1 : num_drafted]:
                    walk.push(token_id)
        self.roll_back()
        return self._tensor([() if walk is None else walk.masks for walk in self._walks], draft.ids.shape[1] + 1)

    def roll_back(self) -> None:
        """Roll the constraints back to the committed tokens."""
        for walk in self._walks:
            if walk is not None:
                walk.constraint.pop(walk.num_pushed)
                walk.num_pushed = 0

    def _tensor(self, masks: Sequence[Sequence[NDArray[np.bool_] | None]], num_places: int) -> Tensor:
        """[B, T, V]; True where there is no mask."""
        allowed = np.ones((len(masks), num_places, self._vocab_size), dtype=np.bool_)
        for row, of_row in zip(allowed, masks, strict=True):
            for place, mask in zip(row, of_row, strict=False):
                if mask is not None:
                    place[:] = mask
        return torch.from_numpy(allowed).to(self._device)
