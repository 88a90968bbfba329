"""The classic drafter: a smaller language model with the same vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.drafters.base import Prefill, Rows, Session, empty_draft
from outrider.drafters.drawing import draw_next, end_before, is_unsure, one_by_one
from outrider.drafters.parallel import draft_at_once, mask_token_of, parallel_logits
from outrider.drafters.window import WindowSession
from outrider.errors import OptionError
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.runtime.padding import num_together
from outrider.sampling.history import History
from outrider.sampling.masks import Masks
from outrider.sampling.probs import Settings
from outrider.sampling.rules import Rule

_GREEDY, _MIN_PROB = ":greedy", ":min-prob="  # options at the end of a draft's name


def model_drafter(lm: LM, *, is_greedy: bool = False, min_prob: float = 0.0) -> ModelDrafter:
    """The drafter of a loaded model. Raises UnsupportedModel."""
    return ModelDrafter(lm, is_greedy, mask_token_of(lm.name, lm.model), min_prob)


def full_name(model: str, is_greedy: bool, min_prob: float) -> str:
    """Name of a draft: the model and its options (see ``split_name``)."""
    return model + (f"{_MIN_PROB}{min_prob:g}" if min_prob > 0 else "") + _GREEDY * is_greedy


def split_name(name: Any) -> tuple[Any, dict[str, Any]]:
    """Split a draft's name into the model, and the options of ``model_drafter``. Raises OptionError."""
    options: dict[str, Any] = {}
    if not isinstance(name, str):
        return name, options
    if name.endswith(_GREEDY):
        name, options["is_greedy"] = name.removesuffix(_GREEDY), True
    model, separator, number = name.rpartition(_MIN_PROB)
    if not separator:
        return name, options
    if model.endswith(_GREEDY):
        raise OptionError("draft", name, f"write {_MIN_PROB[1:-1]} before {_GREEDY[1:]}")
    try:
        options["min_prob"] = float(number)
    except ValueError:
        options["min_prob"] = math.nan
    if not 0 < options["min_prob"] < 1:
        raise OptionError("draft", name, f"{_MIN_PROB[1:-1]} is a probability between 0 and 1")
    return model, options


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """Drafts with a language model, under the same sampling options as the target.

    Attributes:
        is_greedy: draft the most probable tokens instead, so that q is one-hot and tokens are accepted with probability
            p instead of min(1, p/q). Several inference engines draft like this.
        mask_id: the mask token of a model that drafts all tokens in one forward (PARD, see parallel.py); None for the
            usual models, which draft one token after the other.
        min_prob: a draft ends before a token of which the model is unsure (``is_unsure``); 0 for never.
    """

    draft_lm: LM
    is_greedy: bool = False
    mask_id: int | None = None
    min_prob: float = 0.0

    most_drafted: ClassVar[int | None] = None
    reads_on_host: ClassVar[bool] = False
    features: ClassVar[tuple[int, ...]] = ()

    @property
    def name(self) -> str:
        return full_name(self.draft_lm.name, self.is_greedy, self.min_prob)

    @property
    def lm(self) -> LM | None:
        return self.draft_lm if self.mask_id is None and self.min_prob == 0 else None

    @property
    def is_one_hot(self) -> bool:
        return self.is_greedy

    @property
    def models(self) -> tuple[LM, ...]:
        return (self.draft_lm,)

    @property
    def context_len(self) -> int:
        return self.draft_lm.context_len

    def open(self, num_slots: int, capacity: int, device: torch.device, max_k: int) -> Session:
        most_owed = 1 if self.mask_id is None else max_k
        session = ModelSession(self, num_slots, capacity, device, most_owed)
        return session if capacity <= self.context_len else WindowSession(session, self.context_len, num_slots)

    def with_models(self, change: Callable[[LM], LM]) -> ModelDrafter:
        return replace(self, draft_lm=change(self.draft_lm))


def draft_steps(
    lm: LM,
    rule: Rule,
    is_greedy: bool,
    view_len: int,
    k: int,
    min_prob: float,
    stops_early: bool,
    cache: SlotCache,
    fed: Tensor,
    cached: Tensor,
    lengths: Tensor,
    num_wanted: Tensor,
    settings: Settings,
    history: History,
    allowed: Tensor | None,
    noise: Any,
) -> tuple[Tensor, ...]:
    """Draft K tokens, one after the other.

    Args:
        min_prob: see ``ModelDrafter``.
        stops_early: draft fewer than K tokens if no row has more, which needs reading on the host.
        allowed: the tokens that constraints allow, for K = 1; None for all. [B, V]
        fed: the first tokens to feed; the last one is the last committed token. Tokens in the cache (``cached``) are
            not fed again, and rows without drafts are not fed. [B, T]
        cached: tokens in the cache. [B]
        lengths: [B]
        num_wanted: the most tokens to draft. [B]

    Returns:
        ids [B, K], whether q is finite [B, K], the number of cached tokens [B], the number of drafted tokens [B] if
        ``min_prob`` is not 0, and q [B, K, V] unless it is one-hot
    """
    assert allowed is None or k == 1
    cached = torch.minimum(cached, lengths - 1)
    if is_greedy:
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
        if min_prob > 0:
            num_sure = torch.where(is_unsure(logits[:, -1], min_prob, allowed), i, k)
            num_drafted = torch.minimum(num_drafted, num_sure)
        drawn = draw_next(rule, logits[:, -1], settings, history, allowed, noise.at(i), is_greedy=is_greedy)
        for results, one in zip((ids, probs, finite), drawn, strict=True):
            results.append(one)
        if stops_early and not bool((num_drafted > i + 1).any()):
            break
        fed = ids[-1][:, None]
        positions = torch.where(i + 1 < num_drafted, lengths + i, -1)[:, None]
    num_known = torch.minimum(num_drafted, num_wanted - 1)  # drafted tokens fed: the last one only if the next was cut
    results = [
        torch.stack(ids, dim=1),
        torch.stack(finite, dim=1),
        torch.where(num_wanted > 0, lengths + num_known, cached),
    ]
    if min_prob > 0:
        results.append(num_drafted)
    return tuple(results if is_greedy else [*results, torch.stack(probs, dim=1)])


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
        self, drafter: ModelDrafter, num_slots: int, capacity: int, device: torch.device, most_owed: int
    ) -> None:
        """
        Args:
            most_owed: the most tokens, besides the last one, that a row's cache lacks after a round with drafts.
        """
        lm = drafter.draft_lm
        self._lm, self._is_greedy, self._mask_id = lm, drafter.is_greedy, drafter.mask_id
        self._min_prob = drafter.min_prob
        self._stops_early = drafter.min_prob > 0 and not lm.execution.is_prepared and lm.device.type == "cpu"
        self._most_owed = most_owed
        self._cache = lm.new_cache(num_slots, min(capacity, lm.context_len))
        self._cached = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._filled = [0] * num_slots  # prompt tokens in the cache, for rows in prefill
        self._num_left = [0] * num_slots  # deferred prompt tokens, at most
        self._num_late = [0] * num_slots  # tokens committed since, besides the last, that the cache lacks at most
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
        cached = self._cached[:num_rows]
        was_idle, self._is_idle = self._is_idle, not any(rows.most_wanted)
        if self._is_idle:
            if not was_idle:  # later rounds only lengthen rows, and ``assign`` handles those that join or move
                cached.copy_(torch.minimum(cached, rows.lengths - 1))
            self._count_late(rows)
            return empty_draft(rows)
        cache = self._cache.head(num_rows)
        fed = self._fed(rows, cached)
        if lm.has_states:
            known = torch.minimum(cached, rows.lengths - 1)
            lm.advance(cache, torch.where(rows.num_wanted > 0, known, 0))
        view_len = lm.view_len(rows.longest + k - 1, cache)
        shape: tuple[Any, ...] = rule, self._is_greedy, view_len
        if (masks := rows.masks) is not None:
            if self._min_prob > 0:
                rows = replace(rows, num_wanted=rows.num_wanted.clone())  # reduced in place
            draft_masked = self._one_by_one if self._mask_id is None else self._masked_at_once
            results = draft_masked(rows, masks, shape, k, cache, fed, cached, noise)
        else:
            arguments = cache, fed, cached, rows.lengths, rows.num_wanted, rows.settings, rows.history
            shape = *shape, k, self._min_prob
            if self._mask_id is None:
                static = *shape, self._stops_early
                results = lm.run(draft_steps, static, *arguments, None, noise, is_repeatable=rows.is_repeatable)
            else:
                static = *shape, self._mask_id
                results = lm.run(draft_at_once, static, *arguments, noise, is_repeatable=rows.is_repeatable)
        ids, is_good, now_cached, *others = results
        num_drafted = others.pop(0) if self._min_prob > 0 else rows.num_wanted
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
        static = *shape, 1, self._min_prob, False

        def draft(
            i: int, is_wanted: Tensor, lengths: Tensor, history: History, allowed: Tensor, noise: Any
        ) -> tuple[Tensor, ...]:
            nonlocal states, fed, cached
            arguments = states, fed, cached, lengths, is_wanted, rows.settings, history, allowed, noise
            results = list(self._lm.run(draft_steps, static, *arguments, is_repeatable=rows.is_repeatable))
            fed, cached = results[0].clone(), results.pop(2).clone()
            if self._min_prob > 0:
                end_before(rows.num_wanted, i, results.pop(2) < is_wanted)
            if cache.has_states:
                states = cache.scratch() if i == 0 else states  # drafts advance a copy
                states.bound = num_known + i
            return tuple(results)

        ids, is_good, *probs = one_by_one(rows, masks, k, noise, draft)
        return ids, is_good, cached, *self._cut_numbers(rows), *probs

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
        rule, is_greedy, view_len = shape
        settings = rows.settings.greedy() if is_greedy else rows.settings
        arguments = cache, fed, cached, rows.lengths, rows.num_wanted
        static = view_len, k, self._mask_id
        logits, now_cached = self._lm.run(parallel_logits, static, *arguments, is_repeatable=rows.is_repeatable)

        def draft(
            i: int, is_wanted: Tensor, lengths: Tensor, history: History, allowed: Tensor, noise: Any
        ) -> tuple[Tensor, ...]:
            if self._min_prob > 0:
                end_before(rows.num_wanted, i, is_unsure(logits[:, i], self._min_prob, allowed))
            drawn = draw_next(rule, logits[:, i], settings, history, allowed, noise.at(0), is_greedy=is_greedy)
            ids, q, is_good = (part[:, None] for part in drawn)
            return (ids, is_good) if is_greedy else (ids, is_good, q)

        ids, is_good, *probs = one_by_one(rows, masks, k, noise, draft)
        return ids, is_good, now_cached, *self._cut_numbers(rows), *probs

    def _cut_numbers(self, rows: Rows) -> tuple[Tensor, ...]:
        """As steps return them."""
        return (rows.num_wanted,) if self._min_prob > 0 else ()

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
            return rows.last_ids[:, 1 - num_owed :]
        columns = rows.lengths[:, None] - 1 + torch.arange(-num_owed, 1, device=rows.lengths.device)
        return rows.ids.gather(1, columns.clamp(0, rows.ids.shape[1] - 1))
