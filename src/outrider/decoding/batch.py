"""Batch: the rows being written, as the loop and the drafters see them.

Token buffer, lengths and sampling settings live on the device. The host reads what a round committed, and may start the
next rounds before it has: of a row's length on the device it knows bounds, and no shape depends on more.

Rows that end are taken out: the tensors hold unfinished rows only, or a few finished ones too where an execution
wants certain batch sizes: what is computed for those is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.records import Request
from outrider.sampling.probs import Settings


@dataclass(slots=True)
class Row:
    """The host's side of one row.

    Attributes:
        index: of its request.
        length: tokens that were read so far, prompt included.
        limit: the length at which the row ends.
        is_done: it has ended.
        is_full: all that was drafted in its last round with drafts stands, as far as is known.
    """

    index: int
    request: Request
    length: int
    limit: int
    is_done: bool = False
    is_full: bool = False
    _num_unread: int = field(default=0, init=False)
    _reach: int = field(init=False)  # the most that the length on the device may be, but for the limit

    def __post_init__(self) -> None:
        self._reach = self.length

    @property
    def shortest(self) -> int:
        """The least that the length on the device may be: every round commits a token, up to the limit."""
        return min(self.length + self._num_unread, self.limit)

    @property
    def longest(self) -> int:
        """The most that it may be."""
        return min(self._reach, self.limit)

    def started(self, num_columns: int) -> None:
        """A round has been started in which at most so many tokens are drafted."""
        self._num_unread += 1
        self._reach += num_columns + 1
        self.is_full = num_columns > 0 or self.is_full

    def read(self, num_columns: int, num_drafted: int, num_accepted: int) -> None:
        """What came of the first round that was not read yet."""
        self._num_unread -= 1
        self._reach -= num_columns - num_accepted
        if num_columns > 0 and self._num_unread == 0:
            self.is_full = num_accepted == num_drafted > 0


class Batch:
    """B rows.

    Attributes:
        rows: host side, in the order of the tensors.
        ids: column j holds the token at position j; beyond a row's length it holds nothing of meaning. [B, N]
        lengths: tokens so far, prompt included. [B]
        limits: the length at which each row ends; 0 where it has ended before. [B]
        last_ids: the last token of each row, which no model has been fed yet. [B]
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
        self.last_ids = torch.tensor([row.request.prompt_ids[-1] for row in self.rows], device=device)
        self.limits = torch.tensor([row.limit for row in self.rows], device=device)
        self.seeds = torch.tensor([row.request.sampling.seed for row in self.rows], device=device)
        self._num_done = 0
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
    def longest(self) -> int:
        """The most that the length of a row may be."""
        return max(row.longest for row in self.rows)

    def bounds(self) -> tuple[list[int], list[int]]:
        """The least and the most that each length may be. [B], [B]"""
        return [row.shortest for row in self.rows], [row.longest for row in self.rows]

    @property
    def goes_on(self) -> bool:
        """Whether a row may need another round."""
        return any(not row.is_done and row.shortest < row.limit for row in self.rows)

    def most_drafted(self, k: int) -> int:
        """The most tokens that a row may draft, of at most k."""
        # A round commits at most one token more than it drafts: never one too many.
        return max(0 if row.is_done else max(0, min(k, row.limit - row.shortest - 1)) for row in self.rows)

    def num_drafted(self, k: int) -> Tensor:
        """How many tokens, of at most k, each row drafts; none where it has ended. [B]"""
        return (self.limits - self.lengths - 1).clamp(0, k)

    def commit(self, committed: Tensor, places: Tensor, lengths: Tensor) -> None:
        """Append to each row its accepted tokens and the one after them.

        Args:
            committed: columns beyond those repeat the last token. [B, K+1]
            places: of the columns in the text. [B, K+1]
            lengths: of the rows from now on. [B]
        """
        self.ids.scatter_(1, places, committed)
        if self.seen is not None:
            self.seen.scatter_(1, committed, True)
        for row in self.rows:
            if not row.is_done:
                row.started(committed.shape[1] - 1)
        # Copies, since a prepared step writes over its results.
        self.last_ids, self.lengths = committed[:, -1].clone(), lengths.clone()

    def close(self, round_rows: Callable[[int], int]) -> Tensor | None:
        """Take out rows that are done. What the device has to be told is copied to it when a row has ended, and only
        then, since a copy makes the host wait.

        Args:
            round_rows: number of unfinished rows -> batch size; a few done rows are kept to fill it.

        Returns:
            Indices of the rows that are left, for the caches to follow; None where all are. [B']
        """
        open_rows = [i for i, row in enumerate(self.rows) if not row.is_done]
        done_rows = [i for i, row in enumerate(self.rows) if row.is_done]
        if len(done_rows) == self._num_done:
            return None
        num_kept = round_rows(len(open_rows)) if open_rows else 0
        index = None
        if num_kept < len(self.rows):
            index = self._keep(sorted(open_rows + done_rows[: num_kept - len(open_rows)]))
        self._num_done = sum(row.is_done for row in self.rows)
        self.limits = torch.tensor([0 if row.is_done else row.limit for row in self.rows], device=self.ids.device)
        return index

    def _keep(self, kept: Sequence[int]) -> Tensor:
        """Take out all rows but these (indices into ``rows``, ascending).

        Returns:
            The same indices on the device.
        """
        index = torch.tensor(kept, dtype=torch.long, device=self.ids.device)
        self.rows = [self.rows[i] for i in kept]
        self.ids, self.lengths, self.seeds = self.ids[index], self.lengths[index], self.seeds[index]
        self.last_ids = self.last_ids[index]
        if self.seen is not None:
            self.seen = self.seen[index]
        if self.rows:
            self.settings = self._settings()
            if self.settings.repetition_penalty is None:
                self.seen = None
        return index
