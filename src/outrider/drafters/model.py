"""The classic drafter: a smaller language model with the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.decoding.batch import Batch
from outrider.drafters.base import empty_draft
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, is_finite, mark_seen, to_probs
from outrider.sampling.rules import Rule


class ModelDrafter:
    """Drafts with a language model, under the same sampling options as the target."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.name = lm.name

    def open(self, batch: Batch) -> ModelSession:
        return ModelSession(self.lm, batch)

    def compiled(self) -> ModelDrafter:
        return ModelDrafter(self.lm.compiled())


def _draft_steps(
    lm: LM,
    rule: Rule,
    view_len: int,
    k: int,
    cache: SlotCache,
    fed: Tensor,
    cached: Tensor,
    lengths: Tensor,
    num_drafted: Tensor,
    settings: Settings,
    seen: Tensor | None,
    noise: Any,
) -> tuple[Tensor, ...]:
    """Draft K tokens, one after the other.

    Args:
        fed: tokens that come first, of which the last is the last committed one. Not in rows where the cache has them
            already (it has ``cached``), nor in those that nothing is drafted for. [B, T]
        cached, lengths: [B]
        num_drafted: at most; none where the context is full. [B]

    Returns:
        ids [B, K], q [B, K, V], whether q is finite [B, K], the tokens drafted [B] and those in the cache then [B]
    """
    cached = torch.minimum(cached, lengths - 1)
    # The last drafted token is never fed, so the draft may go one beyond its own context.
    num_drafted = torch.minimum(num_drafted, (lm.context_len + 1 - lengths).clamp_min(0))
    ids: list[Tensor] = []
    probs: list[Tensor] = []
    finite: list[Tensor] = []
    num_fed = fed.shape[1]
    positions = lengths[:, None] - num_fed + torch.arange(num_fed, device=lengths.device)
    is_owed = (positions >= cached[:, None]) & (num_drafted > 0)[:, None]
    positions = torch.where(is_owed, positions, -1)
    for i in range(k):
        step_seen = None
        if seen is not None:
            step_seen = mark_seen(seen, torch.stack(ids, dim=1))[:, -1:] if ids else seen[:, None]
        logits = lm.forward(fed, positions, cache, view_len, num_logits=1)
        finite.append(is_finite(logits[:, -1]))
        probs.append(to_probs(logits, settings, step_seen)[:, -1])  # [B, V]
        ids.append(rule.draw(probs[-1], noise.at(i)))
        fed = ids[-1][:, None]
        positions = torch.where(i + 1 < num_drafted, lengths + i, -1)[:, None]
    cached = torch.where(num_drafted > 0, lengths + num_drafted - 1, cached)
    return torch.stack(ids, dim=1), torch.stack(probs, dim=1), torch.stack(finite, dim=1), num_drafted, cached


class ModelSession:
    """The draft model's cache over one batch.

    ``cached`` counts the tokens of each row that were fed. After a verdict those that stand are the first
    ``min(cached, length - 1)``: if fewer tokens were accepted than fed, the committed text goes on with another token
    at position length - 1, which is the first that is wrong in the cache. The minimum must be taken after *every*
    round, also in rows and rounds without drafts: a round later the length has grown, and would hide what was rejected.

    So the cache of a row that is drafted for lacks one token if all that were drafted last stand, since the last was
    never fed, and one more for each round without drafts since then.
    """

    def __init__(self, lm: LM, batch: Batch) -> None:
        self._lm = lm
        self._cache = lm.new_cache(len(batch), min(batch.capacity, lm.context_len))
        self._cached = torch.where(batch.lengths <= lm.context_len, batch.lengths - 1, 0)  # [B]
        self._num_idle = 0  # rounds since the last with drafts
        starts, lengths = torch.zeros_like(batch.lengths), [row.length for row in batch.rows]
        num_columns = max(length - 1 if length <= lm.context_len else 0 for length in lengths)
        lm.prefill(batch.ids, starts, self._cached, self._cache, latest=0, num_columns=num_columns)

    def keep(self, rows: Tensor) -> None:
        self._cached = self._cached[rows]
        self._cache = self._lm.kept(self._cache, rows)

    def propose(self, batch: Batch, k: int, rule: Rule, noise: Any) -> Draft:
        lm = self._lm
        rows = [row for row in batch.rows if not row.is_done and row.shortest <= lm.context_len]
        if k == 0 or not rows:
            self._cached = torch.minimum(self._cached, batch.lengths - 1)
            self._num_idle += 1
            return empty_draft(batch)
        fed = self._fed(batch, self._num_idle + any(row.is_full for row in rows))
        view_len = lm.view_len(min(batch.longest + k - 1, lm.context_len), self._cache)
        lengths, num_drafted = batch.lengths, batch.num_drafted(k)
        arguments = (self._cache, fed, self._cached, lengths, num_drafted, batch.settings, batch.seen, noise)
        ids, probs, is_good, num_drafted, cached = lm.run(_draft_steps, (rule, view_len, k), *arguments)
        self._cached, self._num_idle = cached.clone(), 0  # a prepared step writes over its results
        return Draft(ids=ids, probs=probs, num_drafted=num_drafted, is_finite=is_good)

    def _fed(self, batch: Batch, most_lacking: int) -> Tensor:
        """The tokens that the drafts begin with: the last committed one, and the one before it if a row's cache may
        lack that. What a cache may lack beyond these is fed here.

        Returns:
            [B, 1 or 2]
        """
        if most_lacking == 1:
            columns = torch.stack((batch.lengths - 2, batch.lengths - 1), dim=1)
            return batch.ids.gather(1, columns.clamp_min(0))
        if most_lacking > 1:
            starts = torch.minimum(self._cached, batch.lengths - 1)
            ends = torch.where(batch.lengths <= self._lm.context_len, batch.lengths - 1, starts)
            latest = min(batch.longest, self._lm.context_len)
            self._lm.prefill(batch.ids, starts, ends, self._cache, latest=latest, num_columns=most_lacking)
        return batch.last_ids[:, None]
