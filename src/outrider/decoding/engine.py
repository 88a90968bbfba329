"""The loop: draft, verify, commit. Rows join and leave between rounds.

Plain decoding is this loop with a drafter that proposes nothing, so that the baseline of every comparison runs the same
code as the thing compared. Token ids go in, rounds come out; the loop knows no text, files or terminal.

Tokens and lengths stay on the device from round to round. The host reads them to stream and to stop. With an execution
that looks ahead, the next round has been started by then; its results for rows that have ended are discarded.

Who joins is decided by the scheduler (scheduler.py); what runs on the models is in runner.py.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from outrider.decoding.batch import Batch, Row, final_length, final_room
from outrider.decoding.fair_queue import FairQueue
from outrider.decoding.readback import StartedRound, failed, read_round
from outrider.decoding.runner import PREFILL_CHUNK, Runner, next_forward
from outrider.decoding.schedule import ConstantSchedule, RoundOutcome, RowCounts, Schedule
from outrider.decoding.scheduler import Load, Scheduler, Slots
from outrider.drafters.base import Drafter
from outrider.errors import DeviceError
from outrider.records import Request, Round, RowRound, Timing
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule

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
        DeviceError: a step lacks memory.
    """
    if not requests:
        return
    schedule = ConstantSchedule(num_draft_tokens) if isinstance(num_draft_tokens, int) else num_draft_tokens
    num_slots = min(num_slots or len(requests), len(requests))
    capacity = max(final_room(target, request, schedule.max_k) for request in requests)
    engine = Engine(
        target, drafter, rule, num_slots=num_slots, capacity=capacity, schedule=schedule, prefill_chunk=None
    )
    for request in requests:
        engine.submit(request)
    while (round_ := engine.step()) is not None:
        for row in round_.rows:
            if row.error is not None:
                raise type(row.error)(f"prompt {row.row}: {row.error}") if len(requests) > 1 else row.error
        yield round_


class Engine:
    """The loop over S slots. Any thread may submit, cancel, and ask for ``load`` and ``waiting``; one thread steps."""

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
        queue: FairQueue[Row] | None = None,
    ) -> None:
        """
        Args:
            num_slots: S, concurrent rows.
            capacity: most tokens in a row, prompt included, and those that its last round may commit beyond its end.
            schedule: chooses K for each round.
            prefill_chunk: about the number of prompt tokens fed in a step, which bounds how long a joining prompt
                delays other rows, and other engines; None for no limit.
            queue: decides which request gets the next slot; None: the clients in turn.
        """
        self.schedule = schedule
        self._target, self._drafter = target, drafter
        self._capacity = capacity = min(capacity, target.context_len)
        self._prefill_chunk = prefill_chunk
        sizes = num_slots, capacity, schedule.max_k
        self._runner = Runner(target, drafter, rule, *sizes)
        self._batch = Batch(*sizes, target.vocab_size, target.device, self._runner.candidates)
        self._lookahead = 0 if self._runner.reads_rounds else target.execution.lookahead
        cache = self._runner.cache
        self._scheduler = Scheduler(Slots(num_slots, cache.take_over, shares_parts=not cache.has_anchors), queue)
        self._slots = self._scheduler.slots
        self._in_flight: deque[StartedRound] = deque()
        self._last_k = -1
        self._has_warned = False
        self._num_high = 0  # consecutive rounds in which a single row kept the batch wider than necessary
        self._inference_mode = torch.inference_mode()  # made once: as a decorator it would be made for every round

    def submit(self, request: Request, client: str = "", priority: int = 0) -> int:
        """Queue a request, and return its index, as in ``RowRound.row``. For client and priority see ``FairQueue``."""
        assert 0 < len(request.prompt_ids) < self._capacity, "a prompt has a token, and leaves room for one"
        assert (request.num_draft_tokens or 0) <= self.schedule.max_k
        limit = min(final_length(self._target, request), self._capacity)
        room = min(final_room(self._target, request, self.schedule.max_k), self._capacity)
        return self._scheduler.submit(request, limit, room, client, priority)

    def share(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Let clients share these beginnings of prompts; all else is shared among requests of one client."""
        self._slots.common = prefixes

    def cancel(self, index: int) -> None:
        """Cancel a request. It leaves before the next round, and is in no round from then on."""
        self._scheduler.cancel(index)

    @property
    def load(self) -> Load:
        return self._scheduler.load

    @property
    def waiting(self) -> list[int]:
        return self._scheduler.waiting

    def step(self) -> Round | None:
        """Let rows leave and join, feed a chunk of prompts, and run one round. Returns the round, without rows whose
        prefill is incomplete, and so perhaps without rows; None when all requests have ended."""
        with self._inference_mode:
            return self._step()

    def _step(self) -> Round | None:
        clock = self._runner.clock
        if self._slots.num_used == 0:
            clock.wait(clock.mark())  # for work left by an earlier loop
        begin_s = time.perf_counter()
        self._leave_cancelled()
        lost = self._fill()
        # The rounds ahead of the one that is read. Each unread round commits a token or more.
        lookahead = 0 if self._batch.has_constraints else self._lookahead
        while len(self._in_flight) <= lookahead and self._is_open(len(self._in_flight)):
            try:
                self._in_flight.append(self._start_round())
            except DeviceError as error:
                lost.append(self._fail(self._batch.running, error))
        if not self._in_flight:
            # The prefill counts in the next round.
            return Round(tuple(lost), Timing()) if lost or self._scheduler.filling else None
        done = self._in_flight.popleft()
        clock.wait(done.marks[-1])
        # All rounds before it were read: the lengths are those with which it began.
        most_drafted = [row.most_drafted(done.k) for row in done.rows if row is not None and not row.is_done]
        row_rounds = read_round(done, self._target.name)
        if not self._has_warned and any(row.has_broken_draft for row in row_rounds):  # it costs speed alone
            self._has_warned = True
            _LOG.warning("the draft %s gave NaN or infinite logits: its drafts are cut there", self._drafter.name)
        for row in done.rows:
            if row is not None and row.is_done and row.slot >= 0:
                self._leave(row)
        self._move_down()
        is_idle = self._scheduler.is_idle
        if is_idle and self._in_flight:
            # A surplus round counts in the time of this call.
            clock.wait(self._in_flight[-1].marks[-1])
            self._in_flight.clear()
        timing = self._timing(done, begin_s)
        pairs = zip(most_drafted, row_rounds, strict=True)
        counts = [RowCounts(num, row.num_drafted, row.num_accepted) for num, row in pairs]
        # Unrepresentative times: after a prefill or a change of K, or when going idle.
        is_usual = self._last_k == done.k and not (done.prefills or is_idle)
        self._last_k, seconds = done.k, timing.decode_s if is_usual else None
        longest = max((row.length for row in done.rows if row is not None), default=0)
        self.schedule.learn(RoundOutcome(done.k, len(done.rows), done.num_columns, counts, seconds, longest))
        return Round((*lost, *row_rounds), timing)

    # Rounds

    def _start_round(self) -> StartedRound:
        batch = self._batch
        num_rows = min(self._target.execution.round_rows(self._slots.height), len(batch.rows))
        chosen_k = self.schedule.next_k(batch.running, num_rows)
        return self._runner.start(batch, batch.view(num_rows, chosen_k, self._most_unread), chosen_k)

    def _is_open(self, num_unread: int) -> bool:
        """Whether an active row with this many unread tokens is below its limit, and so may need another round."""
        return any(not row.is_done and row.length + num_unread < row.limit for row in self._batch.running)

    @property
    def _most_unread(self) -> int:
        """The most tokens that unread rounds commit in a row."""
        return len(self._in_flight) * (self.schedule.max_k + 1)

    def _timing(self, done: StartedRound, begin_s: float) -> Timing:
        """Timing of a round for which the host began to wait at ``begin_s``."""
        drafting, verifying, verified, end = done.marks
        seconds = self._runner.clock.seconds
        prefill_s = sum(seconds(*pair) for pair in done.prefills)
        # The consumer's time between rounds is excluded, but not the device time that it overlapped.
        total_s = max(time.perf_counter() - begin_s, prefill_s + seconds(drafting, end))
        return Timing(prefill_s, seconds(drafting, verifying), seconds(verifying, verified), total_s)

    # Joining and leaving

    def _leave_cancelled(self) -> None:
        cancelled = self._scheduler.take_cancelled()
        for row in self._rows_with_slots() if cancelled else ():
            if row.index in cancelled:
                self._leave(row)

    def _fail(self, rows: Sequence[Row], error: DeviceError) -> RowRound:
        """End the longest row of a step that lacks memory; the others are tried again."""
        row = max(rows, key=lambda row: row.num_missing or row.length)
        row.is_spoilt = True
        self._leave(row)
        return failed(row, error)

    def _leave(self, row: Row) -> None:
        # NaN would reach the next sequence in the slot. A cancelled prefill or unread rounds may have left some.
        num_kept = row.length - 1
        if row in self._scheduler.filling:  # what was read stays for a prompt that begins alike
            num_kept = row.num_filled
            row.is_spoilt = row.is_spoilt or not self._runner.cache.is_finite(row.slot, num_kept)
        if row.is_spoilt or self._in_flight:
            # The device may have more of the row: its last tokens as read end where it did.
            end = None if row.is_spoilt else row.longest(self._most_unread + self.schedule.max_k + 1)
            self._runner.erase(row.slot, 0 if row.is_spoilt else num_kept, end)
        self._batch.release(row.slot)
        self._scheduler.release(row)

    def _join(self) -> None:
        while True:
            if self._slots.num_used == 0 and self._scheduler.has_waiting:
                self._batch.reset_options()
            if (paused := self._scheduler.row_to_pause()) is not None:
                self._leave(paused)
            admitted = self._scheduler.admit()
            if paused is not None:
                self._scheduler.resume(paused)
            if admitted is None:
                return
            row, (slot, moved_to, source, num_shared) = admitted
            if moved_to is not None:
                self._assign(moved_to, slot, self._slots.num_held(moved_to))
            self._assign(slot, source, num_shared)
            cache = self._runner.cache
            cache.shift(slot, 0 if row.request.media is None else row.request.media.offset)
            row.num_cached, row.num_filled = cache.num_spared(slot, num_shared), num_shared
            self._batch.admit(row)

    def _assign(self, slot: int, source: int, num_tokens: int) -> None:
        if slot != source:  # sessions rely on a slot having the tokens of its cache, and one more
            self._batch.ids[slot, :num_tokens] = self._batch.ids[source, :num_tokens]
            self._batch.lengths[slot] = num_tokens + 1
        self._runner.assign(slot, source, num_tokens)

    def _move_down(self) -> None:
        height, num_used, round_rows = self._slots.height, self._slots.num_used, self._target.execution.round_rows
        others = max((row.slot + 1 for row in self._rows_with_slots() if row.slot + 1 < height), default=0)
        is_high = height > num_used and round_rows(max(others, num_used)) < round_rows(height)
        self._num_high = self._num_high + 1 if is_high and not self._scheduler.has_waiting else 0
        if self._num_high <= _PATIENCE or (row := self._batch.rows[height - 1]) is None:
            return
        slot = self._slots.lowest_free()
        self._runner.assign(slot, row.slot, row.longest(self._most_unread))
        self._slots.move(row.slot, slot)
        self._batch.move(row.slot, slot)
        self._num_high = 0

    def _rows_with_slots(self) -> list[Row]:
        return [*self._scheduler.filling, *self._batch.running]

    # Prompts

    def _fill(self) -> list[RowRound]:
        """Let rows join. Prefill one chunk, and activate the rows whose prefill is complete; others may join with their
        prefix, before a round moves states beyond it. Returns the last rounds of rows that lack memory."""
        num_left, filling = self._prefill_chunk, self._scheduler.filling
        lost: list[RowRound] = []
        self._join()
        while filling and (num_left is None or num_left > 0):
            rows, width = next_forward(filling, self._target.device, chunk=self._prefill_chunk, num_left=num_left)
            try:
                self._runner.feed(rows, width, self._batch.ids)
            except DeviceError as error:
                lost.append(self._fail(rows, error))
                rows = []
            if num_left is not None:
                num_left -= max(1, width * len(rows))
            for row in rows:
                if row.num_missing == 0:
                    self._batch.start(row)
                    self._scheduler.end_prefill(row)
            self._join()
        return lost
