"""Readback: the host's part of a round.

The results of a started round are copied to the host. Once there, the host reads tokens, counts and log-probabilities,
and applies stop conditions. The loop may have started the next round by then (see engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from outrider.decoding.batch import Row, SlotRows
from outrider.drafters.base import VerifyResult
from outrider.errors import NumericsError, OutriderError
from outrider.records import Draft, DraftedToken, FinishReason, Origin, RowRound, TokenLogprob
from outrider.sampling.probs import wide


class StartedRound(NamedTuple):
    """A round that the device may still be computing. Its tensors are on the host, and filled by the last mark."""

    k: int  # the number of drafted tokens that the schedule chose
    rows: Sequence[Row | None]  # the active row of each slot at the start; the slot may get another before the reading
    marks: tuple[Any, Any, Any, Any]  # when drafting began, verifying began and ended, all results were on the host
    prefills: Sequence[tuple[Any, Any]]  # the beginning and end of each chunk of prefill since the round before
    report: Tensor  # ``VerifyResult.report``. [B, K+5]
    drafted_probs: Tensor  # see ``Verdict``. [B, K, 2]
    drafted_ids: Tensor | None  # if a row asks for them. [B, K]
    logprobs: Logprobs | None  # if a row asks for them
    logits: Tensor | None  # if a row asks for them. [B, K+1, V]

    @property
    def num_columns(self) -> int:
        """K of the verify, padding included."""
        return self.report.shape[1] - 5


def copies_for_host(rows: SlotRows, draft: Draft, result: VerifyResult, *, copy: bool) -> dict[str, Any]:
    """Start copying the results of a round to the host, with ``copy`` also those that are there already: the fields of
    a ``StartedRound`` from ``report`` on."""
    logprobs = None
    if rows.num_logprobs is not None:
        raw = wide(result.logits).log_softmax(dim=-1)
        chosen = raw.gather(-1, result.committed[..., None]).squeeze(-1)
        top = raw.topk(min(rows.num_logprobs, raw.shape[-1]), dim=-1)
        logprobs = Logprobs(*map(_to_host, (chosen, top.values, top.indices)))
    return {
        "report": _to_host(result.report, copy=copy),
        "drafted_probs": _to_host(result.drafted_probs, copy=copy),
        "drafted_ids": _to_host(draft.ids, copy=copy) if rows.reports_drafts else None,
        "logprobs": logprobs,
        "logits": _to_host(result.logits, copy=copy) if rows.reports_logits else None,
    }


def _to_host(tensor: Tensor, *, copy: bool = False) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone() if copy else tensor
    return tensor.to("cpu", non_blocking=tensor.is_cuda)


class Logprobs(NamedTuple):
    """The target's log-probabilities of the committed tokens [B, K+1], and the most probable ones [B, K+1, N]."""

    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def of(self, b: int, num_tokens: int, num_top: int) -> tuple[TokenLogprob, ...]:
        rows = zip(*(values[b, :num_tokens].tolist() for values in self), strict=True)
        return tuple(TokenLogprob(one, tuple(zip(ids[:num_top], top[:num_top], strict=True))) for one, top, ids in rows)


def read_round(started: StartedRound, target_name: str) -> list[RowRound]:
    """Read a finished round and apply stop conditions token by token. Rows that ended before are skipped."""
    row_rounds = []
    for b, (row, numbers) in enumerate(zip(started.rows, started.report.tolist(), strict=True)):
        if row is None or row.is_done:
            continue
        *tokens, n, num_drafted, is_bad, is_bad_draft = numbers
        is_first = row.length == row.prompt_length
        num_cached, queued_s = (row.num_cached, row.queued_s) if is_first else (0, 0.0)
        token_ids, reason = _until_stop(row, tokens[:n] if is_bad else tokens[: n + 1])
        constraint, error = row.request.constraint, None
        if constraint is not None and not all(map(constraint.push, token_ids)):
            error = constraint.error or "every token that the constraint allows has a logit of minus infinity"
        if is_bad and reason is None:
            row.is_spoilt = True
            error = error or _no_distribution(row, target_name, row.length + n)
        if error is not None:
            row.is_done = True
            row_rounds.append(failed(row, NumericsError(error), num_cached))
            continue
        row.token_ids += token_ids
        row.is_done = reason is not None
        origins: list[Origin] = ["accepted"] * n
        origins.append("correction" if n < num_drafted else "bonus")
        logprobs = drafted = None
        if started.logprobs is not None and (num_top := row.request.sampling.logprobs) is not None:
            logprobs = started.logprobs.of(b, len(token_ids), num_top)
        if started.drafted_ids is not None and row.request.reports_drafts:
            probs = started.drafted_probs[b].tolist()
            pairs = zip(started.drafted_ids[b, :num_drafted].tolist(), probs, strict=False)
            drafted = tuple(DraftedToken(token_id, *p_and_q) for token_id, p_and_q in pairs)
        row_rounds.append(
            RowRound(
                row=row.index,
                token_ids=tuple(token_ids),
                origins=tuple(origins[: len(token_ids)]),
                num_drafted=num_drafted,
                num_accepted=n,
                is_truncated=len(token_ids) < n + 1,
                finish_reason=reason,
                logprobs=logprobs,
                num_cached_tokens=num_cached,
                queued_s=queued_s,
                drafted=drafted,
                slot=b,
                has_broken_draft=bool(is_bad_draft),
                logits=started.logits[b, : len(token_ids)]
                if started.logits is not None and row.request.reports_logits
                else None,
            )
        )
    return row_rounds


def _no_distribution(row: Row, target_name: str, position: int) -> str:
    """Reason why the place at which a row draws has no distribution. (The report does not tell logits from options.)"""
    sampling, message = row.request.sampling, str(NumericsError.at(target_name, position))
    if row.request.constraint is None and not (sampling.logit_bias or sampling.min_tokens):
        return message
    return f"every token that the options allow at position {position} has a logit of minus infinity, or {message}"


def failed(row: Row, error: OutriderError, num_cached: int = 0) -> RowRound:
    """The last round of a row that ends with an error."""
    return RowRound(row.index, (), (), 0, 0, False, "error", None, num_cached, error)


def _until_stop(row: Row, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    token_ids = token_ids[: row.limit - row.length]
    if row.request.stop is not None:
        for count, token_id in enumerate(token_ids, start=1):
            reason = row.request.stop.push(token_id)
            if reason is not None:
                return token_ids[:count], reason
    return token_ids, "length" if row.length + len(token_ids) == row.limit else None
