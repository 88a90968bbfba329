"""Sessions of heads that keep nothing but what the target's states give: block heads, and Gemma 4's assistants.

Also the part that they share with chains.py: states of the target in the caches of heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Prefill, Rows, Session, VerifyResult, empty_draft
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.drawing import DraftStep, Logits
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule


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

    def observe(self, result: VerifyResult) -> None:
        assert result.features is not None
        self._keep(self._cache.first(len(result.places)), result.features, result.feature_positions)


# All tokens of a round at once: DFlash and DFlash 2


def feed_blocks(
    head: LM, view_len: int, k: int, cache: SlotCache, last_id: Tensor, lengths: Tensor, num_wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Feed the blocks.

    Args:
        last_id: [B]
        lengths: [B]
        num_wanted: rows with 0 are not fed. [B]

    Returns:
        logits of the drafts [B, K, D]; outputs of their slots [B, K, H]
    """
    module = head.model
    size, first = module.block_size, module.num_before
    masks = last_id.new_full((1, 1), module.mask_id).expand(len(last_id), size - 1)
    ids = torch.cat((last_id[:, None], masks), dim=1)
    positions = lengths[:, None] - 1 + torch.arange(size, device=lengths.device)
    positions = torch.where((num_wanted > 0)[:, None], positions, -1)
    wanted = (len(module.layers) + 1,)
    results = head.backend(ids, positions, cache, view_len, num_logits=0, features=wanted, keeps_finite=True)
    with head.lock:
        slots = results.features[0][:, first : first + k]
        return module.logits(slots), slots


class _InBlocks(DraftStep):
    """A forward for all tokens."""

    __slots__ = ()

    def logits(self, head: LM, num_wanted: Tensor, cache: SlotCache, lengths: Tensor, last_id: Tensor) -> Logits:
        logits, slots = feed_blocks(head, self.view_len, self.k, cache, last_id, lengths, num_wanted)
        correct = head.model.candidate_selector
        for i in range(self.k):
            last_id, _ = yield logits[:, i] if correct is None else correct(logits[:, i], slots[:, i], last_id)


class BlockSession(StatesSession):
    """The head's cache over the slots of an engine."""

    def __init__(self, head: LM, options: DraftOptions, num_slots: int, capacity: int) -> None:
        module = head.model
        super().__init__(head, options, num_slots, capacity + module.block_size)  # a block goes beyond the sequence
        self._module = module

    def _keep(self, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
        states = self._module.fuse(features.to(self._head.device, self._head.dtype))
        cache.at(positions, cache.capacity, is_single=False, keeps_finite=True)
        self._module.keep(states, positions, cache.argument)

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        k = min(k, self._module.most_drafted)
        if not any(rows.most_wanted):
            return empty_draft(rows)
        head, cache = self._head, self._cache.first(len(rows))
        num_wanted = rows.num_wanted.clamp_max(k)
        # Beyond the context of the target, too: a block ends there.
        view_len = min(head.execution.round_length(rows.longest + self._module.block_size - 1), cache.capacity)
        step = _InBlocks(view_len, k, rule, self._options)
        return step.draft(head, rows, num_wanted, noise, cache=cache, last_id=rows.last_ids[:, 1])


# Token by token, with the target's own keys and values: Gemma 4's assistants


class _InPlace(DraftStep):
    """A forward for each token, all at the place of the last committed one. ``cache`` has the states, ``shared`` keys
    and values of the target."""

    __slots__ = ()

    def logits(
        self, head: LM, num_wanted: Tensor, cache: SlotCache, lengths: Tensor, last_id: Tensor, shared: SlotCache
    ) -> Logits:
        module = head.model
        positions = torch.where(num_wanted > 0, lengths - 1, -1)[:, None]
        states = stored_states(cache, positions - 1)
        for _ in range(self.k):
            with head.lock:
                outputs, states = module(last_id[:, None], states, positions, shared, self.view_len)
                logits = of_tokens(head, module.lm_head(outputs))
            last_id, _ = yield logits[:, -1]


class SharingSession(StatesSession):
    """The states of the target's tokens over the slots of an engine. Keys and values are the target's own."""

    def _keep(self, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
        keep_states(self._head, cache, features, positions)

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        if not any(rows.most_wanted):
            return empty_draft(rows)
        head, cache, shared = self._head, self._cache.first(len(rows)), rows.shared
        assert shared is not None
        num_wanted = torch.where(rows.lengths > 1, rows.num_wanted, 0)  # no state comes before a single token
        step = _InPlace(head.view_len(rows.longest, shared), k, rule, self._options)
        return step.draft(head, rows, num_wanted, noise, cache=cache, last_id=rows.last_ids[:, 1], shared=shared)
