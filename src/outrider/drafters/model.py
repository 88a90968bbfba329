"""The classic drafter: a smaller language model with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.batch import Batch
from outrider.cache import SlotCache
from outrider.drafters.base import empty_draft
from outrider.flow import Draft
from outrider.lm import LM
from outrider.probs import Settings, is_finite, mark_seen, to_probs
from outrider.verify import Rule


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
        cached, lengths, num_drafted: [B]

    Returns:
        ids [B, K], q [B, K, V], whether q is finite [B, K]
    """
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
    return torch.stack(ids, dim=1), torch.stack(probs, dim=1), torch.stack(finite, dim=1)


class ModelSession:
    """The draft model's cache over one batch.

    ``cached`` counts the tokens of each row that were fed. After a verdict those that stand are the first
    ``min(cached, length - 1)``: if fewer tokens were accepted than fed, the committed text goes on with another token
    at position length - 1, which is the first that is wrong in the cache. The minimum must be taken after *every*
    round, also in rows and rounds without drafts: a round later the length has grown, and would hide what was rejected.
    """

    def __init__(self, lm: LM, batch: Batch) -> None:
        self._lm = lm
        self._cache = lm.new_cache(len(batch), min(batch.capacity, lm.context_len))
        self._cached = [row.length - 1 if row.length <= lm.context_len else 0 for row in batch.rows]
        starts = torch.zeros_like(batch.lengths)
        lm.prefill(batch.ids, starts, starts + torch.tensor(self._cached, device=starts.device), self._cache)

    def keep(self, rows: Tensor) -> None:
        self._cached = [self._cached[i] for i in rows.tolist()]
        self._cache = self._lm.kept(self._cache, rows)

    def propose(self, batch: Batch, num_wanted: Sequence[int], k: int, rule: Rule, noise: Any) -> Draft:
        lm, device = self._lm, batch.ids.device
        self._cached = [min(cached, row.length - 1) for cached, row in zip(self._cached, batch.rows, strict=True)]
        # The last drafted token is never fed, so the draft may go one beyond its own context.
        room = [max(0, lm.context_len + 1 - row.length) for row in batch.rows]
        wanted = [min(pair) for pair in zip(num_wanted, room, strict=True)]
        if max(wanted) == 0:
            return empty_draft(batch)
        k = lm.execution.round_drafts(max(wanted), k)
        num_drafted = torch.tensor(wanted, device=device)
        cached = torch.tensor(self._cached, device=device)
        fed = self._fed(batch, cached, num_drafted, wanted)
        view_len = lm.view_len(min(batch.max_length + k - 1, lm.context_len), self._cache)
        arguments = (self._cache, fed, cached, batch.lengths, num_drafted, batch.settings, batch.seen, noise)
        ids, probs, is_good = lm.run(_draft_steps, (rule, view_len, k), *arguments)
        self._cached = [
            row.length + n - 1 if n > 0 else before
            for row, n, before in zip(batch.rows, wanted, self._cached, strict=True)
        ]
        return Draft(ids=ids, probs=probs, num_drafted=num_drafted, is_finite=is_good)

    def _fed(self, batch: Batch, cached: Tensor, num_drafted: Tensor, wanted: Sequence[int]) -> Tensor:
        """The tokens that the drafts begin with: the last committed one, and the one before it if a row's cache lacks
        that. It does after a full acceptance, since the last drafted token was never fed. What a cache lacks beyond
        these, after rounds without drafts, is fed here.

        Returns:
            [B, 1 or 2]
        """
        owed = [row.length - 1 - n for row, n, num in zip(batch.rows, self._cached, wanted, strict=True) if num > 0]
        if max(owed) == 1:
            columns = torch.stack((batch.lengths - 2, batch.lengths - 1), dim=1)
            return batch.ids.gather(1, columns.clamp_min(0))
        if max(owed) > 1:
            self._lm.prefill(batch.ids, cached, torch.where(num_drafted > 0, batch.lengths - 1, cached), self._cache)
        return batch.last_ids[:, None]
