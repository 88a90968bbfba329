"""Stopping criteria of Transformers, called with one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria

from outrider.errors import OptionError
from outrider.requests.logits_processors import Watched

_REMEDY = "it changes itself when called, and rows take turns: make it a function of its arguments"


class Criteria:
    """The criteria of a batch.

    Attributes:
        ends: the end tokens among them.
    """

    def __init__(self, criteria: Sequence[Callable[..., Any]], num_rows: int) -> None:
        self._num_rows = num_rows
        self._criteria = [_shared(one) if num_rows > 1 else one for one in criteria]
        own: list[Tensor] = [one.eos_token_id for one in criteria if isinstance(one, EosTokenCriteria)]
        self.ends = frozenset(int(token) for ids in own for token in ids.tolist())

    def is_met(self, ids: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
        """Whether one of them is; all are called, as in ``generate``.

        Args:
            ids: the tokens of one row. [1, N]

        Raises:
            OptionError: one has a state, or reads other rows.
        """
        return any([self._is_one_met(one, ids, scores) for one in self._criteria])

    def _is_one_met(self, criterion: Any, ids: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
        met = torch.as_tensor(criterion(ids, scores))
        # A plain bool is about the whole batch.
        if met.shape != (1,) and (met.numel() != 1 or self._num_rows > 1):
            name = type(getattr(criterion, "inner", criterion)).__name__
            raise OptionError("stopping_criteria", name, f"it gave shape {list(met.shape)} for one row: give shape [1]")
        return bool(met)


def _shared(criterion: Any) -> Any:
    is_own = type(criterion).__module__.partition(".")[0] == "transformers"
    return criterion if is_own else Watched(criterion, "stopping_criteria", _REMEDY)
