"""Masks: the effects of constraints at each position of a round, mostly masks of the allowed tokens.

An effect follows from the tokens before it, drafts included, and is found on the host. p and q are changed alike, so
that the output follows the target's changed distribution, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.records import Constraint, Draft, Effect


class Calls(NamedTuple):
    """Effects of which some are functions of the logits. Steps with them cannot be captured."""

    others: Tensor  # the other effects. [B, T, V]
    functions: tuple[tuple[int, int, Callable[[Tensor], Tensor]], ...]  # with row and place of each


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


class Masks:
    """The effects of the constraints of B rows, advanced to the end of the committed tokens, in one round. ``push``
    advances by a drafted token, ``along`` ends the round."""

    def __init__(self, constraints: Sequence[Constraint | None], vocab_size: int, device: torch.device) -> None:
        self._constraints = constraints
        # By row: the effects at the positions so far, None for no effect; and how far the constraint was advanced.
        self._effects = [[] if one is None else [one.effect()] for one in constraints]
        self._num_pushed = [0] * len(constraints)
        self._vocab_size, self._device = vocab_size, device

    def here(self) -> Masked:
        """Effects on the next tokens. [B, 1, V]"""
        return self._together([effects[-1:] for effects in self._effects], 1)

    def push(self, ids: Tensor, is_drafted: Tensor) -> None:
        """Advance by a token, in rows that have one. [B], [B]"""
        for row, (token_id, is_meant) in enumerate(zip(ids.tolist(), is_drafted.tolist(), strict=True)):
            if is_meant:
                self._push(row, token_id)

    def along(self, draft: Draft) -> Masked:
        """Effects at the K positions of the draft and the one after; rolls the constraints back to the committed
        tokens. [B, K+1, V]"""
        for row, (ids, num_drafted) in enumerate(zip(draft.ids.tolist(), draft.num_drafted.tolist(), strict=True)):
            for token_id in ids[max(0, len(self._effects[row]) - 1) : num_drafted]:
                self._push(row, token_id)
        self.roll_back()
        return self._together(self._effects, draft.ids.shape[1] + 1)

    def roll_back(self) -> None:
        for row, constraint in enumerate(self._constraints):
            if constraint is not None:
                constraint.pop(self._num_pushed[row])
                self._num_pushed[row] = 0

    def _push(self, row: int, token_id: int) -> None:
        """Advance a row. A forbidden token will be rejected, so that no effect after it matters."""
        constraint, effects = self._constraints[row], self._effects[row]
        if constraint is None:
            return
        if self._num_pushed[row] == len(effects) - 1 and constraint.push(token_id):
            self._num_pushed[row] += 1
            effects.append(constraint.effect())
        else:
            effects.append(None)

    def _together(self, effects: Sequence[Sequence[Effect | None]], num_places: int) -> Masked:
        """[B, T, V]"""
        placed = [
            (row, place, effect)
            for row, of_row in enumerate(effects)
            for place, effect in enumerate(of_row[:num_places])
            if effect is not None
        ]
        if not placed:
            return None
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
