"""Masks: the effects of constraints at each position of a round, mostly masks of the allowed tokens.

An effect follows from the tokens before it, drafts included, and is found on the host. p and q are changed alike, so
that the output follows the target's changed distribution, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.records import Constraint, Draft, Effect


@dataclass(frozen=True, slots=True)
class Calls:
    """Effects of which some are functions of the logits. Steps with them cannot be captured.

    Attributes:
        others: the other effects. [B, T, V]
        functions: with row and place of each.
    """

    others: Tensor
    functions: tuple[tuple[int, int, Callable[[Tensor], Tensor]], ...]


Masked: TypeAlias = Tensor | Calls | None
"""The effects of constraints on B rows at T positions: masks, True for the allowed tokens; or biases of the logits,
-inf for forbidden tokens; or with functions; None without constraints. [B, T, V]"""


def mask(x: Tensor, effects: Masked) -> Tensor:
    """Logits with these effects. [B, T, V]"""
    if effects is None:
        return x
    if isinstance(effects, Calls):
        x = mask(x, effects.others)
        for row, place, function in effects.functions:
            if x[row, place].amax().isfinite():  # else there is no distribution to change
                x[row, place] = function(x[row, place])
        return x
    if effects.dtype == torch.bool:
        return x.masked_fill(~effects, -torch.inf)
    return x + effects.to(x.dtype)


def as_biases(effect: NDArray[Any]) -> NDArray[Any]:
    """A mask, or biases, as biases. [V]"""
    return np.where(effect, np.float32(0), np.float32(-np.inf)) if effect.dtype == np.bool_ else effect


@dataclass(slots=True)
class _Walk:
    """One constraint, advanced over drafted tokens.

    Attributes:
        effects: at the positions so far; None for no effect.
        num_pushed: tokens that the constraint was advanced by. It stops at a forbidden token: that one will be
            rejected, and no effect after it matters.
    """

    constraint: Constraint
    effects: list[Effect | None] = field(init=False)
    num_pushed: int = 0

    def __post_init__(self) -> None:
        self.effects = [self.constraint.effect()]

    def push(self, token_id: int) -> None:
        is_behind = self.num_pushed < len(self.effects) - 1
        if is_behind or not self.constraint.push(token_id):
            self.effects.append(None)
            return
        self.num_pushed += 1
        self.effects.append(self.constraint.effect())


class Masks:
    """The effects of constraints in one round. ``push`` advances by a drafted token, ``along`` ends the round.

    Args:
        constraints: the constraints of the B rows, advanced to the end of the committed tokens.
    """

    def __init__(self, constraints: Sequence[Constraint | None], vocab_size: int, device: torch.device) -> None:
        self._walks = [None if one is None else _Walk(one) for one in constraints]
        self._vocab_size, self._device = vocab_size, device

    def here(self) -> Tensor | Calls:
        """Effects on the next tokens. [B, 1, V]"""
        return self._together([() if walk is None else walk.effects[-1:] for walk in self._walks], 1)

    def push(self, ids: Tensor, is_drafted: Tensor) -> None:
        """Advance by a token, in rows that have one. [B], [B]"""
        for walk, token_id, is_meant in zip(self._walks, ids.tolist(), is_drafted.tolist(), strict=True):
            if walk is not None and is_meant:
                walk.push(token_id)

    def along(self, draft: Draft) -> Tensor | Calls:
        """Effects at the K positions of the draft and the one after; rolls the constraints back to the committed
        tokens. [B, K+1, V]"""
        for walk, ids, num_drafted in zip(self._walks, draft.ids.tolist(), draft.num_drafted.tolist(), strict=True):
            if walk is not None:
                for token_id in ids[len(walk.effects) - 1 : num_drafted]:
                    walk.push(token_id)
        self.roll_back()
        return self._together([() if walk is None else walk.effects for walk in self._walks], draft.ids.shape[1] + 1)

    def roll_back(self) -> None:
        """Roll the constraints back to the committed tokens."""
        for walk in self._walks:
            if walk is not None:
                walk.constraint.pop(walk.num_pushed)
                walk.num_pushed = 0

    def _together(self, effects: Sequence[Sequence[Effect | None]], num_places: int) -> Tensor | Calls:
        """[B, T, V]"""
        placed = [
            (row, place, effect)
            for row, of_row in enumerate(effects)
            for place, effect in enumerate(of_row[:num_places])
            if effect is not None
        ]
        arrays = [(row, place, effect) for row, place, effect in placed if isinstance(effect, np.ndarray)]
        shape = len(effects), num_places, self._vocab_size
        biases = [effect.dtype for *_, effect in arrays if effect.dtype != np.bool_]
        # Masks alone stay masks, a quarter of the size.
        others: NDArray[Any] = np.zeros(shape, np.result_type(*biases)) if biases else np.ones(shape, np.bool_)
        for row, place, effect in arrays:
            others[row, place] = as_biases(effect) if biases else effect
        tensor = torch.from_numpy(others).to(self._device)
        functions = tuple((row, place, effect) for row, place, effect in placed if not isinstance(effect, np.ndarray))
        return Calls(tensor, functions) if functions else tensor
