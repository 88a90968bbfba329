"""The loop: draft, verify, commit.

Plain decoding is this loop with a drafter that proposes nothing, so that the baseline of every comparison runs the same
code as the thing compared. Ids go in, rounds come out; the loop knows no text, no files and no terminal.

Before each round the target's cache holds all committed tokens but the last. The verify forward feeds that one and the
K drafted tokens, which gives p at K+1 positions; the rule says how many drafted tokens stand and draws the one after
them. Places of rejected tokens are written over later (see cache.py).

Tokens and lengths stay on the device from round to round. The host reads them to stream and to stop. With an execution
that looks ahead the next round has been started by then: that of a row which ended is not looked at.

Source: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.batch import Batch
from outrider.decoding.host import Started, logprobs_of, read, to_host
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.drafters.base import Drafter, padded
from outrider.records import Draft, Request, Round, Timing
from outrider.runtime.cache import SlotCache
from outrider.runtime.clock import Clock
from outrider.runtime.lm import LM
from outrider.sampling.noise import NoiseAhead
from outrider.sampling.probs import Settings, is_finite, mark_seen, to_probs
from outrider.sampling.rules import Rule


@torch.inference_mode()
def decode(
    target: LM, drafter: Drafter, requests: Sequence[Request], rule: Rule, *, num_draft_tokens: int | Schedule
) -> Iterator[Round]:
    """Generate for all requests at once, a round at a time, until every row has ended.

    Args:
        requests: prompts of at least one token and less than the target's context; sampling options with a seed.
        num_draft_tokens: K, the most tokens drafted for a row in a round, or what chooses it. A row drafts fewer near
            its end.

    Raises:
        NumericsError: a model gave NaN or infinite logits.
    """
    schedule = ConstantSchedule(num_draft_tokens) if isinstance(num_draft_tokens, int) else num_draft_tokens
    device = target.device
    clock = Clock(device)
    begin = clock.mark()
    clock.wait(begin)  # for what a loop before this one may have left
    begin_s = time.perf_counter()
    batch = Batch(
        requests,
        vocab_size=target.vocab_size,
        context_len=target.context_len,
        device=device,
        k=schedule.max_k,
    )
    cache = target.new_cache(len(batch), batch.capacity)
    starts, num_columns = torch.zeros_like(batch.lengths), batch.longest - 1
    target.prefill(batch.ids, starts, batch.lengths - 1, cache, latest=0, num_columns=num_columns)
    session = drafter.open(batch)
    noise_ahead = NoiseAhead(rule.make_noise, schedule.max_k, target.vocab_size)
    prefilled: tuple[Any, Any] | None = begin, clock.mark()
    under_way: deque[Started] = deque()
    while batch.rows:
        while batch.goes_on and len(under_way) <= target.execution.lookahead:
            chosen_k = schedule.next_k(batch.rows)
            k = target.execution.round_drafts(batch.most_drafted(chosen_k), chosen_k)
            noise = noise_ahead.at(batch.seeds, batch.lengths, *batch.bounds(), k)
            marks = [clock.mark()]
            draft = session.propose(batch, k, rule, noise)
            draft = padded(draft, target.execution.round_drafts(draft.ids.shape[1], k))
            marks.append(clock.mark())
            view_len = target.view_len(batch.longest + draft.ids.shape[1], cache)
            arguments = (cache, batch.last_ids, batch.lengths, batch.limits, draft, batch.settings, batch.seen, noise)
            judged = _Judged(*target.run(_verify_step, (rule, view_len), *arguments))
            marks.append(clock.mark())
            logprobs = logprobs_of(batch.rows, judged.logits, judged.committed)
            batch.commit(judged.committed, judged.places, judged.lengths)
            # Prepared steps write over their results, so that what is not read before the next round must be copied.
            is_ahead = target.execution.lookahead > 0
            report, ratios = (to_host(one, copy=is_ahead) for one in (judged.report, judged.rejected_ratio))
            under_way.append(Started(batch.rows, report, ratios, logprobs, (*marks, clock.mark())))
        started = under_way.popleft()
        drafting, verifying, verified, end = started.marks
        clock.wait(end)
        row_rounds = read(started, target.name, drafter.name)
        schedule.learn(row_rounds)
        kept = batch.close(target.execution.round_rows)
        if kept is not None:
            cache = target.kept(cache, kept)
            session.keep(kept)
        if under_way and not batch.rows:
            clock.wait(under_way[-1].marks[-1])  # a round too many is the time of those who started it
        prefill_s = clock.seconds(*prefilled) if prefilled else 0.0
        draft_s, verify_s = clock.seconds(drafting, verifying), clock.seconds(verifying, verified)
        # What the consumer does between rounds is not ours; that a device worked on meanwhile does not make it faster.
        total_s = max(time.perf_counter() - begin_s, prefill_s + clock.seconds(drafting, end))
        yield Round(tuple(row_rounds), Timing(prefill_s, draft_s, verify_s, total_s))
        begin_s, prefilled = time.perf_counter(), None


class _Judged(NamedTuple):
    """What a verify step gives.

    Attributes:
        logits: [B, K+1, V]
        committed: the tokens that stand and the one after them, which fills the remaining columns. [B, K+1]
        places: of the committed tokens in the text. [B, K+1]
        lengths: of the texts with them. [B]
        report: what the host is to know: ``committed``; how many drafted tokens stand, and of how many; and at which of
            the K+1 places logits are not finite first, the target's and the draft's (K+1: nowhere). [B, K+5]
        rejected_ratio: see ``Verdict``. [B]
    """

    logits: Tensor
    committed: Tensor
    places: Tensor
    lengths: Tensor
    report: Tensor
    rejected_ratio: Tensor


def _verify_step(
    lm: LM,
    rule: Rule,
    view_len: int,
    cache: SlotCache,
    last_ids: Tensor,
    lengths: Tensor,
    limits: Tensor,
    draft: Draft,
    settings: Settings,
    seen: Tensor | None,
    noise: Any,
) -> tuple[Tensor, ...]:
    """Feed each row's last token [B] and its drafted tokens, and judge them. A row at its limit stays as it is.

    Returns:
        The parts of a ``_Judged``.
    """
    offsets = torch.arange(draft.ids.shape[1] + 1, device=lengths.device)
    is_fed = offsets <= draft.num_drafted[:, None]
    ids = torch.cat((last_ids[:, None], draft.ids), dim=1)
    places = lengths[:, None] + offsets  # of the tokens after those that are fed
    logits = lm.forward(ids, torch.where(is_fed, places - 1, -1), cache, view_len)
    probs = to_probs(logits, settings, None if seen is None else mark_seen(seen, draft.ids))  # [B, K+1, V]
    verdict = rule.verify(probs, draft, noise)
    num_accepted, next_ids = verdict.num_accepted, verdict.next_ids[:, None]
    committed = torch.where(offsets < num_accepted[:, None], torch.cat((draft.ids, next_ids), dim=1), next_ids)
    is_bad = is_fed & ~is_finite(logits)
    is_bad_draft = torch.zeros_like(is_fed)
    if draft.is_finite is not None:
        is_bad_draft[:, :-1] = is_fed[:, 1:] & ~draft.is_finite
    numbers = num_accepted, draft.num_drafted, _first(is_bad), _first(is_bad_draft)
    report = torch.cat((committed, torch.stack(numbers, dim=1)), dim=1)
    lengths = lengths + torch.where(lengths < limits, num_accepted + 1, 0)
    return logits, committed, places, lengths, report, verdict.rejected_ratio


def _first(is_hit: Tensor) -> Tensor:
    """The first column that is hit, their number where none is. [B, K+1] -> [B]"""
    num_columns = is_hit.shape[1]
    return torch.where(is_hit, torch.arange(num_columns, device=is_hit.device), num_columns).amin(dim=1)
