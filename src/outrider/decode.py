"""The loop: draft, verify, commit.

Plain decoding is this loop with a drafter that proposes nothing, so that the baseline of every comparison runs the same
code as the thing compared. Ids go in, rounds come out; the loop knows no text, no files and no terminal.

Before each round the target's cache holds all committed tokens but the last. The verify forward feeds that one and the
K drafted tokens, which gives p at K+1 positions; the rule says how many drafted tokens stand and draws the one after
them. Places of rejected tokens are written over later (see cache.py).

Source: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from outrider.batch import Batch, Row
from outrider.cache import SlotCache
from outrider.drafters.base import Drafter
from outrider.errors import NumericsError
from outrider.flow import Draft, FinishReason, Origin, Request, Round, RowRound, Timing, TokenLogprob
from outrider.lm import LM
from outrider.noise import NoiseAhead
from outrider.probs import Settings, is_finite, mark_seen, to_probs, wide
from outrider.schedule import ConstantSchedule, Schedule
from outrider.verify import Rule


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
    clock = _Clock(device)
    batch = Batch(
        requests,
        vocab_size=target.vocab_size,
        context_len=target.context_len,
        device=device,
        k=schedule.max_k,
    )
    cache = target.new_cache(len(batch), batch.capacity)
    target.prefill(batch.ids, torch.zeros_like(batch.lengths), batch.lengths - 1, cache)
    session = drafter.open(batch)
    noise_ahead = NoiseAhead(rule.make_noise, schedule.max_k, target.vocab_size)
    prefill_s = clock.lap()
    while batch.rows:
        chosen_k = schedule.next_k(batch.rows)
        # A round commits at most one token more than it drafts: never one too many.
        num_wanted = [0 if row.is_done else min(chosen_k, row.limit - row.length - 1) for row in batch.rows]
        starts = [row.length for row in batch.rows]
        k = target.execution.round_drafts(max(num_wanted), chosen_k)
        noise = noise_ahead.at(batch.seeds, batch.lengths, starts, k)
        rest_s = clock.lap()
        draft = session.propose(batch, num_wanted, k, rule, noise)
        draft = draft.padded(target.execution.round_drafts(draft.ids.shape[1], k))
        draft_s = clock.lap()
        view_len = target.view_len(batch.max_length + draft.ids.shape[1], cache)
        arguments = (cache, batch.last_ids, batch.lengths, batch.is_open, draft, batch.settings, batch.seen, noise)
        judged = _Judged(*target.run(_verify_step, (rule, view_len), *arguments))
        verify_s = clock.lap()
        batch.commit(judged.committed, judged.places, judged.lengths)
        if not judged.is_fine:
            _raise_for_numbers(batch, draft, judged.is_good, target.name, drafter.name)
        row_rounds = _close_rows(batch, draft, judged, _logprobs(batch, judged.logits, judged.committed))
        schedule.learn(row_rounds)
        kept = batch.close(target.execution.round_rows)
        if kept is not None:
            cache = target.kept(cache, kept)
            session.keep(kept)
        rest_s += clock.lap()
        timing = Timing(prefill_s, draft_s, verify_s, prefill_s + draft_s + verify_s + rest_s)
        yield Round(tuple(row_rounds), timing)
        prefill_s = 0.0
        clock.lap()  # what the consumer does between rounds is not ours


class _Clock:
    """Laps of wall clock, with the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        now = time.perf_counter()
        lap_s, self._last = now - self._last, now
        return lap_s


class _Judged(NamedTuple):
    """What a verify step gives.

    Attributes:
        logits: [B, K+1, V]
        committed: the tokens that stand and the one after them, which fills the remaining columns. [B, K+1]
        num_accepted, rejected_ratio: see ``Verdict``. [B], [B]
        places: of the committed tokens in the text. [B, K+1]
        lengths: of the texts with them. [B]
        is_good: whether the logits at each position are finite. [B, K+1]
        is_fine: whether they are wherever they count, those of the draft too. []
    """

    logits: Tensor
    committed: Tensor
    num_accepted: Tensor
    rejected_ratio: Tensor
    places: Tensor
    lengths: Tensor
    is_good: Tensor
    is_fine: Tensor


def _verify_step(
    lm: LM,
    rule: Rule,
    view_len: int,
    cache: SlotCache,
    last_ids: Tensor,
    lengths: Tensor,
    is_open: Tensor,
    draft: Draft,
    settings: Settings,
    seen: Tensor | None,
    noise: Any,
) -> tuple[Tensor, ...]:
    """Feed each row's last token [B] and its drafted tokens, and judge them. Gives the parts of a ``_Judged``."""
    offsets = torch.arange(draft.ids.shape[1] + 1, device=lengths.device)
    is_fed = offsets <= draft.num_drafted[:, None]
    ids = torch.cat((last_ids[:, None], draft.ids), dim=1)
    places = lengths[:, None] + offsets  # of the tokens after those that are fed
    logits = lm.forward(ids, torch.where(is_fed, places - 1, -1), cache, view_len)
    probs = to_probs(logits, settings, None if seen is None else mark_seen(seen, draft.ids))  # [B, K+1, V]
    verdict = rule.verify(probs, draft, noise)
    padded = torch.cat((draft.ids, verdict.next_ids[:, None]), dim=1)
    num_accepted = verdict.num_accepted
    committed = torch.where(offsets < num_accepted[:, None], padded, verdict.next_ids[:, None])
    is_good = is_finite(logits)
    is_fine = (is_good | ~is_fed).all()
    if draft.is_finite is not None:
        is_fine = is_fine & (draft.is_finite | ~is_fed[:, 1:]).all()
    return (
        logits,
        committed,
        num_accepted,
        verdict.rejected_ratio,
        places,
        lengths + (num_accepted + 1) * is_open,
        is_good,
        is_fine,
    )


def _raise_for_numbers(batch: Batch, draft: Draft, is_good: Tensor, target_name: str, draft_name: str) -> NoReturn:
    """Say which model gave logits that are not finite, and where first."""
    offsets = torch.arange(is_good.shape[1], device=is_good.device)
    is_fed = offsets <= draft.num_drafted[:, None]
    name, is_fine = target_name, is_good | ~is_fed
    if is_fine.all():
        assert draft.is_finite is not None
        name, is_fine = draft_name, draft.is_finite | ~is_fed[:, 1:]
    b, offset = (~is_fine).nonzero()[0].tolist()
    row = batch.rows[b]
    raise NumericsError(
        f"the model {name} gave NaN or infinite logits for position {row.length + offset} of prompt "
        f"{row.index}; its weights may be damaged, or its dtype too narrow (try --dtype float32)"
    )


def _logprobs(batch: Batch, logits: Tensor, committed: Tensor) -> list[list[TokenLogprob]] | None:
    """The target's log-probability of each committed token, and of the most probable ones. [B][K+1]"""
    wanted = [row.request.sampling.logprobs for row in batch.rows]
    if all(num_top is None for num_top in wanted):
        return None
    logprobs = wide(logits).log_softmax(dim=-1)
    chosen = logprobs.gather(-1, committed[..., None]).squeeze(-1).tolist()
    num_top = min(max(n or 0 for n in wanted), logits.shape[-1])
    top = logprobs.topk(num_top, dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return [
        [
            TokenLogprob(chosen[b][i], tuple(zip(ids[b][i][:n], values[b][i][:n], strict=True)))
            for i in range(logits.shape[1])
        ]
        for b, n in enumerate(num or 0 for num in wanted)
    ]


def _close_rows(
    batch: Batch, draft: Draft, judged: _Judged, logprobs: list[list[TokenLogprob]] | None
) -> list[RowRound]:
    """Read the round back to the host, and let each row's stop act on it token by token."""
    tokens = judged.committed.tolist()
    accepted, num_drafted = judged.num_accepted.tolist(), draft.num_drafted.tolist()
    ratios = judged.rejected_ratio.tolist()
    row_rounds = []
    for b, row in enumerate(batch.rows):
        if row.is_done:
            continue
        n = accepted[b]
        is_rejected = n < num_drafted[b]
        token_ids, reason = _until_stop(row, tokens[b][: n + 1])
        row.length += len(token_ids)
        if reason is None and row.length == row.limit:
            reason = "length"
        row.is_done = reason is not None
        origins: list[Origin] = ["accepted"] * n
        origins.append("correction" if is_rejected else "bonus")
        row_logprobs = None
        if logprobs is not None and row.request.sampling.logprobs is not None:
            row_logprobs = tuple(logprobs[b][: len(token_ids)])
        row_rounds.append(
            RowRound(
                row=row.index,
                token_ids=tuple(token_ids),
                origins=tuple(origins[: len(token_ids)]),
                num_drafted=num_drafted[b],
                num_accepted=n,
                is_truncated=len(token_ids) < n + 1,
                finish_reason=reason,
                logprobs=row_logprobs,
                rejected_ratio=ratios[b] if is_rejected else None,
            )
        )
    return row_rounds


def _until_stop(row: Row, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the one that ends the row, if one does."""
    if row.request.stop is not None:
        for count, token_id in enumerate(token_ids, start=1):
            reason = row.request.stop.push(token_id)
            if reason is not None:
                return token_ids[:count], reason
    return token_ids, None
