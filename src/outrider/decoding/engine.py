"""The loop: draft, verify, commit. Rows join and leave between rounds.

Plain decoding is this loop with a drafter that proposes nothing, so that the baseline of every comparison runs the same
code as the thing compared. Token ids go in, rounds come out; the loop knows no text, files or terminal.

Each row has a slot of a preallocated cache. Before each round the target's cache holds all of its tokens but the last.
The verify forward feeds that one and the K drafted tokens, which gives p at K+1 positions; the rule decides how many
drafted tokens are accepted, and draws the one after them. Cache entries of rejected tokens are overwritten later (see
runtime/cache.py).

Tokens and lengths stay on the device from round to round. The host reads them to stream and to stop. With an execution
that looks ahead, the next round has been started by then; its results for rows that have ended are discarded.

Source: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from outrider.decoding.batch import Batch, Row, final_length, final_room
from outrider.decoding.prefill import PREFILL_CHUNK, next_forward
from outrider.decoding.readback import StartedRound, read, report_of
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.decoding.slots import Slots
from outrider.decoding.verify import VerifyResult, verify_step
from outrider.drafters.base import CommittedTokens, Drafter, Prefill, padded
from outrider.errors import NumericsError
from outrider.records import Request, Round, RowRound, Timing
from outrider.runtime.device_timer import Clock
from outrider.runtime.lm import LM
from outrider.runtime.media import prefill_media
from outrider.sampling.noise import NoiseAhead, NoiseInSteps
from outrider.sampling.rules import Rule
from outrider.system.ranks import Agreement

_LOG = logging.getLogger(__name__)
_PATIENCE = 4  # rounds that a single row may keep the batch wider than necessary, before it is moved down


def decode(
    target: LM,
    drafter: Drafter,
    requests: Sequence[Request],
    rule: Rule,
    *,
    num_draft_tokens: int | Schedule,
    num_slots: int | None = None,
) -> Iterator[Round]:
    """Generate for all requests, round by round: submit all, step until idle.

    Args:
        requests: prompts of at least one token and less than the target's context; sampling options with a seed.
        num_draft_tokens: K, the most tokens drafted for a row in a round, or a schedule that chooses it. A row drafts
            fewer near its end, unless it ``drafts_beyond_end``.
        num_slots: concurrent rows; None for all.

    Raises:
        NumericsError: a model gave NaN or infinite logits.
    """
    if not requests:
        return
    schedule = ConstantSchedule(num_draft_tokens) if isinstance(num_draft_tokens, int) else num_draft_tokens
    engine = Engine(
        target,
        drafter,
        rule,
        num_slots=min(num_slots or len(requests), len(requests)),
        capacity=max(final_room(target, request, schedule.max_k) for request in requests),
        schedule=schedule,
        prefill_chunk=None,
    )
    for request in requests:
        engine.submit(request)
    while (round_ := engine.step()) is not None:
        for row in round_.rows:
            if row.error is not None:
                raise NumericsError(f"prompt {row.row}: {row.error}" if len(requests) > 1 else row.error)
        yield round_


@dataclass(frozen=True, slots=True)
class Load:
    """Numbers of rows that generate, are in prefill, or wait for a slot; and of free slots."""

    num_running: int
    num_filling: int
    num_waiting: int
    num_free_slots: int


class Engine:
    """The loop over S slots. First come, first served; a row that has a slot keeps it.

    ``submit``, ``cancel`` and ``load`` may be called from any thread, ``step`` from one.
    """

    @torch.inference_mode()
    def __init__(
        self,
        target: LM,
        drafter: Drafter,
        rule: Rule,
        *,
        num_slots: int,
        capacity: int,
        schedule: Schedule,
        prefill_chunk: int | None = PREFILL_CHUNK,
    ) -> None:
        """
        Args:
            num_slots: S, concurrent rows.
            capacity: most tokens in a row, prompt included, and those that its last round may commit beyond its end.
            prefill_chunk: about the number of prompt tokens fed in a step, which bounds how long a joining prompt
                delays other rows, and other engines; None for no limit.
        """
        self._target, self._drafter, self._rule, self._schedule = target, drafter, rule, schedule
        self._capacity = min(capacity, target.context_len)
        self._prefill_chunk = prefill_chunk
        self._batch = Batch(num_slots, self._capacity, schedule.max_k, target.vocab_size, target.device)
        self._cache = target.new_cache(num_slots, self._capacity)
        self._session = drafter.open(num_slots, self._capacity, target.device, schedule.max_k)
        self._noise: NoiseAhead | NoiseInSteps = (
            NoiseInSteps(rule.make_noise, target.vocab_size)
            if target.execution.fuses
            else NoiseAhead(rule.make_noise, schedule.max_k, target.vocab_size)
        )
        # States are advanced by lengths on the host.
        lms = target, *drafter.models
        for lm in lms:
            lm.check_rollback(schedule.max_k)
        must_read = drafter.reads_on_host or any(lm.has_states for lm in lms)
        self._lookahead = 0 if must_read else target.execution.lookahead
        self._rounds_per_look = 1 if must_read else min(lm.execution.rounds_per_look for lm in lms)
        self._slots = Slots(num_slots, self._cache.take_over, shares_parts=not self._cache.has_anchors)
        self._verify = target.bind(verify_step)
        self._last_k = -1
        self._has_warned = False
        self._num_high = 0  # consecutive rounds in which a single row kept the batch wider than necessary
        self._agreement = Agreement()
        self._clock = Clock(target.device)
        self._inference_mode = torch.inference_mode()  # made once: as a decorator it would be made for every round
        self._prefills: list[tuple[Any, Any]] = []
        self._in_flight: deque[StartedRound] = deque()
        self._filling: deque[Row] = deque()
        # Shared with other threads.
        self._lock = threading.Lock()
        self._indices = count()
        self._waiting: deque[Row] = deque()
        self._cancelled: set[int] = set()

    def submit(self, request: Request) -> int:
        """Queue a request.

        Returns:
            Its index, as in ``RowRound.row``.
        """
        assert 0 < len(request.prompt_ids) < self._capacity, "a prompt has a token, and leaves room for one"
        assert (request.num_draft_tokens or 0) <= self._schedule.max_k
        limit = min(final_length(self._target, request), self._capacity)
        room = min(final_room(self._target, request, self._schedule.max_k), self._capacity)
        with self._lock:
            index = next(self._indices)
            self._waiting.append(Row(index, request, limit, room))
        return index

    def cancel(self, index: int) -> None:
        """Cancel a request. It leaves before the next round, and is in no round from then on."""
        with self._lock:
            self._cancelled.add(index)

    @property
    def schedule(self) -> Schedule:
        """Chooses K for each round."""
        return self._schedule

    @property
    def load(self) -> Load:
        with self._lock:
            num_filling, num_free = len(self._filling), self._slots.num_free
            return Load(self._slots.num_used - num_filling, num_filling, len(self._waiting), num_free)

    def step(self) -> Round | None:
        """Let rows leave and join, feed a chunk of prompts, and run one round.

        Returns:
            The round, without rows whose prefill is incomplete, and so perhaps without rows; None when all requests
            have ended.
        """
        with self._inference_mode:
            return self._step()

    def _step(self) -> Round | None:
        if self._slots.num_used == 0:
            self._clock.wait(self._clock.mark())  # for work left by an earlier loop
        begin_s = time.perf_counter()
        self._leave_cancelled()
        self._fill()
        lookahead = 0 if self._batch.has_constraints else self._lookahead
        # Each unread round commits a token or more.
        while len(self._in_flight) <= lookahead and self._is_open(len(self._in_flight)):
            self._in_flight.append(self._start_round())
            if len(self._in_flight) == 1:
                begin_s += self._start_more()
        if not self._in_flight:
            return Round((), Timing()) if self._filling else None  # the prefill counts in the next round's time
        started = self._in_flight.popleft()
        drafting, verifying, verified, end = started.marks
        self._clock.wait(end)
        self._agreement.check(started.report.numbers)
        row_rounds = read(started, self._target.name)
        self._warn_of_broken_drafts(row_rounds)
        self._schedule.learn(row_rounds)
        self._leave_ended(started)
        self._move_down()
        is_idle = self._slots.num_used == 0 and not self._waiting
        if is_idle and self._in_flight:
            # A surplus round counts in the time of this call.
            self._clock.wait(self._in_flight[-1].marks[-1])
            self._in_flight.clear()
        prefill_s = sum(self._clock.seconds(*pair) for pair in started.prefills)
        draft_s, verify_s = self._clock.seconds(drafting, verifying), self._clock.seconds(verifying, verified)
        # The consumer's time between rounds is excluded, but not the device time that it overlapped.
        total_s = max(time.perf_counter() - begin_s, prefill_s + self._clock.seconds(drafting, end))
        timing = Timing(prefill_s, draft_s, verify_s, total_s)
        # Ignore unrepresentative times: after a prefill or a change of K, or when going idle.
        is_same_k, self._last_k = self._last_k == started.num_columns, started.num_columns
        if is_same_k and not (started.prefills or is_idle):
            self._schedule.learn_cost(len(started.rows), started.num_columns, timing.decode_s)
        return Round(tuple(row_rounds), timing)

    def _start_more(self) -> float:
        """Start the other rounds that the execution runs before the host reads the first one. They are surplus if rows
        end before their limit. They have the view of the first one, so that its length, and with it the rounding, does
        not depend on which rounds were read together.

        Returns:
            the seconds that they took
        """
        begin_s = time.perf_counter()
        is_calm = not (self._batch.has_constraints or self._filling or self._waiting)
        num = self._rounds_per_look // len(self._batch.running) if is_calm else 1
        while len(self._in_flight) < num and self._batch.num_kept and self._is_open(self._most_unread):
            self._in_flight.append(self._start_round())
        return time.perf_counter() - begin_s

    def _warn_of_broken_drafts(self, row_rounds: Sequence[RowRound]) -> None:
        """Log it once: it costs speed, and changes no output."""
        if not self._has_warned and any(row.has_broken_draft for row in row_rounds):
            self._has_warned = True
            _LOG.warning("the draft %s gave NaN or infinite logits: its drafts are cut there", self._drafter.name)

    def _is_open(self, num_unread: int) -> bool:
        """Whether an active row with this many unread tokens is below its limit, and so may need another round."""
        return any(not row.is_done and row.length + num_unread < row.limit for row in self._batch.running)

    @property
    def _most_unread(self) -> int:
        """The most tokens that unread rounds commit in a row."""
        return len(self._in_flight) * (self._schedule.max_k + 1)

    # Joining and leaving

    def _leave_cancelled(self) -> None:
        if not self._cancelled:  # a later one is seen in the next step
            return
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            self._waiting = deque(row for row in self._waiting if row.index not in cancelled)
        for row in [*self._filling, *self._batch.running]:
            if row.index in cancelled:
                self._leave(row)

    def _leave_ended(self, started: StartedRound) -> None:
        for row in started.rows:
            if row is not None and row.is_done and row.slot >= 0:
                self._leave(row)

    def _leave(self, row: Row) -> None:
        slot, row.slot, row.is_done = row.slot, -1, True
        # NaN would reach the next sequence in the slot. A cancelled prefill or unread rounds may have left some.
        row.is_spoilt |= row in self._filling
        if row.is_spoilt or self._in_flight:
            # The device may have more of the row: its last tokens as read end where it did.
            end = None if row.is_spoilt else row.longest(self._most_unread + self._schedule.max_k + 1)
            num_kept = 0 if row.is_spoilt else row.length - 1
            self._cache.erase(slot, num_kept, end)
            self._session.assign(slot, None, num_kept)
        self._batch.release(slot)
        with self._lock:
            if row in self._filling:
                self._filling.remove(row)
            self._slots.release(slot)
        self._schedule.row_ended(row.index)

    def _join(self) -> None:
        """Give free slots to the rows that have waited longest. One that shares the prompt of a row in prefill waits
        for that, and the others behind it."""
        while self._waiting and self._slots.num_free and not self._slots.waits(self._waiting[0], self._filling):
            if self._slots.num_used == 0:
                self._batch.reset_options()
            with self._lock:
                row = self._waiting.popleft()
                slot, moved_to, source, num_shared = self._slots.place(row)
                self._filling.append(row)
            if moved_to is not None:
                self._assign(moved_to, slot, self._slots.num_held(moved_to))
            self._assign(slot, source, num_shared)
            self._cache.shift(slot, 0 if row.request.media is None else row.request.media.offset)
            row.slot, row.num_cached, row.num_filled = slot, self._cache.num_spared(slot, num_shared), num_shared
            self._agreement.note((row.index, slot, row.token_ids, row.request.sampling))
            self._batch.admit(row)
            self._noise.invalidate()

    def _assign(self, slot: int, source: int, num_tokens: int) -> None:
        """Copy a prefix from one slot to another, in all caches."""
        self._cache.copy(source, slot, num_tokens)
        if slot != source:
            self._batch.lengths[slot] = num_tokens + 1  # sessions rely on a slot being as long as its cache
        self._session.assign(slot, source, num_tokens)

    def _move_down(self) -> None:
        """Move a row that alone keeps the batch wider than necessary to a lower free slot."""
        height, num_used, round_rows = self._slots.height, self._slots.num_used, self._target.execution.round_rows
        if self._waiting or height == num_used:
            self._num_high = 0
            return
        others = max((row.slot + 1 for row in self._rows_with_slots() if row.slot + 1 < height), default=0)
        if round_rows(max(others, num_used)) >= round_rows(height):
            self._num_high = 0
            return
        self._num_high += 1
        row = self._batch.rows[height - 1]
        if self._num_high <= _PATIENCE or row is None:
            return
        slot = self._slots.lowest_free()
        most_tokens = row.longest(self._most_unread)
        self._cache.copy(row.slot, slot, most_tokens)
        self._session.assign(slot, row.slot, most_tokens)
        self._slots.move(row.slot, slot)
        self._batch.move(row.slot, slot)
        self._noise.invalidate()
        self._num_high = 0

    def _rows_with_slots(self) -> list[Row]:
        return [*self._filling, *self._batch.running]

    # Prompts

    def _fill(self) -> None:
        """Let rows join. Prefill one chunk, and activate the rows whose prefill is complete; others may join with their
        prefix, before a round moves states beyond it."""
        num_left = self._prefill_chunk
        self._join()
        while self._filling and (num_left is None or num_left > 0):
            rows, width = next_forward(self._filling, self._target.device, chunk=self._prefill_chunk, num_left=num_left)
            self._feed(rows, width)
            if num_left is not None:
                num_left -= max(1, width * len(rows))
            for row in rows:
                if row.num_missing == 0:
                    self._batch.start(row)
                    with self._lock:
                        self._filling.remove(row)
            self._join()

    def _feed(self, rows: Sequence[Row], width: int) -> None:
        """Prefill the next tokens of rows in adjacent slots, at most ``width`` of each."""
        begin, end = rows[0].slot, rows[-1].slot + 1
        ids = self._batch.ids[begin:end]
        starts = [row.num_filled for row in rows]
        ends = [min(start + width, row.prompt_length - 1) for row, start in zip(rows, starts, strict=True)]
        mark = self._clock.mark()
        cache, wanted = self._cache.rows(begin, end), self._drafter.features
        media = rows[0].request.media
        if media is not None and rows[0].num_media:
            features = prefill_media(self._target, media, cache, wanted)
        else:
            features = self._target.prefill(
                ids,
                torch.tensor(starts, device=ids.device),
                torch.tensor(ends, device=ids.device),
                cache,
                latest=max(starts),
                num_columns=width,
                features=wanted,
            )
        lengths = [row.prompt_length for row in rows]
        self._session.prefill(Prefill(ids, begin, starts, ends, lengths, features))
        self._prefills.append((mark, self._clock.mark()))
        for row, filled in zip(rows, ends, strict=True):
            row.num_filled = filled

    # Rounds

    def _start_round(self) -> StartedRound:
        target, batch, execution = self._target, self._batch, self._target.execution
        num_rows = min(execution.round_rows(self._slots.height), len(batch.rows))
        head, chosen_k = batch.head(num_rows), self._schedule.next_k(batch.running, num_rows)
        view_length = execution.round_length if execution.fuses else None
        rows = batch.view(head, chosen_k, self._most_unread, view_length=view_length)
        k = execution.round_drafts(max(rows.most_wanted), head.most_k(chosen_k))
        noise = self._noise.at(head.seeds, rows.lengths, k)
        mark = drafting = self._clock.mark()
        if self._session.catch_up(rows):
            drafting = self._clock.mark()
            self._prefills.append((mark, drafting))
        with execution.turn():
            draft = self._session.propose(rows, k, self._rule, noise)
            draft = padded(draft, execution.round_drafts(draft.ids.shape[1], k))
            verifying = self._clock.mark()
            cache = self._cache.head(num_rows)
            view_len = target.view_len(rows.longest + draft.ids.shape[1], cache)
            static = self._rule, view_len, self._drafter.features
            if target.has_states:
                target.advance(cache, torch.where(rows.lengths < head.limits, rows.lengths - 1, 0))
            allowed = None if rows.masks is None else rows.masks.along(draft)
            options = rows.settings, rows.history, allowed
            arguments = (cache, rows.last_ids, rows.lengths, head.limits, draft, *options, noise)
            result = VerifyResult(*self._verify(static, *arguments, is_repeatable=rows.is_repeatable))
            verified = self._clock.mark()
            batch.commit(rows, result)
            self._session.observe(CommittedTokens(result.committed, result.places, result.lengths, result.features))
            # Prepared steps overwrite their results: copy what is read after the next round starts.
            report = report_of(head, draft, result, copy=self._lookahead > 0)
        prefills, self._prefills = self._prefills, []
        marks = drafting, verifying, verified, self._clock.mark()
        return StartedRound(head.rows, report, marks, prefills)
