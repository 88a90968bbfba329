"""Caches of drafts over the slots of an engine: how far each row agrees with the committed text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import DraftSession, Prefill, Rows, VerifyResult, empty_draft
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.drawing import DraftStep
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.runtime.padding import num_together
from outrider.sampling.rules import Rule

_NO_GAP, _ROUNDS, _ASSIGNED = range(3)  # the last round was drafted for; rounds were not; neither was the prompt read

Keeps = Callable[[LM, SlotCache, Tensor, Tensor], None]
"""Writes what a head keeps of tokens: (head, cache, hidden states of the target [B, T, F], positions, -1 for padding
[B, T])."""


class CacheSession(DraftSession):
    """A cache over the slots of an engine, to which a head writes states of the target as tokens are committed."""

    def __init__(self, lm: LM, options: DraftOptions, keep: Keeps | None, num_slots: int, capacity: int) -> None:
        self._lm, self._options, self._keep = lm, options, keep
        self._cache = lm.new_cache(num_slots, capacity)

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        if source is None:
            self._cache.erase(slot, num_tokens)
        else:
            self._cache.copy(source, slot, num_tokens)

    def prefill(self, chunk: Prefill) -> None:
        if self._keep and chunk.features is not None:
            cache = self._cache.rows(chunk.first_slot, chunk.first_slot + len(chunk.ends))
            self._keep(self._lm, cache, chunk.features, chunk.feature_positions)

    def observe(self, result: VerifyResult) -> None:
        if self._keep and result.features is not None:
            cache = self._cache.first(len(result.places))
            self._keep(self._lm, cache, result.features, result.feature_positions)


class DraftCache(CacheSession):
    """A cache that is fed the entries of a sequence, token by token: L - ``lag`` entries for L tokens.

    ``_cached`` counts the entries of each row that were fed. After verification all but the last entry of the committed
    sequence are valid, as far as they were fed: if fewer tokens were accepted than fed, the sequence has another token
    in the last one, the first stale entry in the cache. The minimum must be taken after *every* round, in all rows: a
    round later the length has grown, and would hide the rejected token.

    So a row lacks one entry besides the last if its draft was fully accepted, since the last drafted token was never
    fed, and one more for each round without drafts since then. Where drafted tokens get entries of another kind (not
    ``keeps_drafts``), a row lacks all entries of the tokens that the last round committed. A few missing entries are
    fed with the drafts, more by ``catch_up``. A prompt is read likewise, when drafting starts, so that it costs nothing
    where drafts do not pay.
    """

    def __init__(
        self,
        lm: LM,
        options: DraftOptions,
        num_slots: int,
        capacity: int,
        device: torch.device,
        *,
        step: Callable[..., DraftStep],
        feed: Callable[..., object],
        most_owed: int,
        keeps_drafts: bool = False,
        keep: Keeps | None = None,
        lag: int = 0,
    ) -> None:
        """
        Args:
            step: (view_len, k, rule, options) -> step, for rows whose cache lacks at most ``most_owed`` entries.
            feed: puts entries into the cache, called as ``LM.prefill`` is.
            most_owed: the most entries, besides the last one, that a row lacks after a round with drafts.
            keeps_drafts: whether the entries of drafted tokens are valid once these are accepted.
        """
        super().__init__(lm, options, keep, num_slots, capacity)
        self._step, self._feed = step, feed
        self._most_owed, self._keeps_drafts, self._lag = most_owed, keeps_drafts, lag
        self._cached = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._gaps = [_ASSIGNED] * num_slots  # why a row may lack more than ``most_owed`` entries
        self._most_deferred = PREFILL_TOKENS // num_slots  # tokens of a prompt that is read when it is drafted for

    def forget(self, ends: Tensor) -> None:
        """Drop the entries of the first rows from a place on, in sequences that grow by any number of tokens. [B]"""
        self._cached[: len(ends)] = torch.minimum(self._cached[: len(ends)], ends)
        self._gaps[: len(ends)] = [max(gap, _ROUNDS) for gap in self._gaps[: len(ends)]]

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        if source is not None:
            num_tokens = self._cache.take_over(source, num_tokens)
        super().assign(slot, source, num_tokens)
        cached = self._cached[slot if source is None else source]
        self._cached[slot] = cached.clamp_max(max(num_tokens - self._lag, 0))  # the next entry has another token
        self._gaps[slot] = _ASSIGNED

    def prefill(self, chunk: Prefill) -> None:
        """Feed a chunk of a long prompt, so that no round waits for the whole prompt."""
        super().prefill(chunk)
        if max(chunk.lengths) > self._most_deferred:
            starts = self._cached[chunk.first_slot : chunk.first_slot + len(chunk.ends)].tolist()
            lasts = [min(to, length - 1 - self._lag) for to, length in zip(chunk.ends, chunk.lengths, strict=True)]
            self._feed_rows(chunk.ids, chunk.first_slot, starts, list(map(max, starts, lasts)))

    def catch_up(self, rows: Rows) -> bool:
        """Feed the entries that a row lacks beyond those that are fed with its drafts."""
        cached, gaps = self._cached[: len(rows)], self._gaps[: len(rows)]
        lasts = (rows.lengths - 1 - self._lag).clamp_min(0)
        cached.copy_(torch.minimum(cached, lasts))
        is_fed, gap = False, max((gap for num, gap in zip(rows.most_wanted, gaps, strict=True) if num), default=_NO_GAP)
        if gap != _NO_GAP:
            # The host waits for the device: after a join, a move, or a pause.
            starts, ends = torch.stack((cached, torch.where(rows.num_wanted > 0, lasts, cached))).tolist()
            is_fed = max(end - start for start, end in zip(starts, ends, strict=True)) > self._most_owed
            if is_fed:
                self._feed_rows(rows.ids, 0, starts, ends)
        self._gaps[: len(rows)] = [
            _NO_GAP if num else max(gap, _ROUNDS) for num, gap in zip(rows.most_wanted, gaps, strict=True)
        ]
        return is_fed and gap == _ASSIGNED

    def _feed_rows(self, ids: Tensor, first_slot: int, starts: list[int], ends: list[int]) -> None:
        """Feed the entries starts <= i < ends of adjacent slots. Column j of ``ids`` holds the token at position j."""
        nums, begin = [end - start for start, end in zip(starts, ends, strict=True)], 0
        while begin < len(nums):
            part = slice(begin, begin + num_together(nums[begin:], self._lm.device))
            if num_columns := max(nums[part]):
                first, last = torch.tensor([starts[part], ends[part]], device=ids.device)
                cache = self._cache.rows(first_slot + begin, first_slot + part.stop)
                latest = max(starts[part])
                self._feed(self._lm, ids[part], first, last, cache, latest=latest, num_columns=num_columns)
            begin = part.stop
        self._cached[first_slot : first_slot + len(ends)] = torch.tensor(ends, device=ids.device)

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        if not any(rows.most_wanted):  # of a wrapper's rows
            return empty_draft(rows)
        lm, cache, cached = self._lm, self._cache.first(len(rows)), self._cached[: len(rows)]
        num_entries = rows.lengths - self._lag
        num_wanted = torch.where(num_entries > 0, rows.num_wanted, 0) if self._lag else rows.num_wanted
        fed = self._fed(rows, torch.where(num_wanted > 0, num_entries - 1 - cached, 0))
        if lm.has_states:
            lm.advance(cache, torch.where(num_wanted > 0, cached, 0))
        step = self._step(lm.view_len(rows.longest + k - 1, cache), k, rule, self._options)
        draft = step.draft(lm, rows, num_wanted, noise, cache=cache, cached=cached, fed=fed)
        # Drafted tokens are fed but for the last one, which is if the next was cut.
        num_fed = torch.minimum(draft.num_drafted, num_wanted - 1) if self._keeps_drafts else 0
        cached.copy_(torch.where(num_wanted > 0, num_entries + num_fed, cached))
        return draft

    def _fed(self, rows: Rows, num_lacking: Tensor) -> Tensor:
        """The last committed token, and those before it whose entries a row lacks [B]: as many as it may lack if shapes
        must be prepared. [B, T]"""
        num_owed = self._most_owed
        if not self._lm.execution.is_prepared:
            num_owed = int(num_lacking.amax().clamp(0, num_owed))
        if num_owed <= 1:
            return rows.last_ids if num_owed else rows.last_ids[:, 1:]
        columns = rows.lengths[:, None] - 1 + torch.arange(-num_owed, 1, device=rows.lengths.device)
        return rows.ids.gather(1, columns.clamp(0, rows.ids.shape[1] - 1))
