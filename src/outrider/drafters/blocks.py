"""Sessions of heads that draft a block at once: DFlash and DFlash 2 (see heads.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Rows, empty_draft
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.drawing import LogitsAt, draw_draft
from outrider.drafters.head_states import StatesSession
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule


def feed_blocks(
    head: LM, view_len: int, k: int, cache: SlotCache, last_ids: Tensor, lengths: Tensor, num_wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Feed the blocks.

    Args:
        last_ids: [B, 2]
        lengths: [B]
        num_wanted: rows with 0 are not fed. [B]

    Returns:
        logits of the drafts [B, K, D]; outputs of their slots [B, K, H]
    """
    module = head.model
    size, first = module.block_size, module.num_before
    last = last_ids[:, 1:]
    ids = torch.cat((last, last.new_full((1, 1), module.mask_id).expand(len(last), size - 1)), dim=1)
    positions = lengths[:, None] - 1 + torch.arange(size, device=lengths.device)
    positions = torch.where((num_wanted > 0)[:, None], positions, -1)
    with head.lock:
        if head.native is not None:
            given, wanted = (ids, positions, cache, view_len), (len(module.layers) + 1,)
            outputs = head.native(*given, num_logits=0, features=wanted, keeps_finite=True).features
            assert outputs is not None
        else:
            cache.at(positions, view_len, is_single=False, keeps_finite=True)
            outputs = module(ids, positions, module.masks(positions, view_len, head.dtype), cache.argument)
        slots = outputs[:, first : first + k]
        return module.logits(slots), slots


def _at_once(
    run: Any, head: LM, k: int, view_len: int, num_wanted: Tensor, cache: SlotCache, last_ids: Tensor, lengths: Tensor
) -> LogitsAt:
    """A forward for all tokens, whose logits may be corrected by the token before each one."""
    logits, slots = run(feed_blocks, (view_len, k), cache, last_ids, lengths, num_wanted)
    correct = head.model.candidate_selector

    def logits_at(i: int, ids: Tensor, num_drafted: Tensor) -> Tensor:
        here: Tensor = logits[:, i]
        return here if correct is None else correct(here, slots[:, i], ids)

    return logits_at


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
        static = _at_once, (view_len,), rule, self._options, k, False
        own = cache, rows.last_ids, rows.lengths
        call = static, rows.last_ids, num_wanted, rows.settings, rows.history, own
        return draw_draft(self._draft, head, rows.masks, call, noise)
