"""Sessions of heads that draft token by token with the target's own keys and values: Gemma 4's assistants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Rows, empty_draft
from outrider.drafters.drawing import LogitsAt, draw_draft
from outrider.drafters.head_states import StatesSession, keep_states, of_tokens, stored_states
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule


def feed_shared(
    head: LM, view_len: int, shared: SlotCache, ids: Tensor, states: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Feed single tokens. Results are those of ``feed_entries``."""
    module = head.model
    with head.lock:
        outputs, states = module(ids, states, positions, shared, view_len)
        logits = module.lm_head(outputs)
    return of_tokens(head, logits), states


def _in_place(
    run: Any, head: LM, k: int, view_len: int, num_wanted: Tensor, cache: SlotCache, shared: SlotCache, lengths: Tensor
) -> LogitsAt:
    """A forward for each token, all at the place of the last committed one.

    Args:
        cache: the states.
        shared: keys and values of the target.
        lengths: [B]
    """
    positions = torch.where(num_wanted > 0, lengths - 1, -1)[:, None]
    states = stored_states(cache, positions - 1)

    def logits_at(i: int, ids: Tensor, num_drafted: Tensor) -> Tensor:
        nonlocal states
        logits, states = run(feed_shared, (view_len,), shared, ids[:, None], states, positions)
        last: Tensor = logits[:, -1]
        return last

    return logits_at


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
        static = _in_place, (head.view_len(rows.longest, shared),), rule, self._options, k, False
        own = cache, shared, rows.lengths
        call = static, rows.last_ids, num_wanted, rows.settings, rows.history, own
        return draw_draft(self._draft, head, rows.masks, call, noise)
