"""The classic drafter: a smaller language model with the same vocabulary, token by token or all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSession, Rows
from outrider.drafters.draft_cache import DraftCache
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.drawing import DraftStep, Logits, owed
from outrider.errors import OptionError, UnsupportedModel
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule

_FAVOURED_K = (7, 15)  # of PARD: a large K costs little; K + 1 tokens are verified, and kernels work in eights
SELF = "self"
"""Draft with the target itself, which reads a window of the text."""
_OWN_WINDOW = 512
_MASK_KEYS = ("pard_token", "ptd_token_id")


def model_drafter(lm: LM, options: DraftOptions = NO_OPTIONS, mask_id: int | None = None) -> Drafter:
    """Draft with a language model, under the same sampling options as the target. Raises UnsupportedModel, OptionError.

    Args:
        options: greedy, a least probability, a window.
        mask_id: the mask token of a model that drafts all tokens in one forward (PARD, see ``AtOnce``); None for the
            token that its configuration states. The usual models state none and draft one token after the other.
    """
    options.check_taken(lm.name, "is_greedy", "min_prob", "window")
    if options.window:
        lm = lm.with_context(options.window)
    mask = mask_token_of(lm) if mask_id is None else mask_id

    def opens(models: Sequence[LM], num_slots: int, capacity: int, device: torch.device, max_k: int) -> DraftSession:
        (lm,) = models
        session = model_cache(lm, options, mask, num_slots, capacity, device, 1 if mask is None else max_k)
        return session if capacity <= lm.context_len else WindowSession(session, lm.context_len, num_slots)

    return Drafter(
        options.full_name(lm.name),
        opens,
        (lm,),
        is_lm=mask is None and options.min_prob == 0,
        is_one_hot=options.is_greedy,
        favoured_k=() if mask is None else _FAVOURED_K,
    )


def self_drafter(target: LM, options: DraftOptions = NO_OPTIONS) -> Drafter:
    """Draft with the target itself, in a cache of its own that holds a window of each sequence. Beside a long sequence
    its steps are shorter, since attention reads fewer keys and values.

    Raises:
        OptionError: the window is not shorter than the context.
    """
    options = options if options.window else replace(options, window=_OWN_WINDOW)
    if options.window >= target.context_len:
        raise OptionError("window", options.window, f"fewer tokens than the context, which has {target.context_len}")
    return model_drafter(target, options)


def mask_token_of(lm: LM) -> int | None:
    """The mask token of a model that drafts all tokens in one forward, by its configuration; None for other models.
    Raises UnsupportedModel: it has no embedding for that token."""
    config = lm.weights.config
    key = next((key for key in _MASK_KEYS if getattr(config, key, None) is not None), None)
    if key is None:
        return None
    mask_id, num_rows = int(getattr(config, key)), lm.backend.num_embedded
    if not 0 <= mask_id < num_rows:
        raise UnsupportedModel(f"{lm.name} states {key} = {mask_id}, but has embeddings for {num_rows} tokens")
    return mask_id


def _feed(
    lm: LM, view_len: int, num_logits: int, cache: SlotCache, ids: Tensor, positions: Tensor, num_committed: Tensor
) -> Tensor:
    """Logits after the last columns [B, N, D]. States are kept up to ``num_committed`` tokens [B]."""
    logits = lm.forward(ids, positions, cache, view_len, num_logits=num_logits, keeps_finite=True, spreads=False)
    cache.settle(num_committed)
    return logits


class OneByOne(DraftStep):
    """A forward for each token."""

    __slots__ = ()

    def logits(
        self, lm: LM, num_wanted: Tensor, cache: SlotCache, lengths: Tensor, cached: Tensor, fed: Tensor
    ) -> Logits:
        """
        Args:
            cached: how many tokens are in the cache, and are not fed again. [B]
            fed: the first tokens to feed, up to the last committed token. [B, T]
        """
        states, num_known = cache, cache.bound + fed.shape[1]
        ids, positions = fed, owed(num_wanted, fed.shape[1], cached, lengths)
        for i in range(self.k):
            if cache.is_recurrent and i > 0:  # the first tokens are committed; drafts leave their states
                states = cache.scratch() if i == 1 else states
                states.bound = num_known + i - 1
            drawn, num_drafted = yield _feed(lm, self.view_len, 1, states, ids, positions, lengths + i)[:, -1]
            ids, positions = drawn[:, None], torch.where(i + 1 < num_drafted, lengths + i, -1)[:, None]


@dataclass(frozen=True, slots=True)
class AtOnce(DraftStep):
    """PARD: an ordinary causal model that was trained to fill in mask tokens. After the committed tokens it is fed K-1
    of them, and the logits at the last K positions are those of the K drafted tokens. So the logits at an offset do not
    depend on the tokens drafted before it. The mask tokens' entries in the cache lie beyond the sequence and are never
    counted as cached.

    Source: An et al. 2504.18583.
    """

    mask_id: int = field(kw_only=True)

    def logits(
        self, lm: LM, num_wanted: Tensor, cache: SlotCache, lengths: Tensor, cached: Tensor, fed: Tensor
    ) -> Logits:
        """For the arguments see ``OneByOne``."""
        offsets = torch.arange(1, self.k, device=lengths.device)
        beyond = torch.where(offsets < num_wanted[:, None], lengths[:, None] - 1 + offsets, -1)
        ids = torch.cat((fed, fed.new_full((len(fed), self.k - 1), self.mask_id)), dim=1)
        positions = torch.cat((owed(num_wanted, fed.shape[1], cached, lengths), beyond), dim=1)
        logits = _feed(lm, self.view_len, self.k, cache, ids, positions, lengths)
        for i in range(self.k):
            yield logits[:, i]


def model_cache(
    lm: LM,
    options: DraftOptions,
    mask_id: int | None,
    num_slots: int,
    capacity: int,
    device: torch.device,
    most_owed: int,
) -> DraftCache:
    """The session of a draft model. For ``mask_id`` see ``model_drafter``, for ``most_owed`` ``DraftCache``."""
    stops_early = options.min_prob > 0 and not lm.execution.is_prepared and lm.device.type == "cpu"
    step = OneByOne if mask_id is None else partial(AtOnce, mask_id=mask_id)
    return DraftCache(
        *(lm, options, num_slots, min(capacity, lm.context_len), device),
        step=partial(step, stops_early=stops_early),
        feed=LM.prefill,
        most_owed=most_owed,
        keeps_drafts=mask_id is None,
    )


def window_start(length: int, context_len: int) -> int:
    """The number of tokens before the window of a sequence. The window has ``context_len`` tokens at most, and more
    than half as many where there are tokens before it."""
    step = context_len - context_len // 2
    return max(0, -(-(length - context_len) // step)) * step


class WindowSession(DraftSession):
    """Shows a session the last tokens of sequences that are longer than the draft's context.

    The token that begins a window has position 0. When a sequence outgrows the context, its window begins anew with the
    second half of it, which costs a prefill of half a context; for the session inside, that is a new sequence. Where
    the window begins is a function of the length alone, so that drafts stay a function of the sequence. No draft goes
    beyond its window. A row that is not drafted for keeps its old window until it is.

    Args:
        inner: needs no hidden states of the target.
    """

    def __init__(self, inner: DraftSession, context_len: int, num_slots: int) -> None:
        self._inner, self._context_len = inner, context_len
        self._starts = [0] * num_slots  # of the window that a slot's cache holds

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        start = self._starts[slot if source is None else source]
        kept = max(0, num_tokens - start)
        # Where nothing of that window remains, the new sequence may end before it.
        self._starts[slot] = start if kept else 0
        self._inner.assign(slot, source, kept)

    def catch_up(self, rows: Rows) -> bool:
        """Begin the windows of rows that have outgrown theirs, or are new."""
        if rows.longest > self._context_len or any(self._starts[: len(rows)]):
            # Here alone the host waits for the device: while all sequences are short, nothing is read.
            for slot, (length, num) in enumerate(zip(rows.lengths.tolist(), rows.most_wanted, strict=True)):
                start = window_start(length, self._context_len)
                if num and self._starts[slot] != start:
                    self._starts[slot] = start
                    self._inner.assign(slot, slot, 0)
        return self._inner.catch_up(self._within(rows))

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return self._inner.propose(self._within(rows), k, rule, noise)

    def _within(self, rows: Rows) -> Rows:
        """The rows with the tokens of their windows. [B, N] -> [B, context]"""
        if not any(self._starts[: len(rows)]) and rows.longest + max(rows.most_wanted) <= self._context_len + 1:
            return rows
        device = rows.ids.device
        starts = torch.tensor(self._starts[: len(rows)], device=device)
        lengths = rows.lengths - starts
        room = (self._context_len + 1 - lengths).clamp_min(0)  # the last drafted token is never fed
        columns = starts[:, None] + torch.arange(self._context_len, device=device)
        return replace(
            rows,
            ids=rows.ids.gather(1, columns.clamp_max(rows.ids.shape[1] - 1)),
            lengths=lengths,
            num_wanted=torch.minimum(rows.num_wanted, room),
            longest=min(rows.longest, self._context_len),
        )
