"""A draft model with a tokenizer of another family.

The draft reads a sequence in its own tokens: each committed token of the target is spelled by a table on the device
(text/spelling.py). So the draft's sequence is a function of the target's, and no text is tokenized. Its logits are
those of the tokens that both have, by the target's ids (``LM.with_tokens``); q is their distribution under the row's
options, and zero elsewhere. So every rule is lossless: the tokens are drawn from the q that is reported, whatever the
draft has read.

Source: token-level intersection, Timor et al. 2502.05202, algorithm 4.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSession, Rows
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.model import model_cache
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule
from outrider.text.spelling import Spelling

_SLACK = 64  # own tokens that a sequence may have beyond its share
_LOST = 2**40  # length of a sequence that is too long for the draft, now and later


def translated_drafter(lm: LM, spelling: Spelling, options: DraftOptions = NO_OPTIONS) -> Drafter:
    """Draft with a language model of other tokens, perhaps greedily or with a least probability. Raises OptionError."""
    options.check_taken(lm.name, "is_greedy", "min_prob")
    return Drafter(
        options.full_name(lm.name),
        lambda models, *sizes: TranslatedSession(models[0], spelling, options, *sizes[:3]),
        (lm.with_tokens(spelling.equals),),
        is_one_hot=options.is_greedy,
        reads_on_host=True,
    )


class TranslatedSession(DraftSession):
    """The session of a draft model over spelled sequences.

    A spelled sequence may be longer than the target's, on average by the factor ``_most_per_token``, so that the
    cache has a fixed size. One that once was longer, or exceeds the draft's context, is *lost*: nothing is drafted for
    it from there on. (That is a function of its tokens, too.) The draft has the target's vocabulary by
    ``LM.with_tokens``.
    """

    def __init__(
        self, lm: LM, spelling: Spelling, options: DraftOptions, num_slots: int, capacity: int, device: torch.device
    ) -> None:
        spelled, prefix = spelling.spelled, spelling.prefix
        self._context_len = lm.context_len
        self._most = max(map(len, spelled))  # own tokens of one of the target's
        self._most_per_token = 1 + math.ceil(sum(map(len, spelled)) / len(spelled))
        rows = [[lm.vocab_size + i for i in ids] + [0] * (self._most - len(ids)) for ids in spelled]
        self._spelled = torch.tensor(rows, device=device)  # [V, M]
        self._nums = torch.tensor([len(ids) for ids in spelled], device=device)  # [V]
        self._has_equal = torch.tensor(spelling.equals, device=device) >= 0  # [V]
        own_capacity = min(self._most_per_token * capacity + _SLACK, lm.context_len)
        # The last column of each takes what is written beyond.
        self._ids = torch.zeros(num_slots, own_capacity + 1, dtype=torch.long, device=device)
        self._ids[:, : len(prefix)] = lm.vocab_size + torch.tensor(prefix, dtype=torch.long, device=device)
        self._ends = torch.full((num_slots, capacity + 2), len(prefix), dtype=torch.long, device=device)
        self._num_read = torch.zeros(num_slots, dtype=torch.long, device=device)  # tokens that are spelled
        self._inner = model_cache(lm, options, None, num_slots, own_capacity, device, self._most)

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        origin = slot if source is None else source
        num_read = min(num_tokens, int(self._num_read[origin]))
        if origin != slot:
            self._ids[slot], self._ends[slot] = self._ids[origin], self._ends[origin]
        self._num_read[slot] = num_read
        # A sequence that is too long keeps nothing.
        end = int(self._ends[slot, num_read])
        self._inner.assign(slot, source, end if end < self._ids.shape[1] else 0)

    def catch_up(self, rows: Rows) -> bool:
        """Spell the tokens committed since the last round. The cache holds those that were drafted, up to one that the
        draft does not have: its spelling is another one than what was fed."""
        begins = self._num_read[: len(rows)].clone()
        num_new = rows.lengths - begins
        if (width := int(num_new.amax())) > 0:
            columns = begins[:, None] + torch.arange(width, device=begins.device)
            ids = rows.ids.gather(1, columns.clamp_max(rows.ids.shape[1] - 1))
            offsets = torch.arange(width, device=begins.device)
            is_fed = self._has_equal[ids] & (offsets < num_new[:, None] - 1)
            ends = self._ends[: len(rows)].gather(1, begins[:, None])[:, 0] + is_fed.long().cumprod(dim=1).sum(dim=1)
            self._spell(ids, begins, rows.lengths)
            self._inner.forget(torch.where(num_new > 0, ends, _LOST))
        return self._inner.catch_up(self._own(rows))

    def _spell(self, ids: Tensor, begins: Tensor, ends: Tensor) -> None:
        """Append tokens to the sequences of the first slots: column c is the token at position begins + c [R, C].
        ``begins`` and ``ends`` are the lengths before and after [R]."""
        own_ids, own_ends = self._ids[: len(ids)], self._ends[: len(ids)]
        counts = begins[:, None] + 1 + torch.arange(ids.shape[1], device=ids.device)  # tokens up to each one
        is_new = counts <= ends[:, None]
        nums = torch.where(is_new, self._nums[ids], 0)
        after = own_ends.gather(1, begins[:, None]) + nums.cumsum(dim=1)
        most = (self._most_per_token * counts + _SLACK).clamp_max(self._context_len)
        is_lost = (after > most).long().cumsum(dim=1) > 0
        after = torch.where(is_lost, _LOST, after)
        own_ends.scatter_(1, torch.where(is_new, counts, own_ends.shape[1] - 1), after)
        offsets = torch.arange(self._most, device=ids.device)
        is_written = (offsets < nums[..., None]) & ~is_lost[..., None]  # [R, C, M]
        places = torch.where(is_written, (after - nums)[..., None] + offsets, own_ids.shape[1] - 1)
        own_ids.scatter_(1, places.flatten(1), self._spelled[ids].flatten(1))
        self._num_read[: len(ids)] = torch.maximum(begins, ends)

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return self._inner.propose(self._own(rows), k, rule, noise)

    def _own(self, rows: Rows) -> Rows:
        """The rows in own tokens. Drafted tokens are the target's, one own token each."""
        num_rows = len(rows)
        lengths = self._ends[:num_rows].gather(1, rows.lengths[:, None])[:, 0]
        num_wanted = torch.minimum(rows.num_wanted, (self._context_len + 1 - lengths).clamp_min(0))
        lengths = lengths.clamp(1, self._ids.shape[1] - 1)
        most_wanted, own_lengths = torch.stack((num_wanted, lengths)).tolist()
        columns = lengths[:, None] + torch.arange(-2, 0, device=lengths.device)
        return replace(
            rows,
            ids=self._ids[:num_rows],
            lengths=lengths,
            last_ids=self._ids[:num_rows].gather(1, columns.clamp_min(0)),
            num_wanted=num_wanted,
            most_wanted=most_wanted,
            longest=max((length for length, num in zip(own_lengths, most_wanted, strict=True) if num), default=1),
        )
