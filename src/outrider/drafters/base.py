"""The interface of drafters, and the drafter that proposes nothing.

A drafter is configuration and may be shared. ``open`` starts a session over the slots of one engine, which holds what
must be remembered between rounds. The state of a session is a function of the committed text and of the target's
features alone, never of drafts that were rejected: so a text may be cut and resumed, and does not depend on its
neighbours.

A drafter states what the loop and the tools need to know about it. Nobody asks for its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.history import History
from outrider.sampling.masks import Masks
from outrider.sampling.probs import Settings
from outrider.sampling.rules import Rule


@dataclass(frozen=True, slots=True)
class RowBounds:
    """What the host knows of a row that takes part in a round.

    Attributes:
        shortest, longest: bounds of its length on the device, which the host may not have read yet.
        most_drafted: at most so many tokens are drafted for it.
        may_lack_one: its last draft may have been accepted whole. (The last drafted token was never fed to a draft
            model, so that its cache then lacks one token more.)
    """

    shortest: int
    longest: int
    most_drafted: int
    may_lack_one: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a round, as a drafter sees them: the slots 0 to B-1 of its session.

    Attributes:
        ids: column j holds the token at position j; columns from a row's length on are undefined. [B, N]
        lengths: tokens so far, prompt included. [B]
        last_ids: the last two tokens of each row; the first of them is any, where the text has one token. [B, 2]
        num_wanted: most tokens to draft for each row; 0 in slots that take no part. [B]
        settings: sampling options.
        history: of the texts, as far as the settings need it.
        bounds: of each row; None for slots that take no part.
        masks: the tokens that constraints leave; None where no row has a constraint.
        is_repeatable: a row among them has to be (see ``Request``).
    """

    ids: Tensor
    lengths: Tensor
    last_ids: Tensor
    num_wanted: Tensor
    settings: Settings
    history: History
    bounds: Sequence[RowBounds | None]
    masks: Masks | None = None
    is_repeatable: bool = False

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def longest(self) -> int:
        """The most that the length of a row may be."""
        return max((row.longest for row in self.bounds if row is not None), default=0)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk of prompts, just fed to the target: columns ``starts`` to ``ends`` of slots next to one another.

    Attributes:
        ids: the slots' tokens; column j holds the token at position j. [R, N]
        first_slot: the first of the R slots.
        starts, ends: the target's cache held ``starts`` tokens of each prompt, and holds ``ends`` now. R numbers each
        lengths: of the prompts. R numbers
        features: of the tokens fed, from the column ``starts`` on; columns beyond ``ends`` are padding. None where
            none are asked for, or where nothing was fed (a prompt of one token, or found in a cache). [R, T, F]
    """

    ids: Tensor
    first_slot: int
    starts: Sequence[int]
    ends: Sequence[int]
    lengths: Sequence[int]
    features: Tensor | None


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """The outcome of a round, in tensors of fixed shape. They are valid until the session drafts again.

    Attributes:
        ids: the committed tokens; columns beyond them repeat the last one. [B, K+1]
        places: of the columns in the text. [B, K+1]
        old_lengths, lengths: of the texts before and after the round. [B]
        features: of the tokens fed to the target: column c belongs to position old_length - 1 + c, and is valid where
            old_length + c < length; None where none are asked for. [B, K+1, F]
    """

    ids: Tensor
    places: Tensor
    old_lengths: Tensor
    lengths: Tensor
    features: Tensor | None


class Session(ABC):
    """A drafter at work on the slots of one engine."""

    @abstractmethod
    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        """Draft at most ``rows.num_wanted`` tokens for each row, drawn with ``rule.draw`` from the q that is reported.

        Where there are ``rows.masks``, a token that they forbid will not stand. So a model draws each token from what
        the masks leave of q, and tells them (``Masks.push``); then it must read its drafts on the host one by one.

        Args:
            k: at least every number wanted; the draft has at most so many columns.
            noise: of this round, for at least k tokens.
        """

    def catch_up(self, rows: Rows) -> bool:
        """Before ``propose``: read what was left out while nothing was drafted.

        Returns:
            Whether prompts were among it. If so, it counts as prefill, else as drafting.
        """
        return False

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:  # noqa: B027
        """The text of a slot now begins with the first ``num_tokens`` tokens of the text of slot ``source``, and holds
        no others. (A row that moves may have fewer.) A source of None keeps the slot's own first ``num_tokens``, and
        erases the rest down to the last number."""

    def prefill(self, chunk: Prefill) -> None:  # noqa: B027
        """A chunk of prompts was fed to the target."""

    def observe(self, committed: CommittedTokens) -> None:  # noqa: B027
        """A round was committed. Called after every round, also those without drafts."""


class Drafter(Protocol):
    """Something that can propose tokens.

    Attributes:
        name: for tables and messages.
    """

    @property
    def name(self) -> str: ...

    @property
    def lm(self) -> LM | None:
        """The language model behind q, if q depends on the text alone; None for other drafters. ``q_sampling`` tells
        under which options it gives q."""
        ...

    @property
    def models(self) -> tuple[LM, ...]:
        """The models that it owns: for memory, compiling and checksums."""
        ...

    @property
    def context_len(self) -> int | None:
        """Most tokens in a text that it drafts for; None where there is no limit."""
        ...

    @property
    def most_drafted(self) -> int | None:
        """Most tokens that it can draft in a round: 0 for plain decoding, None where there is no limit."""
        ...

    @property
    def is_one_hot(self) -> bool:
        """Whether its drafts are certain (``Draft.probs`` is None)."""
        ...

    @property
    def reads_on_host(self) -> bool:
        """Whether it must read committed tokens on the host before it drafts. Then no round is started ahead."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """The hidden states of the target that its session is given: index i is the input of decoder layer i."""
        ...

    def open(self, num_slots: int, capacity: int, device: torch.device) -> Session:
        """Start a session over empty slots.

        Args:
            capacity: most tokens in a text.
            device: of the loop's tensors.
        """
        ...

    def with_models(self, change: Callable[[LM], LM]) -> Drafter:
        """The same drafter, with its models changed (``compiled_lm``, ``LM.eager``)."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    name = "none"
    lm: LM | None = None
    models: tuple[LM, ...] = ()
    context_len: int | None = None
    most_drafted: int | None = 0
    is_one_hot = True
    reads_on_host = False
    features: tuple[int, ...] = ()

    def open(self, num_slots: int, capacity: int, device: torch.device) -> Session:
        return _Silent()

    def with_models(self, change: Callable[[LM], LM]) -> NoDrafter:
        return self


class _Silent(Session):
    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return empty_draft(rows)


@dataclass(frozen=True, slots=True)
class AlteredDrafter:
    """A drafter whose drafts are altered before anyone sees them.

    Args:
        alter: (rows, k, draft) -> draft.
    """

    inner: Drafter
    name: str
    alter: Callable[[Rows, int, Draft], Draft]

    @property
    def lm(self) -> LM | None:
        return self.inner.lm

    @property
    def models(self) -> tuple[LM, ...]:
        return self.inner.models

    @property
    def context_len(self) -> int | None:
        return self.inner.context_len

    @property
    def most_drafted(self) -> int | None:
        return self.inner.most_drafted

    @property
    def is_one_hot(self) -> bool:
        return self.inner.is_one_hot

    @property
    def reads_on_host(self) -> bool:
        return self.inner.reads_on_host

    @property
    def features(self) -> tuple[int, ...]:
        return self.inner.features

    def open(self, num_slots: int, capacity: int, device: torch.device) -> Session:
        return _AlteredSession(self.inner.open(num_slots, capacity, device), self.alter)

    def with_models(self, change: Callable[[LM], LM]) -> AlteredDrafter:
        return replace(self, inner=self.inner.with_models(change))


class _AlteredSession(Session):
    def __init__(self, inner: Session, alter: Callable[[Rows, int, Draft], Draft]) -> None:
        self._inner, self._alter = inner, alter
        self.assign, self.prefill, self.observe = inner.assign, inner.prefill, inner.observe  # type: ignore[method-assign]
        self.catch_up = inner.catch_up  # type: ignore[method-assign]

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return self._alter(rows, k, self._inner.propose(rows, k, rule, noise))


def q_sampling(drafter: Drafter, sampling: Sampling) -> Sampling:
    """The options under which the drafter's model gives q, for a row with ``sampling``: the same, or greedy ones."""
    return replace(sampling, temperature=0.0) if drafter.is_one_hot else sampling


def empty_draft(rows: Rows) -> Draft:
    """No tokens for any row."""
    device = rows.ids.device
    return Draft(
        ids=torch.zeros(len(rows), 0, dtype=torch.long, device=device),
        probs=None,
        num_drafted=torch.zeros(len(rows), dtype=torch.long, device=device),
    )


def padded(draft: Draft, k: int) -> Draft:
    """The same with k columns; the new ones are padding. There must be one already."""
    num_new = k - draft.ids.shape[1]
    if num_new == 0:
        return draft

    def pad(values: Tensor) -> Tensor:
        return torch.cat((values, *[values[:, -1:]] * num_new), dim=1)

    probs = None if draft.probs is None else pad(draft.probs)
    finite = None if draft.is_finite is None else pad(draft.is_finite)
    return Draft(pad(draft.ids), probs, draft.num_drafted, finite)
