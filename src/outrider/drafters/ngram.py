"""Prompt look-up: drafts tokens from earlier in the sequence.

The last n tokens (n from ``max_ngram`` down to 1) are searched for earlier in the sequence, and the tokens that
followed there are drafted. q is one-hot, so only tokens are reported. The idea is Saxena's prompt lookup decoding
(2023) and, with references as the source, Yang et al. 2304.04487.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Rows, Session, empty_draft
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule


class NgramDrafter:
    """Drafts by looking up the last tokens earlier in the sequence."""

    name = "ngram"
    lm: LM | None = None
    models: tuple[LM, ...] = ()
    most_drafted: int | None = None
    favoured_k: tuple[int, ...] = ()
    is_one_hot = True
    reads_on_host = False
    features: tuple[int, ...] = ()

    def __init__(self, max_ngram: int = 3) -> None:
        assert max_ngram >= 1
        self.max_ngram = max_ngram

    def open(self, num_slots: int, capacity: int, device: torch.device, max_k: int) -> Session:
        return NgramSession(self.max_ngram)

    def with_models(self, change: Callable[[LM], LM]) -> NgramDrafter:
        return self


class NgramSession(Session):
    """A session without state: everything is in the sequence."""

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        width = rows.longest
        lengths = rows.lengths.clamp_max(width)  # inactive slots may be longer
        begins, num_found = self._look_up(rows.ids[:, :width], lengths, rows.num_wanted)
        # On other devices the host would have to wait for this number, which costs more than padding.
        num_columns = int(num_found.amax()) if num_found.device.type == "cpu" else k
        if num_columns == 0:
            return empty_draft(rows)
        columns = begins[:, None] + torch.arange(num_columns, device=begins.device)
        ids = rows.ids.gather(1, columns.clamp_max(rows.ids.shape[1] - 1))
        return Draft(ids=ids, probs=None, num_drafted=num_found)

    def _look_up(self, ids: Tensor, lengths: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Start and length of each row's continuation (length 0: not found). [B], [B]"""
        num_rows, width = ids.shape
        begins, num_found = torch.zeros_like(lengths), torch.zeros_like(lengths)
        for n in range(1, min(self._max_ngram, width - 1) + 1):  # a longer match overrides a shorter one
            suffix_columns = (lengths[:, None] - n + torch.arange(n, device=ids.device)).clamp_min(0)
            suffix = ids.gather(1, suffix_columns)  # [B, n]
            is_hit = (ids.unfold(1, n, 1) == suffix[:, None]).all(dim=-1)  # [B, width-n+1]
            ends = torch.arange(n, width + 1, device=ids.device)  # where the continuation of each window begins
            num_after = torch.minimum(lengths[:, None] - ends, wanted[:, None])  # [B, width-n+1]
            # The hit with the longest continuation, then the latest.
            score = torch.where(is_hit & (num_after > 0), num_after * (width + 1) + ends, -1)
            best, at = score.max(dim=1)
            is_found = best > 0
            begins = torch.where(is_found, ends[at], begins)
            num_found = torch.where(is_found, num_after.gather(1, at[:, None]).squeeze(1), num_found)
        return begins, num_found
