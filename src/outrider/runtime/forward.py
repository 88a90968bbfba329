"""Forward: tokens at places of a cache to logits and hidden states. Two implementations run models:
``TransformersForward`` (any model, in its own code) and ``NativeForward`` (native/engine.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_shapes import LayerShape


class Results(NamedTuple):
    """Results of a forward."""

    logits: Tensor  # of the wanted columns [B, N, V], padding of V included
    features: tuple[Tensor, ...]  # hidden states of all columns, of each feature. [B, T, H] each
    broken: Tensor | None  # tokens with a key or value that is not finite; None if there are none. [B, T]


class Forward(Protocol):
    """A model, or a head, that can be run."""

    is_stepped: bool
    """Layers with states are called token by token, since they continue from a state by one token only."""

    @property
    def model(self) -> Any:
        """The module in Transformers' code, or a head."""

    @property
    def weights(self) -> Any:
        """This module, or a model without code, which has ``parameters()``, ``state_dict()`` and ``config``."""

    @property
    def device(self) -> torch.device:
        """The device of the first layer."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""

    @property
    def num_shares(self) -> int:
        """Processes that share the model."""

    @property
    def num_embedded(self) -> int:
        """Tokens with an embedding."""

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers of a cache."""

    @property
    def lock(self) -> Any:
        """Held while the model runs in Python or is captured."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's result depends on the row alone, to the bit, so that its text is the same bytes in any batch,
        with and without a draft (docs/how-it-works/same-bytes.md)."""

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        columns: Tensor | None = None,
        num_logits: int | None = None,
        features: Sequence[int] = (),
        keeps_finite: bool = False,
        states: Tensor | None = None,
    ) -> Results:
        """Run the model on tokens, and write their keys, values and states to the cache.

        Args:
            ids: [B, T]
            positions: places of the tokens, -1 for padding, whose results are meaningless. [B, T]
            view_len: above every position.
            columns: those whose logits are wanted, of which ``num_logits`` counts the last ones; None for all. [B, N]
            num_logits: the last columns whose logits are wanted; None for all.
            features: the layers whose inputs are wanted; the number of layers for the last output, one more for its
                norm.
            keeps_finite: store zeros where keys and values are not finite, and tell the tokens.
            states: those of the target's tokens, for a head that reads them. [B, T, H]
        """
