"""Batch: the rows that are generating, in their slots.

Token buffer, lengths and sampling options live on the device, one entry for each slot. A round runs on the first b
slots, a view of the same memory. Inactive slots have limit 0: nothing is fed for them, and their results are discarded.

The host may read the result of a round late, when it has started the next ones. A row's length as read is then a lower
bound of its length on the device, an upper one is ``Row.longest``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.drafters.base import Rows, VerifyResult
from outrider.records import Constraint, Request
from outrider.runtime.lm import LM
from outrider.sampling.candidates import CandidateBuffers
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.masks import Masks
from outrider.sampling.probs import Settings

_OWN = "limits", "draft_ends", "seeds"


def final_length(target: LM, request: Request) -> int:
    num_given = len(request.prompt_ids) - request.num_resumed
    return min(num_given + request.sampling.max_new_tokens, target.context_len)


def final_room(target: LM, request: Request, max_k: int) -> int:
    """The most tokens that the rounds of a request may commit, prompt included, if each drafts at most ``max_k``."""
    return min(final_length(target, request) + request.drafts_beyond_end * max_k, target.context_len)


@dataclass(slots=True, eq=False)
class Row:
    """The host's state of one request, from its submission to its end. Never reused for another."""

    index: int  # the index of the row's request
    request: Request
    limit: int  # the length at which the row ends
    room: int  # the length that the row's rounds may reach: above the limit where drafts are not shortened for it
    client: str = ""  # see ``FairQueue``. Rows of different clients share only prefixes that are common.
    priority: int = 0
    slot: int = -1  # the row's slot; -1 while the row waits
    submitted_s: float = 0.0  # when the row was submitted
    queued_s: float = 0.0  # how long the row waited for the slot
    num_cached: int = 0  # prompt tokens found in the slot's cache
    num_filled: int = 0  # prompt tokens in the target's cache
    awaited: Row | None = None  # the row in prefill whose prefix this row waits for
    is_done: bool = False  # whether the row has ended, or was cancelled
    is_spoilt: bool = False  # whether the row's slot holds NaN or infinite values
    token_ids: list[int] = field(init=False)  # prompt and output, as far as the host has read them

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens read so far, prompt included."""
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_missing(self) -> int:
        """Prompt tokens left to prefill. (The first round feeds the last one.)"""
        return self.prompt_length - 1 - self.num_filled

    @property
    def num_media(self) -> int:
        """Tokens of a prompt with images that are to be fed at once, by embeddings; 0 for text."""
        media = self.request.media
        return 0 if media is None or self.num_filled else media.num_tokens

    def longest(self, most_unread: int) -> int:
        """Upper bound of the length on the device, where unread rounds commit at most ``most_unread`` tokens."""
        return min(self.length + most_unread, self.room)

    def most_drafted(self, k: int) -> int:
        """The most tokens that the row drafts in a round, if the schedule chose k."""
        constant_k = self.request.num_draft_tokens
        return max(0, min(k if constant_k is None else constant_k, self.room - 1 - self.length))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRows(Rows):
    """The rows of a round: what a drafter sees, and what the loop knows beside. Tensors that the batch has as well are
    views."""

    active: Sequence[Row | None]  # the active row of each slot, or None
    limits: Tensor  # as in ``Batch``, like the next two. [B]
    draft_ends: Tensor
    seeds: Tensor
    constant_k: Tensor | None  # each row's own K, -1 where the schedule chooses; None if it chooses for all rows. [B]
    most_constant_k: int | None  # the largest K that a row has of its own; None if the schedule chooses for all rows
    is_adaptive: bool  # whether the schedule chooses for a row
    constraints: Sequence[Constraint | None] | None  # the constraint of each row; None if no row has one
    reports_drafts: bool  # whether a row asks for drafts
    reports_logits: bool  # whether a row asks for logits
    num_logprobs: int | None  # the most log-probabilities that a row asks for; None if no row asks for any

    def most_k(self, chosen_k: int) -> int:
        """The largest K of a row, if the schedule chose ``chosen_k``."""
        if self.most_constant_k is None:
            return chosen_k
        return max(chosen_k, self.most_constant_k) if self.is_adaptive else self.most_constant_k


class Batch:
    """S slots, some of them occupied by rows.

    Attributes:
        rows: on the host: the active row of each slot, or None.
        running: the active rows.
        has_constraints: whether the host must read all tokens before it can mask the next ones.
        ids: column j holds the token at position j; columns from a row's length on are undefined. [S, N]
        lengths: tokens so far, prompt included. [S]
        limits: the length at which each row ends; 0 in inactive slots. [S]
        draft_ends: the most tokens of each row, drafted ones included; 0 likewise. [S]
        last_ids: the last two tokens of each row; the last one was not fed to any model yet. (The one before it is 0
            in sequences of one token.) [S, 2]
        seeds: [S]
        settings: sampling options. Their form (which of them are in use) grows with the rows that join and does not
            shrink when they leave, since each form is a program of its own; it is reset when all slots are free.
        history: which tokens occur in each sequence, as far as the settings need this.
    """

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        max_k: int,
        vocab_size: int,
        device: torch.device,
        candidates: CandidateBuffers | None = None,
    ) -> None:
        """A row has at most ``capacity`` tokens, and room for ``max_k`` drafted ones beyond the last."""
        self.rows: list[Row | None] = [None] * num_slots
        self.ids = torch.zeros(num_slots, capacity + max_k + 1, dtype=torch.long, device=device)
        self.lengths = torch.ones(num_slots, dtype=torch.long, device=device)
        self.limits, self.draft_ends, self.seeds = (torch.zeros_like(self.lengths) for _ in _OWN)
        self.last_ids = torch.zeros(num_slots, 2, dtype=torch.long, device=device)
        self._constant_k = torch.full_like(self.lengths, -1)  # -1 where the schedule chooses
        self._vocab_size, self._candidates = vocab_size, candidates
        self._first: dict[int, SlotRows] = {}  # the first slots, while their rows do not change
        self.reset_options()

    def reset_options(self) -> None:
        """Reset the form of the options. All slots must be free."""
        self.settings = Settings.neutral(len(self.rows), self.ids.device, self._candidates)
        self.history = NO_HISTORY
        self._note_change()

    def _note_change(self) -> None:
        self._first.clear()
        self.running = [row for row in self.rows if row is not None]
        self.has_constraints = any(row.request.constraint is not None for row in self.running)

    def admit(self, row: Row) -> None:
        """Write the prompt into the row's slot. The row is inactive until ``start``: rounds write beyond its length, if
        at all."""
        slot, device = row.slot, self.ids.device
        self.ids[slot, : row.length] = torch.tensor(row.token_ids, device=device)
        self.lengths[slot] = row.length
        self.seeds[slot] = row.request.sampling.seed or 0

    def start(self, row: Row) -> None:
        slot, sampling, constant_k = row.slot, row.request.sampling, row.request.num_draft_tokens
        self.rows[slot] = row
        self.limits[slot], self.draft_ends[slot] = row.limit, row.room - 1  # a round commits one more than it drafts
        self.last_ids[slot, 0] = row.token_ids[-2] if row.length > 1 else 0
        self.last_ids[slot, 1] = row.token_ids[-1]
        self._constant_k[slot] = -1 if constant_k is None else constant_k
        self.settings = self.settings.with_row(slot, sampling, self._vocab_size)
        self.history = self.settings.with_room(self.history, len(self.rows), self._vocab_size)
        self.history.begin(slot, self.ids[slot, : row.length], row.length - row.request.num_resumed)
        self._note_change()

    def release(self, slot: int) -> None:
        self.rows[slot] = None
        self.limits[slot] = self.draft_ends[slot] = 0
        self._note_change()

    def move(self, source: int, slot: int) -> None:
        row = self.rows[source]
        assert row is not None and self.rows[slot] is None
        self.rows[slot], row.slot = row, slot
        own = self.ids, self.lengths, self.limits, self.draft_ends, self.last_ids, self.seeds, self._constant_k
        for values in (*own, *self.history.tensors):
            values[slot] = values[source]
        self.settings = self.settings.with_row(slot, row.request.sampling, self._vocab_size)
        self.release(source)

    def view(self, num_rows: int, chosen_k: int, most_unread: int) -> SlotRows:
        """The first slots, as a round takes them that drafts at most ``chosen_k`` tokens in rows without a constant K,
        where unread rounds commit at most ``most_unread`` tokens in a row."""
        if num_rows not in self._first:
            self._first[num_rows] = self._first_slots(num_rows)
        first = self._first[num_rows]
        k = chosen_k if first.constant_k is None else torch.where(first.constant_k < 0, chosen_k, first.constant_k)
        constraints = first.constraints
        return replace(
            first,
            num_wanted=(first.draft_ends - first.lengths).clamp_min_(0).clamp_max_(k),
            most_wanted=[0 if row is None else row.most_drafted(chosen_k) for row in first.active],
            longest=max(row.longest(most_unread) for row in self.running),
            masks=None if constraints is None else Masks(constraints, self._vocab_size, first.lengths.device),
        )

    def _first_slots(self, num_rows: int) -> SlotRows:
        active = tuple(self.rows[:num_rows])
        own = [row.request for row in active if row is not None]
        constant = [one.num_draft_tokens for one in own if one.num_draft_tokens is not None]
        constraints = [None if row is None else row.request.constraint for row in active]
        views = {name: getattr(self, name)[:num_rows] for name in ("ids", "lengths", "last_ids", *_OWN)}
        return SlotRows(
            **views,
            num_wanted=torch.zeros_like(views["lengths"]),  # nothing is wanted yet
            settings=self.settings.first(num_rows),
            history=self.history.map(lambda values: values[:num_rows]),
            most_wanted=[0] * num_rows,
            longest=0,
            active=active,
            constant_k=self._constant_k[:num_rows] if constant else None,
            most_constant_k=max(constant, default=None),
            is_adaptive=len(constant) < len(own),
            constraints=constraints if self.has_constraints else None,
            reports_drafts=any(one.reports_drafts for one in own),
            reports_logits=any(one.reports_logits for one in own),
            num_logprobs=max((n for one in own if (n := one.sampling.logprobs) is not None), default=None),
        )

    def commit(self, rows: Rows, result: VerifyResult) -> None:
        """Append to each row its accepted tokens and the one after them."""
        rows.ids.scatter_(1, result.places, result.committed)
        rows.history.append(result.committed, rows.lengths, result.lengths)
        # Copied, since a prepared step overwrites its results.
        rows.last_ids.copy_(result.last_ids)
        rows.lengths.copy_(result.lengths)
