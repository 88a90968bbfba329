"""Batch: the rows being written, as the loop and the drafters see them.

Token buffer, lengths and sampling settings live on the device; a few whole numbers that shapes depend on live on the
host beside them. Rows that end are taken out, so that every tensor holds unfinished rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.flow import Draft, Request, Verdict
from outrider.probs import Settings


@dataclass(slots=True)
class Row:
    """The host's side of one row.

    Attributes:
        index: of its request.
        length: tokens so far, prompt included.
        limit: the length at which the row ends.
    """

    index: int
    request: Request
    length: int
    limit: int


class Batch:
    """B unfinished rows.

    Attributes:
        rows: host side, in the order of the tensors.
        ids: column j holds the token at position j; beyond a row's length it holds nothing of meaning. [B, N]
        lengths: tokens so far, prompt included. [B]
        seeds: [B]
        settings: sampling options.
        seen: tokens that occur so far, None where no row has a repetition penalty. [B, V]
    """

    def __init__(
        self, requests: Sequence[Request], *, vocab_size: int, context_len: int, device: torch.device, k: int
    ) -> None:
        """
        Args:
            requests: each with a non-empty prompt shorter than ``context_len`` and a seed.
            k: most tokens drafted in a round; the buffer has room for them beyond the last token.
        """
        self.rows = []
        for index, request in enumerate(requests):
            length = len(request.prompt_ids)
            assert 0 < length < context_len, "a prompt has at least one token, and leaves room for one"
            limit = min(length + request.sampling.max_new_tokens, context_len)
            self.rows.append(Row(index, request, length, limit))
        self.capacity = max(row.limit for row in self.rows)
        buffer = torch.zeros(len(requests), self.capacity + k + 1, dtype=torch.long)
        for row in self.rows:
            buffer[row.index, : row.length] = torch.tensor(row.request.prompt_ids)
        self.ids = buffer.to(device)
        self.lengths = torch.tensor([row.length for row in self.rows], device=device)
        self.seeds = torch.tensor([row.request.sampling.seed for row in self.rows], device=device)
        self._vocab_size = vocab_size
        self.settings = self._settings()
        self.seen = None
        if self.settings.repetition_penalty is not None:
            self.seen = torch.zeros(len(requests), vocab_size, dtype=torch.bool, device=device)
            for row in self.rows:
                self.seen[row.index, torch.tensor(row.request.prompt_ids, device=device)] = True

    def _settings(self) -> Settings:
        return Settings.of([row.request.sampling for row in self.rows], self._vocab_size, self.ids.device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def max_length(self) -> int:
        return max(row.length for row in self.rows)

    def commit(self, draft: Draft, verdict: Verdict) -> Tensor:
        """Append the accepted tokens and the one after them.

        Returns:
            The committed tokens; columns beyond ``num_accepted`` repeat the last one. [B, K+1]
        """
        k = draft.ids.shape[1]
        offsets = torch.arange(k + 1, device=self.ids.device)
        padded = torch.cat((draft.ids, verdict.next_ids[:, None]), dim=1)
        committed = torch.where(offsets < verdict.num_accepted[:, None], padded, verdict.next_ids[:, None])
        self.ids.scatter_(1, self.lengths[:, None] + offsets, committed)
        if self.seen is not None:
            self.seen.scatter_(1, committed, True)
        self.lengths = self.lengths + verdict.num_accepted + 1
        return committed

    def keep(self, kept: Sequence[int]) -> Tensor:
        """Take out all rows but these (indices into ``rows``, ascending).

        Returns:
            The same indices on the device, for the caches to follow.
        """
        index = torch.tensor(kept, dtype=torch.long, device=self.ids.device)
        self.rows = [self.rows[i] for i in kept]
        self.ids, self.lengths, self.seeds = self.ids[index], self.lengths[index], self.seeds[index]
        if self.seen is not None:
            self.seen = self.seen[index]
        if self.rows:
            self.settings = self._settings()
            if self.settings.repetition_penalty is None:
                self.seen = None
        return index
