"""States of the target in the caches of heads: the part that the sessions of heads share."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

from torch import Tensor

from outrider.drafters.base import CommittedTokens, Prefill, Session
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.drawing import draft_step
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM


def keep_states(head: LM, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
    """Store the states of tokens at their places.

    Args:
        features: [B, T, F]
        positions: -1 for padding. [B, T]
    """
    states = head.model.fuse(features.to(head.device, head.dtype))[:, None]  # [B, 1, T, H]
    cache.at(positions, cache.capacity, is_single=False, keeps_finite=True)
    cache.argument.layers[-1].update(states, states[..., :0])


def stored_states(cache: SlotCache, positions: Tensor) -> Tensor:
    """The stored states of tokens: [B, T] -> [B, T, H]"""
    layer: Any = cache.argument.layers[-1]
    store: Tensor = layer.keys[:, :, 0]
    return store.gather(1, positions.clamp_min(0)[..., None].expand(-1, -1, store.shape[-1]))


def of_tokens(head: LM, logits: Tensor) -> Tensor:
    """Logits of a head's tokens, without padding. [..., D]"""
    return logits[..., : head.vocab_size] if head.token_ids is None else logits


class StatesSession(Session):
    """A head's cache over the slots of an engine, to which the target's states are written as tokens are committed."""

    def __init__(self, head: LM, options: DraftOptions, num_slots: int, capacity: int) -> None:
        self._head, self._options = head, options
        self._draft = partial(head.run, draft_step)
        self._cache = head.new_cache(num_slots, capacity)

    @abstractmethod
    def _keep(self, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
        """Write what the head keeps of tokens: [B, T, F], and their positions, -1 for padding [B, T]."""

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        if source is None:
            self._cache.erase(slot, num_tokens)
        else:
            self._cache.copy(source, slot, num_tokens)

    def prefill(self, chunk: Prefill) -> None:
        if chunk.features is not None:
            cache = self._cache.rows(chunk.first_slot, chunk.first_slot + len(chunk.ends))
            self._keep(cache, chunk.features, chunk.feature_positions)

    def observe(self, committed: CommittedTokens) -> None:
        assert committed.features is not None
        self._keep(self._cache.first(len(committed.ids)), committed.features, committed.feature_positions)
