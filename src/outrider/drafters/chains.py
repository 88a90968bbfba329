"""Sessions of heads that draft entry by entry: EAGLE-3 heads and MTP layers (see heads.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Prefill, Rows, Session, VerifyResult, empty_draft
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.drawing import DraftStep, Logits, owed
from outrider.drafters.head_states import keep_states, of_tokens, stored_states
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.sampling.rules import Rule


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


class ChainSession(Session):
    """The head's cache over the slots of an engine.

    ``_cached`` counts the entries of each row that hold the target's states; they stay valid. ``_num_late`` is the
    host's bound of those that are missing.
    """

    def __init__(
        self, head: LM, options: DraftOptions, num_slots: int, capacity: int, device: torch.device, max_k: int
    ) -> None:
        self._head, self._options = head, options
        self._cache = head.new_cache(num_slots, capacity)
        self._cached = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._num_late = [0] * num_slots
        self._width = max_k + 1  # entries that are fed with the drafts
        self._most_fed = max(1, PREFILL_TOKENS // num_slots)  # entries of a row in one forward

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        # The last shared token has a state, and its entry another token.
        num_entries = max(num_tokens - 1, 0)
        if source is None:
            self._cache.erase(slot, num_tokens)
            self._cached[slot].clamp_(max=num_entries)
            return
        self._cache.copy(source, slot, num_tokens)
        # Here alone the host waits for the device: a prompt joins, or a row moves.
        known = min(int(self._cached[source]), num_entries)
        self._cached[slot] = known
        self._num_late[slot] = num_tokens - known

    def prefill(self, chunk: Prefill) -> None:
        """Keep the states of a chunk of prompts, and feed its entries, except each prompt's last."""
        begin, end = chunk.first_slot, chunk.first_slot + len(chunk.ends)
        cache, device = self._cache.rows(begin, end), chunk.ids.device
        if chunk.features is not None:
            keep_states(self._head, cache, chunk.features, chunk.feature_positions)
        ends = [min(to, length - 2) for to, length in zip(chunk.ends, chunk.lengths, strict=True)]
        late = [
            self._num_late[slot] + to - at
            for slot, at, to in zip(range(begin, end), chunk.starts, chunk.ends, strict=True)
        ]
        cached = self._cached[begin:end]
        self._feed_late(cache, chunk.ids, cached, torch.tensor(ends, device=device), max(late), max(chunk.ends))
        self._num_late[begin:end] = [1] * len(chunk.ends)

    def observe(self, result: VerifyResult) -> None:
        assert result.features is not None
        num_rows, width, _ = result.features.shape
        keep_states(self._head, self._cache.first(num_rows), result.features, result.feature_positions)
        self._num_late[:num_rows] = [num + width for num in self._num_late[:num_rows]]

    def catch_up(self, rows: Rows) -> bool:
        """Feed the entries beyond those that are fed with the drafts."""
        num_rows = len(rows)
        late = [n if wanted else 0 for n, wanted in zip(self._num_late, rows.most_wanted, strict=False)]
        if max(late) <= self._width:
            return False
        cached = self._cached[:num_rows]
        ends = torch.where(rows.num_wanted > 0, rows.lengths - 2, cached)
        self._feed_late(self._cache.first(num_rows), rows.ids, cached, ends, max(late), rows.longest)
        self._num_late[:num_rows] = [
            min(n, 1) if wanted else n for n, wanted in zip(self._num_late, rows.most_wanted, strict=False)
        ]
        return False

    def _feed_late(self, cache: SlotCache, ids: Tensor, cached: Tensor, ends: Tensor, width: int, longest: int) -> None:
        """Feed the entries cached <= i < ends [B], and count them in ``cached``. Column j of ``ids`` holds the token
        at position j [B, N]; ``width`` is at least their largest number in a row, ``longest`` above every entry."""
        for begin in range(0, width, self._most_fed):
            num_columns = min(width - begin, self._most_fed)
            positions = cached[:, None] + begin + torch.arange(num_columns, device=ids.device)
            positions = torch.where(positions < ends[:, None], positions, -1)
            tokens = ids.gather(1, (positions + 1).clamp(0, ids.shape[1] - 1))
            view_len = self._head.view_len(longest + 1, cache)
            feed_entries(self._head, view_len, 0, cache, tokens, stored_states(cache, positions), positions)
        cached.copy_(torch.maximum(cached, ends))

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        if not any(rows.most_wanted):
            return empty_draft(rows)
        head, num_rows = self._head, len(rows)
        cache, cached = self._cache.first(num_rows), self._cached[:num_rows]
        num_wanted = torch.where(rows.lengths > 1, rows.num_wanted, 0)  # a single token has no entry
        # Few shapes where they must be prepared, few columns elsewhere.
        late = [n for n, wanted in zip(self._num_late, rows.most_wanted, strict=False) if wanted]
        width = self._width if head.execution.is_prepared else max(1, *late)
        columns = rows.lengths[:, None] - width + torch.arange(width, device=rows.ids.device)
        fed = rows.ids.gather(1, columns.clamp_min(0))
        step = _OneByOne(head.view_len(rows.longest + k, cache), k, rule, self._options)
        draft = step.draft(head, rows, num_wanted, noise, cache=cache, cached=cached, fed=fed)
        cached.copy_(torch.where(num_wanted > 0, rows.lengths - 1, cached))
        self._num_late[:num_rows] = [
            0 if wanted else n for n, wanted in zip(self._num_late, rows.most_wanted, strict=False)
        ]
        return draft
