"""The native forward as a model calls it; native/engine.py has it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.runtime.cache import SlotCache


@dataclass(frozen=True, slots=True)
class NativeResults:
    """Results of a native forward.

    Attributes:
        logits: [B, N, V]
        features: hidden states, concatenated; None if none are wanted. [B, T, F]
        broken: tokens with a key or value that is not finite; None if not looked for. [B, T]
    """

    logits: Tensor
    features: Tensor | None
    broken: Tensor | None


class Native(Protocol):
    """Forward in place of the model's own code. The arguments are those of ``LM.forward_with_features``; logits and
    hidden states of padding are zeros."""

    def __call__(
        self,
        ids: Tensor,
        places: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        num_logits: int = 0,
        features: Sequence[int] = (),
        keeps_finite: bool = False,
    ) -> NativeResults:
        """Run a forward. Raises IndexError: an id or a place is not there."""
        ...

    def without_rounding(self) -> AbstractContextManager[None]:
        """Multiply rows of float32 with blocks for a while."""
        ...
