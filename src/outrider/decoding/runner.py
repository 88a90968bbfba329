"""Runner: prefills and rounds, on the target and the drafter.

Each row has a slot of a preallocated cache. Before each round the target's cache holds all of its tokens but the last.
The verify forward feeds that one and the K drafted tokens, which gives p at K+1 positions; the rule decides how many
drafted tokens are accepted, and draws the one after them. Cache entries of rejected tokens are overwritten later (see
runtime/cache.py).

Source: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.batch import Batch, Row, SlotRows
from outrider.decoding.readback import StartedRound, copies_for_host
from outrider.decoding.verify import VerifyStep
from outrider.drafters.base import Drafter, Prefill, empty_draft, pad
from outrider.runtime.execution import Clock
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.runtime.media import prefill_media
from outrider.runtime.padding import num_together
from outrider.sampling.candidates import candidate_buffers
from outrider.sampling.noise import NoiseAhead
from outrider.sampling.rules import Rule
from outrider.system.resources import memory_errors


class Runner:
    """The models, with caches of S slots: ``cache`` is the target's, and those of the drafter are in ``session``."""

    def __init__(self, target: LM, drafter: Drafter, rule: Rule, num_slots: int, capacity: int, max_k: int) -> None:
        """A slot has at most ``capacity`` tokens; a round drafts at most ``max_k``."""
        self._target, self._drafter, self._rule = target, drafter, rule
        lms = target, *drafter.models
        for lm in lms:
            lm.check_rollback(max_k)
        # Whether the host must read a round before it starts the next one. States are advanced by lengths on the host,
        # and not beyond the end of a text, which is reused.
        self.reads_rounds = drafter.reads_on_host or any(lm.is_recurrent for lm in lms)
        self.cache = target.new_cache(num_slots, capacity)
        is_prepared = any(lm.execution.is_prepared for lm in lms)
        # For the rows of p and q of a round; None where rows are tensors.
        self.candidates = None if is_prepared else candidate_buffers(target.vocab_size, target.device)
        self._shared = self.cache.of_layers(drafter.shared_layers)
        self.session = drafter.open(num_slots, capacity, target.device, max_k)
        self.clock = Clock(target.device)
        self._noise = NoiseAhead(rule.make_noise, max_k, target.vocab_size)
        self._copies_reports = not self.reads_rounds and target.execution.lookahead > 0
        self._prefills: list[tuple[Any, Any]] = []

    def assign(self, slot: int, source: int, num_tokens: int) -> None:
        """Begin a slot with the first tokens of a slot (another or itself), in all caches."""
        self.cache.copy(source, slot, num_tokens)
        self.session.assign(slot, source, num_tokens)
        self._noise.invalidate()

    def erase(self, slot: int, num_kept: int, end: int | None) -> None:
        """Erase a slot in all caches, but for its first tokens, up to the place ``end`` to which it may have been
        written; None for all."""
        self.cache.erase(slot, num_kept, end)
        self.session.assign(slot, None, num_kept)

    @memory_errors()
    def feed(self, rows: Sequence[Row], width: int, ids: Tensor) -> None:
        """Prefill the next tokens of rows in adjacent slots, at most ``width`` of each, from the ids of all slots:
        column j holds the token at position j [S, N]. Raises DeviceError."""
        begin, end = rows[0].slot, rows[-1].slot + 1
        ids = ids[begin:end]
        starts = [row.num_filled for row in rows]
        ends = [min(start + width, row.prompt_length - 1) for row, start in zip(rows, starts, strict=True)]
        mark = self.clock.mark()
        cache, wanted = self.cache.rows(begin, end), self._drafter.features
        media = rows[0].request.media
        if media is not None and rows[0].num_media:
            features = prefill_media(self._target, media, cache, wanted)
        else:
            first, last = torch.tensor([starts, ends], device=ids.device)
            sizes = {"latest": max(starts), "num_columns": width}
            features = self._target.prefill(ids, first, last, cache, **sizes, features=wanted)
        lengths = [row.prompt_length for row in rows]
        self.session.prefill(Prefill(ids, begin, starts, ends, lengths, features))
        self._prefills.append((mark, self.clock.mark()))
        for row, filled in zip(rows, ends, strict=True):
            row.num_filled = filled

    def start(self, batch: Batch, rows: SlotRows, chosen_k: int) -> StartedRound:
        """Start a round of the first slots of the batch, for which the schedule chose ``chosen_k``. The device may
        still be computing on return. Raises DeviceError: a step lacks memory; nothing is committed."""
        target, execution = self._target, self._target.execution
        if self.candidates is not None:
            self.candidates.clear()
        if self._drafter.shared_layers:
            rows = replace(rows, shared=self._shared.first(len(rows)))
        k = execution.round_drafts(max(rows.most_wanted), rows.most_k(chosen_k))
        mark = drafting = self.clock.mark()
        with memory_errors():
            noise = self._noise.at(rows.seeds, rows.lengths, k)
            if self.session.catch_up(rows):
                drafting = self.clock.mark()
                self._prefills.append((mark, drafting))
        with execution.turn():
            with memory_errors(), ExitStack() as undo:
                if rows.masks is not None:
                    undo.callback(rows.masks.roll_back)
                is_drafted = any(rows.most_wanted)
                draft = self.session.propose(rows, k, self._rule, noise) if is_drafted else empty_draft(rows)
                draft = pad(draft, execution.round_drafts(draft.ids.shape[1], k))

                verifying = self.clock.mark()
                cache = self.cache.first(len(rows))
                view_len = target.view_len(rows.longest + draft.ids.shape[1], cache)
                if target.has_states:
                    target.advance(cache, torch.where(rows.lengths < rows.limits, rows.lengths - 1, 0))
                allowed = None if rows.masks is None else rows.masks.along(draft)
                given: Any = {"last_ids": rows.last_ids, "lengths": rows.lengths, "limits": rows.limits, "cache": cache}
                given |= {"settings": rows.settings, "history": rows.history, "allowed": allowed, "noise": noise}
                step = VerifyStep(self._rule, view_len, self._drafter.features)
                result = execution.run(step, target, draft=draft, **given)
                verified = self.clock.mark()

            batch.commit(rows, result)
            self.session.observe(result)
            # Prepared steps overwrite their results: copy what is read after the next round starts.
            copies = copies_for_host(rows, draft, result, copy=self._copies_reports)
        prefills, self._prefills = self._prefills, []
        marks = drafting, verifying, verified, self.clock.mark()
        return StartedRound(chosen_k, rows.active, marks, prefills, **copies)


PREFILL_CHUNK = 512
"""Default number of prompt tokens between two rounds."""


def next_forward(
    filling: Iterable[Row], device: torch.device, *, chunk: int | None, num_left: int | None
) -> tuple[list[Row], int]:
    """The row that has waited longest, with those after it in adjacent slots and of similar length; and the most tokens
    that each is fed. A prompt with images is fed alone, and at once. ``filling`` are the rows whose prefill is
    incomplete, at least one, the longest waiting first; ``chunk`` and ``num_left`` are the most tokens of a row, and of
    several together, None for as many as a forward takes."""
    most_columns, most_tokens = (PREFILL_TOKENS if n is None else min(n, PREFILL_TOKENS) for n in (chunk, num_left))
    rows: list[Row] = []
    for row in filling:
        if row.num_media:
            if not rows:
                return [row], min(row.num_media, row.num_missing)
            break
        if rows and row.slot != rows[-1].slot + 1:
            break
        rows.append(row)
    wanted = [min(row.num_missing, most_columns) for row in rows]
    num_rows = num_together(wanted, device, most_tokens)
    return rows[:num_rows], max(wanted[:num_rows])
