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
    """Forward in place of the model's own code."""

    def __call__(
        self,
        ids: Tensor,
        places: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        num_logits: int | None = None,
        features: Sequence[int] = (),
        keeps_finite: bool = False,
        states: Tensor | None = None,
    ) -> NativeResults:
        """Run a forward. Other arguments are those of ``LM.forward_with_features``. Results of padding are zeros.

        Args:
            num_logits: N, last columns whose logits are wanted; None for all.
            features: layers whose inputs are wanted; the number of layers for the last output, one more for its norm.
            states: of the target's tokens, for a head that reads them. [B, T, H]

        Raises:
            IndexError: an id or a place is not there.
        """
        ...

    def without_rounding(self) -> AbstractContextManager[None]:
        """Multiply rows of float32 with blocks for a while."""
        ...
