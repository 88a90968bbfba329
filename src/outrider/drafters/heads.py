"""The drafters of heads, which draft from the target's hidden states (see ``models/heads/base.py``).

*Entry by entry*: EAGLE-3 heads and MTP layers. Entry i of a sequence is its token i + 1 with the target's state of
token i, and predicts token i + 2. So a sequence of L tokens has L - 1 entries, and the output of the last one gives the
first draft. Drafted tokens are fed with the head's own output in place of the state; their entries are replaced once
the target's states are there. The states have places in a cache of their own, beside the head's keys and values.

*All at once*: block heads. The cache of the head holds the keys and values of the target's hidden states, which are
written once, when a token is committed. A block writes its own keys and values at the places of the last token and of
those to come; they are replaced when these tokens are committed. All slots of a block are fed, also where fewer tokens
are wanted. So q depends neither on K nor on other rows. Tokens are drawn one after the other from the outputs of that
forward: DFlash 2 corrects q by the token before.

So all that a session knows is a function of the committed tokens: prefixes are shared, rows move, and rounds without
drafts only leave entries to be fed later.

Sources: Li et al. 2401.15077, 2503.01840; DeepSeek-V3 2412.19437; DFlash (2602.06036), DFlash 2. Some of these draft
greedily or in trees; here drafts are drawn from q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSession, Rows
from outrider.drafters.draft_cache import CacheSession, DraftCache
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.drawing import DraftStep, Logits, owed
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.sampling.rules import Rule

_LARGE = 8  # K; executions favour some up to half of it


def head_drafter(head: LM, options: DraftOptions = NO_OPTIONS) -> Drafter:
    """Draft with a head. Raises OptionError.

    Args:
        head: its module is a ``Head``.
        options: greedy, and a least probability; none for blocks.
    """
    module = head.model
    most = module.most_drafted if module.block_size else None
    options.check_taken(head.name, *(("is_greedy", "min_prob") if most is None else ()))

    def opens(models: Sequence[LM], num_slots: int, capacity: int, device: torch.device, max_k: int) -> DraftSession:
        (head,) = models
        if module.shared_layers:
            return SharingSession(head, options, keep_states, num_slots, capacity)
        if most is not None:  # a block goes beyond the sequence
            return BlockSession(head, options, keep_block, num_slots, capacity + module.block_size)
        how: Any = {"step": _OneByOne, "feed": _feed_late, "keep": keep_states, "lag": 1}
        return DraftCache(head, options, num_slots, capacity, device, most_owed=max_k, **how)

    return Drafter(
        options.full_name(head.name),
        opens,
        (head,),
        is_one_hot=options.is_greedy,
        most_drafted=most,
        # The whole block, which costs one forward in any case, and half of a large one, to verify less.
        favoured_k=() if most is None else (most // 2, most) if most > _LARGE else (most,),
        features=module.features,
        shared_layers=module.shared_layers,
    )


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


# Entry by entry: EAGLE-3 heads and MTP layers


def feed_entries(
    head: LM, view_len: int, num_logits: int, cache: SlotCache, ids: Tensor, states: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Feed entries.

    Returns:
        logits after the last N = ``num_logits`` columns [B, N, D]; the states to be fed with the drafted tokens
        [B, T, H]
    """
    module = head.model
    results = head.backend(
        *(ids, positions, cache, view_len),
        num_logits=num_logits,
        features=(len(module.layers) + module.norm_output,),
        keeps_finite=True,
        states=states,
    )
    (outputs,) = results.features
    return of_tokens(head, results.logits), outputs


class _OneByOne(DraftStep):
    """A forward for each token."""

    __slots__ = ()

    def logits(
        self, head: LM, num_wanted: Tensor, cache: SlotCache, lengths: Tensor, cached: Tensor, fed: Tensor
    ) -> Logits:
        """
        Args:
            cached: how many entries are in the cache, and are not fed again. [B]
            fed: the last tokens of the sequences. [B, T]
        """
        # A sequence has one entry fewer than tokens.
        ids, positions = fed, owed(num_wanted, fed.shape[1], cached, lengths - 1)
        states = stored_states(cache, positions)
        for i in range(self.k):
            logits, outputs = feed_entries(head, self.view_len, 1, cache, ids, states, positions)
            drawn, num_drafted = yield logits[:, -1]
            states = outputs[:, -1:]
            ids, positions = drawn[:, None], torch.where(i + 1 < num_drafted, lengths - 1 + i, -1)[:, None]


def _feed_late(
    head: LM, ids: Tensor, starts: Tensor, ends: Tensor, cache: SlotCache, *, latest: int, num_columns: int
) -> None:
    """Feed the entries starts <= i < ends [B], with stored states. For the arguments see ``LM.prefill``."""
    most = max(1, PREFILL_TOKENS // len(ids))
    for begin in range(0, num_columns, most):
        width = min(most, num_columns - begin)
        positions = starts[:, None] + begin + torch.arange(width, device=ids.device)
        positions = torch.where(positions < ends[:, None], positions, -1)
        tokens = ids.gather(1, (positions + 1).clamp_max(ids.shape[1] - 1))
        view_len = head.view_len(latest + begin + width, cache)
        feed_entries(head, view_len, 0, cache, tokens, stored_states(cache, positions), positions)


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


def keep_block(head: LM, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
    """Store the keys and values of tokens. For the arguments see ``keep_states``."""
    states = head.model.fuse(features.to(head.device, head.dtype))
    cache.at(positions, cache.capacity, is_single=False, keeps_finite=True)
    head.model.keep(states, positions, cache.argument)


class BlockSession(CacheSession):
    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        head, cache, module = self._lm, self._cache.first(len(rows)), self._lm.model
        k = min(k, module.most_drafted)
        # Beyond the context of the target, too: a block ends there.
        view_len = min(head.execution.round_length(rows.longest + module.block_size - 1), cache.capacity)
        step = _InBlocks(view_len, k, rule, self._options)
        return step.draft(head, rows, rows.num_wanted.clamp_max(k), noise, cache=cache, last_id=rows.last_ids[:, 1])


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


class SharingSession(CacheSession):
    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        assert rows.shared is not None
        given: Any = {"cache": self._cache.first(len(rows)), "last_id": rows.last_ids[:, 1], "shared": rows.shared}
        num_wanted = torch.where(rows.lengths > 1, rows.num_wanted, 0)  # no state comes before a single token
        step = _InPlace(self._lm.view_len(rows.longest, rows.shared), k, rule, self._options)
        return step.draft(self._lm, rows, num_wanted, noise, **given)
