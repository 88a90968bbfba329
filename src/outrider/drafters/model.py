"""The classic drafter: a smaller language model with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.batch import Batch
from outrider.drafters.base import empty_draft
from outrider.flow import Draft
from outrider.lm import LM
from outrider.probs import is_finite, mark_seen, to_probs
from outrider.verify import Rule


class ModelDrafter:
    """Drafts with a language model, under the same sampling options as the target."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.name = lm.name

    def open(self, batch: Batch) -> ModelSession:
        return ModelSession(self.lm, batch)


class ModelSession:
    """The draft model's cache over one batch.

    ``cached`` counts the tokens of each row that were fed. After a verdict those that stand are the first
    ``min(cached, length - 1)``: if fewer tokens were accepted than fed, the committed text goes on with another token
    at position length - 1, which is the first that is wrong in the cache. The minimum must be taken after *every*
    round, also in rows and rounds without drafts: a round later the length has grown, and would hide what was rejected.
    """

    def __init__(self, lm: LM, batch: Batch) -> None:
        self._lm = lm
        self._cache = lm.new_cache(min(batch.capacity, lm.context_len))
        is_served = batch.lengths <= lm.context_len
        self._cached = torch.where(is_served, batch.lengths - 1, 0)  # [B]
        lm.prefill(batch.ids, torch.zeros_like(self._cached), self._cached, self._cache)

    def keep(self, rows: Tensor) -> None:
        self._cached = self._cached[rows]
        self._cache.keep(rows.to(self._lm.device))

    def propose(self, batch: Batch, num_wanted: Sequence[int], rule: Rule, noise: Any) -> Draft:
        lm, device = self._lm, batch.ids.device
        self._cached = torch.minimum(self._cached, batch.lengths - 1)
        # The last drafted token is never fed, so the draft may go one beyond its own context.
        room = [max(0, lm.context_len + 1 - row.length) for row in batch.rows]
        wanted = [min(pair) for pair in zip(num_wanted, room, strict=True)]
        k = max(wanted)
        if k == 0:
            return empty_draft(batch)
        num_drafted = torch.tensor(wanted, device=device)
        logits = self._catch_up(batch, num_drafted > 0)
        view_len = min(batch.max_length + k - 1, lm.context_len)
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        finite: list[Tensor] = []
        for i in range(k):
            seen = None
            if batch.seen is not None:
                drafted = torch.stack(ids, dim=1) if ids else batch.ids[:, :0]
                seen = mark_seen(batch.seen, drafted)[:, -1:]
            finite.append(is_finite(logits[:, -1]))
            probs.append(to_probs(logits, batch.settings, seen)[:, -1])  # [B, V]
            ids.append(rule.draw(probs[-1], noise, i))
            if i + 1 < k:
                positions = torch.where(i + 1 < num_drafted, batch.lengths + i, -1)
                logits = lm.forward(ids[-1][:, None], positions[:, None], self._cache, view_len)
        self._cached = torch.where(num_drafted > 0, batch.lengths + num_drafted - 1, self._cached)
        return Draft(
            ids=torch.stack(ids, dim=1),
            probs=torch.stack(probs, dim=1),
            num_drafted=num_drafted,
            is_finite=torch.stack(finite, dim=1),
        )

    def _catch_up(self, batch: Batch, is_on: Tensor) -> Tensor:
        """Feed the committed tokens that the cache lacks, in the rows that are to be drafted for.

        A row owes one token after a rejection, two after a full acceptance (the last drafted token was never fed), more
        after rounds without drafts.

        Returns:
            Logits after the last token. [B, 1, V]
        """
        ends, cached = batch.lengths - 1, self._cached
        num_before_last = int(torch.where(is_on, ends - cached, 0).amax())
        if num_before_last > 1:
            fed_to = torch.where(is_on, ends, cached)
            self._lm.prefill(batch.ids, cached, fed_to, self._cache)
            cached, num_before_last = fed_to, 0
        width = 1 + num_before_last
        # Right-aligned: the last column is every row's last token.
        columns = ends[:, None] - torch.arange(width - 1, -1, -1, device=ends.device)  # [B, 1 or 2]
        positions = torch.where((columns >= cached[:, None]) & is_on[:, None], columns, -1)
        view_len = min(batch.max_length, self._lm.context_len)
        ids = batch.ids.gather(1, columns.clamp_min(0))
        return self._lm.forward(ids, positions, self._cache, view_len, num_logits=1)
