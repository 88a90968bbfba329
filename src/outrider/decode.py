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

import torch
from torch import Tensor

from outrider.batch import Batch, Row
from outrider.cache import SlotCache
from outrider.drafters.base import Drafter
from outrider.errors import NumericsError
from outrider.flow import Draft, FinishReason, Origin, Request, Round, RowRound, Timing, TokenLogprob, Verdict
from outrider.lm import LM
from outrider.probs import is_finite, mark_seen, to_probs, wide
from outrider.verify import Rule


@torch.inference_mode()
def decode(
    target: LM, drafter: Drafter, requests: Sequence[Request], rule: Rule, *, num_draft_tokens: int
) -> Iterator[Round]:
    """Generate for all requests at once, a round at a time, until every row has ended.

    Args:
        requests: prompts of at least one token and less than the target's context; sampling options with a seed.
        num_draft_tokens: K, the most tokens drafted for a row in a round. A row drafts fewer near its end.

    Raises:
        NumericsError: a model gave NaN or infinite logits.
    """
    device = target.device
    clock = _Clock(device)
    batch = Batch(
        requests,
        vocab_size=target.vocab_size,
        context_len=target.context_len,
        device=device,
        k=num_draft_tokens,
    )
    cache = target.new_cache(batch.capacity)
    target.prefill(batch.ids, torch.zeros_like(batch.lengths), batch.lengths - 1, cache)
    session = drafter.open(batch)
    prefill_s = clock.lap()
    while batch.rows:
        # A round commits at most one token more than it drafts: never one too many.
        num_wanted = [min(num_draft_tokens, row.limit - row.length - 1) for row in batch.rows]
        noise = rule.make_noise(batch.seeds, batch.lengths, max(num_wanted), target.vocab_size)
        rest_s = clock.lap()
        draft = session.propose(batch, num_wanted, rule, noise)
        draft_s = clock.lap()
        logits = _verify_forward(target, batch, draft, cache)
        verify_s = clock.lap()
        seen = mark_seen(batch.seen, draft.ids) if batch.seen is not None else None
        target_probs = to_probs(logits, batch.settings, seen)  # [B, K+1, V]
        verdict = rule.verify(target_probs, draft, noise)
        committed = batch.commit(draft, verdict)
        _check_finite(batch, draft, logits, target.name, drafter.name)
        logprobs = _logprobs(batch, logits, committed)
        row_rounds = _close_rows(batch, draft, verdict, committed, logprobs)
        kept = [i for i, row_round in enumerate(row_rounds) if row_round.finish_reason is None]
        if len(kept) < len(batch):
            index = batch.keep(kept)
            cache.keep(index)
            session.keep(index)
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


def _verify_forward(target: LM, batch: Batch, draft: Draft, cache: SlotCache) -> Tensor:
    """Feed each row's last token and its drafted tokens. -> logits [B, K+1, V]"""
    k = draft.ids.shape[1]
    offsets = torch.arange(k + 1, device=batch.ids.device)
    last = batch.lengths[:, None] - 1
    ids = torch.cat((batch.ids.gather(1, last), draft.ids), dim=1)
    positions = torch.where(offsets <= draft.num_drafted[:, None], last + offsets, -1)
    view_len = min(batch.max_length + k, batch.capacity)
    return target.forward(ids, positions, cache, view_len)


def _check_finite(batch: Batch, draft: Draft, logits: Tensor, target_name: str, draft_name: str) -> None:
    """Raise NumericsError if a probability of this round came from logits that were not finite."""
    offsets = torch.arange(logits.shape[1], device=logits.device)
    checks = [(target_name, is_finite(logits) | (offsets > draft.num_drafted[:, None]))]
    if draft.is_finite is not None:
        checks.append((draft_name, draft.is_finite | (offsets[:-1] >= draft.num_drafted[:, None])))
    for name, is_good in checks:
        if not bool(is_good.all()):
            b, offset = (~is_good).nonzero()[0].tolist()
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
    batch: Batch, draft: Draft, verdict: Verdict, committed: Tensor, logprobs: list[list[TokenLogprob]] | None
) -> list[RowRound]:
    """Read the round back to the host, and let each row's stop act on it token by token."""
    tokens = committed.tolist()
    num_accepted, num_drafted = verdict.num_accepted.tolist(), draft.num_drafted.tolist()
    ratios = verdict.rejected_ratio.tolist()
    row_rounds = []
    for b, row in enumerate(batch.rows):
        n = num_accepted[b]
        is_rejected = n < num_drafted[b]
        token_ids, reason = _until_stop(row, tokens[b][: n + 1])
        row.length += len(token_ids)
        if reason is None and row.length == row.limit:
            reason = "length"
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
