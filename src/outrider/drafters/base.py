"""The interface of drafters, and the drafter that proposes nothing.

A drafter is configuration and may be shared. ``open`` starts a session over the slots of one engine, which holds the
state between rounds. That state is a function of the committed tokens and of the target's features alone, never of
rejected drafts: so a sequence may be cut and resumed, and does not depend on its neighbours in the batch.

A drafter declares the properties that the loop and the tools need. Nothing checks its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.history import History
from outrider.sampling.masks import Masks
from outrider.sampling.probs import Settings
from outrider.sampling.rules import Rule


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a round, as a drafter sees them: the slots 0 to B-1 of its session.

    Attributes:
        ids: column j holds the token at position j; columns from a row's length on are undefined. [B, N]
        lengths: tokens so far, prompt included. [B]
        last_ids: the last two tokens of each row; the first is arbitrary in sequences of one token. [B, 2]
        num_wanted: most tokens to draft for each row; 0 in inactive slots. [B]
        settings: sampling options.
        history: which tokens occur in each sequence, as far as the settings need this.
        most_wanted: upper bounds of ``num_wanted`` that the host knows before it reads the device. B numbers
        longest: the host's upper bound of the lengths of active rows.
        masks: the effects of constraints; None if no row has a constraint.
        shared: keys and values of the target, in the layers that the drafter asks for, by slot and position; those of a
            row's last token are not there yet. Only to be read. None if the drafter asks for none.
    """

    ids: Tensor
    lengths: Tensor
    last_ids: Tensor
    num_wanted: Tensor
    settings: Settings
    history: History
    most_wanted: Sequence[int]
    longest: int
    masks: Masks | None = None
    shared: SlotCache | None = None

    def __len__(self) -> int:
        return len(self.most_wanted)


class Prefill(NamedTuple):
    """A chunk of prompts, just fed to the target: columns ``starts`` to ``ends`` of adjacent slots.

    Attributes:
        ids: the slots' tokens; column j holds the token at position j. [R, N]
        first_slot: the first of the R slots.
        starts, ends: tokens of each prompt in the target's cache before and after. R numbers each
        lengths: the lengths of the prompts. R numbers
        features: hidden states of the tokens fed, from the column ``starts`` on; columns beyond ``ends`` are padding.
            None if the drafter asks for no features, or if nothing was fed (the prompt has one token, or was found in
            the cache). [R, T, F]
    """

    ids: Tensor
    first_slot: int
    starts: Sequence[int]
    ends: Sequence[int]
    lengths: Sequence[int]
    features: Tensor | None

    @property
    def feature_positions(self) -> Tensor:
        """Positions of the features, -1 for padding. [R, T]"""
        assert self.features is not None
        starts, ends = torch.tensor([self.starts, self.ends], device=self.ids.device)
        positions = starts[:, None] + torch.arange(self.features.shape[1], device=self.ids.device)
        return torch.where(positions < ends[:, None], positions, -1)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The results of a round's verify step, in tensors of fixed shape, which are valid until the session drafts again.

    Attributes:
        logits: [B, K+1, V]
        committed: the accepted tokens and the one after them, which fills the remaining columns. [B, K+1]
        places: positions of the committed tokens. [B, K+1]
        lengths: the lengths of the sequences after the round. [B]
        last_ids: the last two tokens of the sequences after the round. [B, 2]
        report: for the host: ``committed``; the numbers of accepted and of verified drafted tokens; whether the
            target's logits after the accepted ones are not finite, so that no token follows them; and whether the
            draft was cut, as its logits were not finite. [B, K+5]
        drafted_probs: see ``Verdict``. [B, K, 2]
        features: hidden states of the tokens fed to the target: column c belongs to position old_length - 1 + c, and is
            valid where old_length + c < length; None if the drafter asks for no features. [B, K+1, F]
    """

    logits: Tensor
    committed: Tensor
    places: Tensor
    lengths: Tensor
    last_ids: Tensor
    report: Tensor
    drafted_probs: Tensor
    features: Tensor | None

    @property
    def old_lengths(self) -> Tensor:
        """Lengths of the sequences before the round. [B]"""
        return self.places[:, 0]

    @property
    def feature_positions(self) -> Tensor:
        """Positions of the features, -1 where they are not valid. [B, K+1]"""
        following = self.old_lengths[:, None] + torch.arange(self.places.shape[1], device=self.places.device)
        return torch.where(following < self.lengths[:, None], following - 1, -1)


class DraftSession(ABC):
    """The state of a drafter over the slots of one engine."""

    @abstractmethod
    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        """Draft at most ``rows.num_wanted`` tokens for each row, drawn with ``rule.draw`` from the reported q. Called
        only if some are wanted.

        A token that ``rows.masks`` forbid cannot be accepted. So a model draws each token from its masked q and pushes
        the token (``Masks.push``), which the host must then read before the next one is drawn.

        Args:
            k: upper bound of ``rows.num_wanted`` and of the draft's columns.
            noise: the noise of this round, for at least k tokens.
        """

    def catch_up(self, rows: Rows) -> bool:
        """Feed the tokens that were skipped while nothing was drafted. Called in every round, before ``propose``.

        Returns:
            Whether the time counts as prefill, rather than as drafting.
        """
        return False

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:  # noqa: B027
        """Replace a slot's content by the first ``num_tokens`` tokens of slot ``source`` (or fewer, if the row
        that moves has fewer). A source of None keeps the slot's own first ``num_tokens``, and zeroes the rest."""

    def prefill(self, chunk: Prefill) -> None:  # noqa: B027
        """Receive a chunk of prompts that was fed to the target."""

    def observe(self, result: VerifyResult) -> None:  # noqa: B027
        """Receive the result of a round that was committed, with drafts or without."""


Opens = Callable[[Sequence[LM], int, int, torch.device, int], DraftSession]
"""Start a session: (models, slots, most tokens in a sequence, device of the loop's tensors, most tokens drafted for a
row in a round) -> session."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """Proposes tokens: how its sessions are started, and what the loop and the tools need to know of it.

    Attributes:
        name: the name in tables and messages.
        opens: starts a session.
        models: the drafter's models.
        is_lm: whether q is that of its (one) model, so that q depends on the tokens alone.
        is_one_hot: whether q is one-hot (``Draft.probs`` is None).
        reads_on_host: whether the drafter reads committed tokens on the host before drafting, so that no round is
            started ahead.
        most_drafted: most tokens that the drafter can draft in a round: 0 for plain decoding, None for no limit.
        favoured_k: values of K that adaptive schedules try, besides the values that the execution favours.
        features: the hidden states of the target that sessions need: index i is the input of decoder layer i.
        shared_layers: the layers of the target whose keys and values sessions read.
    """

    name: str
    opens: Opens
    models: tuple[LM, ...] = ()
    is_lm: bool = False
    is_one_hot: bool = False
    reads_on_host: bool = False
    most_drafted: int | None = None
    favoured_k: tuple[int, ...] = ()
    features: tuple[int, ...] = ()
    shared_layers: tuple[int, ...] = ()

    @property
    def lm(self) -> LM | None:
        """The language model of q, if q depends on the tokens alone. ``q_sampling`` gives the sampling options of q."""
        return self.models[0] if self.is_lm else None

    def open(self, num_slots: int, capacity: int, device: torch.device, max_k: int) -> DraftSession:
        """Start a session over empty slots.

        Args:
            capacity: most tokens in a sequence.
            device: the device of the loop's tensors.
            max_k: the most tokens that a round drafts for a row.
        """
        return self.opens(self.models, num_slots, capacity, device, max_k)

    def with_models(self, change: Callable[[LM], LM]) -> Drafter:
        """Copy the drafter, with its models changed (by ``LM.uncaptured``, for example)."""
        return replace(self, models=tuple(map(change, self.models)))


class _EmptySession(DraftSession):
    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return empty_draft(rows)


NO_DRAFTER = Drafter("none", lambda *_: _EmptySession(), is_one_hot=True, most_drafted=0)
"""Proposes nothing: plain decoding."""


def altered_drafter(inner: Drafter, name: str, alter: Callable[[Rows, int, Draft], Draft]) -> Drafter:
    """A drafter whose drafts are altered: (rows, k, draft) -> draft."""

    def opens(*sizes: Any) -> DraftSession:
        session = inner.opens(*sizes)
        propose = session.propose

        def propose_altered(rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
            return alter(rows, k, propose(rows, k, rule, noise))

        session.propose = propose_altered  # type: ignore[method-assign]
        return session

    return replace(inner, name=name, opens=opens)


def q_sampling(drafter: Drafter, sampling: Sampling) -> Sampling:
    """The sampling options of q for a row with ``sampling``: ``sampling``, or greedy if q is one-hot."""
    return replace(sampling, temperature=0.0) if drafter.is_one_hot else sampling


def empty_draft(rows: Rows) -> Draft:
    return _empty_draft(len(rows), rows.ids.device)


@lru_cache
def _empty_draft(num_rows: int, device: torch.device) -> Draft:
    return Draft(
        ids=torch.zeros(num_rows, 0, dtype=torch.long, device=device),
        probs=None,
        num_drafted=torch.zeros(num_rows, dtype=torch.long, device=device),
    )


def pad(draft: Draft, k: int) -> Draft:
    """Pad a draft of at least one column to k columns."""
    if k == draft.ids.shape[1]:
        return draft

    columns = torch.arange(k, device=draft.ids.device).clamp_max(draft.ids.shape[1] - 1)
    probs, finite = (None if values is None else values[:, columns] for values in (draft.probs, draft.is_finite))
    return Draft(draft.ids[:, columns], probs, draft.num_drafted, finite)
