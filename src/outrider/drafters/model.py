"""The classic drafter: a smaller language model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, Prefill, Rows, Session, empty_draft
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.drawing import draw_next, end_before, is_unsure, one_by_one
from outrider.drafters.parallel import FAVOURED_K, draft_at_once, mask_token_of, parallel_logits
from outrider.drafters.window import WindowSession
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.runtime.padding import num_together
from outrider.sampling.history import History
from outrider.sampling.masks import Masked, Masks
from outrider.sampling.probs import Settings
from outrider.sampling.rules import Rule


def model_drafter(lm: LM, options: DraftOptions = NO_OPTIONS, mask_id: int | None = None) -> Drafter:
    """Draft with a language model, under the same sampling options as the target.

    Args:
        options: greedy, and a least probability.
        mask_id: the mask token of a model that drafts all tokens in one forward (PARD, see parallel.py); None for the
            token that its configuration states. The usual models state none and draft one token after the other.

    Raises:
        UnsupportedModel, OptionError
    """
    options.check_taken(lm.name, "is_greedy", "min_prob")
    mask = mask_token_of(lm.name, lm.weights) if mask_id is None else mask_id

    def opens(models: Sequence[LM], num_slots: int, capacity: int, device: torch.device, max_k: int) -> Session:
        (lm,) = models
        session = ModelSession(lm, options, mask, num_slots, capacity, device, 1 if mask is None else max_k)
        return session if capacity <= lm.context_len else WindowSession(session, lm.context_len, num_slots)

    return Drafter(
        options.full_name(lm.name),
        opens,
        (lm,),
        is_lm=mask is None and options.min_prob == 0,
        is_one_hot=options.is_greedy,
        favoured_k=() if mask is None else FAVOURED_K,
    )


def draft_steps(
    lm: LM,
    rule: Rule,
    options: DraftOptions,
    view_len: int,
    k: int,
    stops_early: bool,
    cache: SlotCache,
    fed: Tensor,
    cached: Tensor,
    lengths: Tensor,
    num_wanted: Tensor,
    settings: Settings,
    history: History,
    allowed: Masked,
    noise: Any,
) -> tuple[Tensor, ...]:
    """Draft K tokens, one after the other.

    Args:
        stops_early: draft fewer than K tokens if no row has more, which needs reading on the host.
        allowed: the effects of constraints, for K = 1. [B, 1, V]
        fed: the first tokens to feed; the last one is the last committed token. Tokens in the cache (``cached``) are
            not fed again, and rows without drafts are not fed. [B, T]
        cached: tokens in the cache. [B]
        lengths: [B]
        num_wanted: the most tokens to draft. [B]

    Returns:
        ids [B, K], whether q is finite [B, K], the number of cached tokens [B], the number of drafted tokens [B], and q
        [B, K, V] unless it is one-hot
    """
    assert allowed is None or k == 1
    cached = torch.minimum(cached, lengths - 1)
    if options.is_greedy:
        settings = settings.greedy()
    ids: list[Tensor] = []
    probs: list[Tensor] = []
    finite: list[Tensor] = []
    num_fed = fed.shape[1]
    positions = lengths[:, None] - num_fed + torch.arange(num_fed, device=lengths.device)
    num_drafted = num_wanted
    is_owed = (positions >= cached[:, None]) & (num_drafted > 0)[:, None]
    positions = torch.where(is_owed, positions, -1)
    states = cache  # the first tokens are committed; drafts advance a copy
    for i in range(k):
        if ids:
            history = history.then(ids[-1])
        logits = lm.forward(fed, positions, states, view_len, num_logits=1, keeps_finite=True)
        if cache.has_states:
            states.settle(lengths + i)
            if i == 0 and k > 1:
                states = cache.scratch()
        last = logits[:, -1]
        if options.min_prob > 0:
            num_drafted = end_before(num_drafted, i, is_unsure(last, options.min_prob, allowed))
        drawn = draw_next(rule, last, settings, history, allowed, noise.at(i), is_greedy=options.is_greedy)
        for results, one in zip((ids, probs, finite), drawn, strict=True):
            results.append(one)
        if stops_early and not bool((num_drafted > i + 1).any()):
            break
        fed = ids[-1][:, None]
        positions = torch.where(i + 1 < num_drafted, lengths + i, -1)[:, None]
    num_known = torch.minimum(num_drafted, num_wanted - 1)  # drafted tokens fed: the last one only if the next was cut
    cached = torch.where(num_wanted > 0, lengths + num_known, cached)
    found = torch.stack(ids, dim=1), torch.stack(finite, dim=1), cached, num_drafted
    return found if options.is_greedy else (*found, torch.stack(probs, dim=1))


class ModelSession(Session):
    """The draft model's cache over the slots of an engine.

    ``cached`` counts the tokens of each row that were fed. After verification the first ``min(cached, length - 1)`` are
    valid: if fewer tokens were accepted than fed, the committed sequence has another token at position length - 1,
    the first stale one in the cache. The minimum must be taken after *every* round with drafts, in all rows: a round
    later the length has grown, and would hide the rejected token.

    So the cache of a row lacks one token if its last draft was fully accepted, since the last drafted token was never
    fed, and one more for each round without drafts since then. A model that drafts all tokens in one forward feeds no
    drafted token: its cache lacks all tokens that the last round committed. A few missing tokens are fed with the
    drafts, more by ``catch_up``. The draft reads a prompt only when drafting starts, so that it costs nothing where
    drafts do not pay.
    """

    def __init__(
        self,
        lm: LM,
        options: DraftOptions,
        mask_id: int | None,
        num_slots: int,
        capacity: int,
        device: torch.device,
        most_owed: int,
    ) -> None:
        """
        Args:
            mask_id: see ``model_drafter``; None for drafts token by token.
            most_owed: the most tokens, besides the last one, that a row's cache lacks after a round with drafts.
        """
        self._lm, self._options, self._mask_id = lm, options, mask_id
        self._stops_early = options.min_prob > 0 and not lm.execution.is_prepared and lm.device.type == "cpu"
        self._most_owed = most_owed
        self._draft = lm.bind(draft_steps)
        self._cache = lm.new_cache(num_slots, min(capacity, lm.context_len))
        self._cached = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._heads: dict[int, Tensor] = {}  # of ``cached``, by the number of rows
        self._filled = [0] * num_slots  # prompt tokens in the cache, for rows in prefill
        self._num_left = [0] * num_slots  # deferred prompt tokens, at most
        self._num_late = [0] * num_slots  # tokens committed since, besides the last, that the cache lacks at most
        self._last_rows: Rows | None = None  # whose arguments the next call may use again
        self._last_call: tuple[Any, ...] = ()
        self._is_idle = True  # nothing was drafted in the last round, or there was none
        self._most_left = PREFILL_TOKENS // num_slots  # deferred tokens per prompt: one forward reads all of them

    def forget(self, ends: Tensor) -> None:
        """Drop the tokens of the first rows from a place on. [B]"""
        cached = self._cached[: len(ends)]
        cached.copy_(torch.minimum(cached, ends))

    def count_lacking(self, rows: Rows) -> None:
        """Read on the host how many tokens the rows lack, for a sequence that grows by other numbers of tokens than
        rounds commit."""
        lacking = (rows.lengths - 1 - self._cached[: len(rows)]).tolist()
        for slot, num in enumerate(lacking):
            self._num_late[slot] = max(0, num - self._num_left[slot])

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        num_left = num_late = 0
        if source is None:
            self._cache.erase(slot, num_tokens)
            self._cached[slot].clamp_(max=num_tokens)
            return
        if num_tokens > 0:
            # Here alone the host waits for the device: a prompt joins, or a row moves.
            num_tokens = self._cache.take_over(source, min(num_tokens, int(self._cached[source])))
            num_left, num_late = self._num_left[source], self._num_late[source]
        self._cache.copy(source, slot, num_tokens)
        self._cached[slot] = self._filled[slot] = num_tokens
        self._num_left[slot], self._num_late[slot] = num_left, num_late

    def prefill(self, chunk: Prefill) -> None:
        """Feed a chunk of prompts. While no row is drafted for, short ones are deferred until drafting starts."""
        begin, end = chunk.first_slot, chunk.first_slot + len(chunk.ends)
        starts = self._filled[begin:end]
        ends = [max(start, to) for start, to in zip(starts, chunk.ends, strict=True)]  # prompts may be left out
        num_new = [to - start for start, to in zip(starts, ends, strict=True)]
        self._num_late[begin:end] = [0] * len(ends)
        if self._is_idle and max(num_new) <= self._most_left and not self._lm.has_states:
            self._num_left[begin:end] = num_new
            return
        self._filled[begin:end] = ends
        self._num_left[begin:end] = [0] * len(ends)
        device = chunk.ids.device
        self._lm.prefill(
            chunk.ids,
            torch.tensor(starts, device=device),
            torch.tensor(ends, device=device),
            self._cache.rows(begin, end),
            latest=max(starts),
            num_columns=max(num_new),
        )
        self._cached[begin:end] = torch.tensor(ends, device=device)

    def catch_up(self, rows: Rows) -> bool:
        """Feed the tokens that a row lacks beyond those that are fed with its drafts."""
        if rows is self._last_rows:  # those that draft lack no more than after each of their rounds
            return False
        lacking = [
            left + late if num else 0
            for num, left, late in zip(rows.most_wanted, self._num_left, self._num_late, strict=False)
        ]
        if max(lacking) <= self._most_owed:
            return False
        cached = self._cached[: len(rows)]
        starts = torch.minimum(cached, rows.lengths - 1)
        ends = torch.where(rows.num_wanted > 0, rows.lengths - 1, starts)
        begin = 0
        while begin < len(lacking):
            end = begin + num_together(lacking[begin:], self._lm.device)
            cache, num_columns = self._cache.rows(begin, end), max(lacking[begin:end])
            self._lm.prefill(
                rows.ids[begin:end],
                starts[begin:end],
                ends[begin:end],
                cache,
                latest=rows.longest,
                num_columns=num_columns,
            )
            begin = end
        cached.copy_(ends)
        return any(self._num_left[slot] for slot, num in enumerate(lacking) if num)

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        lm, num_rows = self._lm, len(rows)
        if rows is self._last_rows:
            results = self._draft(*self._last_call, noise)
            cached, (ids, is_good, now_cached, num_drafted, *others) = self._heads[num_rows], results
            cached.copy_(now_cached)
            self._count_late(rows)
            return Draft(ids, others[0] if others else None, num_drafted, is_good)
        self._last_rows = None
        if num_rows not in self._heads:
            self._heads[num_rows] = self._cached[:num_rows]
        cached = self._heads[num_rows]
        was_idle, self._is_idle = self._is_idle, not any(rows.most_wanted)
        if self._is_idle:
            if not was_idle:  # later rounds only lengthen rows, and ``assign`` handles those that join or move
                cached.copy_(torch.minimum(cached, rows.lengths - 1))
            self._count_late(rows)
            return empty_draft(rows)
        cache = self._cache.first(num_rows)
        fed = self._fed(rows, cached)
        if lm.has_states:
            known = torch.minimum(cached, rows.lengths - 1)
            lm.advance(cache, torch.where(rows.num_wanted > 0, known, 0))
        view_len = lm.view_len(rows.longest + k - 1, cache)
        shape: tuple[Any, ...] = rule, self._options, view_len
        if (masks := rows.masks) is not None:
            draft_masked = self._one_by_one if self._mask_id is None else self._masked_at_once
            results = draft_masked(rows, masks, shape, k, cache, fed, cached, noise)
        else:
            arguments = cache, fed, cached, rows.lengths, rows.num_wanted, rows.settings, rows.history
            if self._mask_id is None:
                static = *shape, k, self._stops_early
                call = static, *arguments, None
                results = self._draft(*call, noise)
                if lm.execution.is_prepared and not lm.has_states:  # neither ``fed`` nor the cache's bound changes
                    self._last_rows, self._last_call = rows, call
            else:
                static = *shape, k, self._mask_id
                results = lm.run(draft_at_once, static, *arguments, noise)
        ids, is_good, now_cached, num_drafted, *others = results
        probs = others[0] if others else None
        if self._stops_early:
            width = max(1, int(num_drafted.amax()))
            ids, is_good, probs = ids[:, :width], is_good[:, :width], None if probs is None else probs[:, :width]
        cached.copy_(now_cached)
        self._count_late(rows)
        return Draft(ids=ids, probs=probs, num_drafted=num_drafted, is_finite=is_good)

    def _one_by_one(
        self,
        rows: Rows,
        masks: Masks,
        shape: tuple[Any, ...],
        k: int,
        cache: SlotCache,
        fed: Tensor,
        cached: Tensor,
        noise: Any,
    ) -> tuple[Tensor, ...]:
        """See ``one_by_one``."""
        states, num_known = cache, cache.bound + fed.shape[1]
        static = *shape, 1, False

        def draft(
            i: int, is_wanted: Tensor, lengths: Tensor, history: History, allowed: Masked, noise: Any
        ) -> tuple[Tensor, ...]:
            nonlocal states, fed, cached
            arguments = states, fed, cached, lengths, is_wanted, rows.settings, history, allowed, noise
            results = self._lm.run(draft_steps, static, *arguments)
            fed, cached = results[0].clone(), results[2].clone()
            if cache.has_states:
                states = cache.scratch() if i == 0 else states  # drafts advance a copy
                states.bound = num_known + i
            return results[3] < is_wanted, *results[:2], *results[4:]

        num_drafted, (ids, is_good, *probs) = one_by_one(rows, masks, k, noise, draft)
        return ids, is_good, cached, num_drafted, *probs

    def _masked_at_once(
        self,
        rows: Rows,
        masks: Masks,
        shape: tuple[Any, ...],
        k: int,
        cache: SlotCache,
        fed: Tensor,
        cached: Tensor,
        noise: Any,
    ) -> tuple[Tensor, ...]:
        """Compute all logits in one forward, then draw and mask the tokens one by one."""
        rule, options, view_len = shape
        settings = rows.settings.greedy() if options.is_greedy else rows.settings
        arguments = cache, fed, cached, rows.lengths, rows.num_wanted
        static = view_len, k, self._mask_id
        logits, now_cached = self._lm.run(parallel_logits, static, *arguments)

        def draft(
            i: int, is_wanted: Tensor, lengths: Tensor, history: History, allowed: Masked, noise: Any
        ) -> tuple[Tensor, ...]:
            here = logits[:, i]
            is_cut = is_unsure(here, options.min_prob, allowed) if options.min_prob > 0 else is_wanted < 0
            drawn = draw_next(rule, here, settings, history, allowed, noise.at(0), is_greedy=options.is_greedy)
            ids, q, is_good = (part[:, None] for part in drawn)
            return (is_cut, ids, is_good) if options.is_greedy else (is_cut, ids, is_good, q)

        num_drafted, (ids, is_good, *probs) = one_by_one(rows, masks, k, noise, draft)
        return ids, is_good, now_cached, num_drafted, *probs

    def _count_late(self, rows: Rows) -> None:
        """Update the bounds for a round."""
        for slot, (num, most) in enumerate(zip(rows.most_wanted, rows.most_committed, strict=True)):
            self._num_late[slot] = min(num, self._most_owed) if num else self._num_late[slot] + most
            if num:
                self._num_left[slot] = 0

    def _fed(self, rows: Rows, cached: Tensor) -> Tensor:
        """The first tokens to feed: the last committed one, and those before it that a row's cache lacks (as many as it
        may lack, if shapes must be prepared).

        Returns:
            [B, T]
        """
        num_owed = self._most_owed
        if not self._lm.execution.is_prepared:
            owed = torch.where(rows.num_wanted > 0, rows.lengths - 1 - cached, 0)
            num_owed = int(owed.amax().clamp(0, num_owed))
        if num_owed <= 1:
            return rows.last_ids if num_owed else rows.last_ids[:, 1:]
        columns = rows.lengths[:, None] - 1 + torch.arange(-num_owed, 1, device=rows.lengths.device)
        return rows.ids.gather(1, columns.clamp(0, rows.ids.shape[1] - 1))
