"""Scores of recorded sequences by teacher forcing, for draft models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.replay.bounds import Bounds, bounds
from outrider.replay.log_format import Header, Record, TopProbs
from outrider.replay.renewal import Floats, log_ratios
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalised
from outrider.scoring.teacher_forcing import Text, force


@dataclass(frozen=True, slots=True)
class ScoredRecord:
    """Logarithms for each recorded token, -inf beyond the draft's context.

    Attributes:
        log_probs: log q. [n]
        log_ratios: log(q/p). [n]
        agreement: bounds of log g. [n], [n]
        overlap: see ``outrider.replay.replay.ReplayedRecord``; within the draft's context. [at most n] each
    """

    log_probs: Floats
    log_ratios: Floats
    agreement: tuple[Floats, Floats]
    overlap: tuple[Floats, Floats, Floats] | None


def score_records(records: Sequence[Record], header: Header, lm: LM, sampling: Sampling) -> list[ScoredRecord]:
    """Score the recorded sequences with a draft model under its options."""
    settings = Settings.of([sampling.with_ends(header.eos_ids)], header.vocab_size, lm.device)
    own_logs = [np.full(len(record.token_ids), -np.inf) for record in records]
    logs = [np.full_like(one, -np.inf) for one in own_logs]
    agreements = [(np.full_like(one, -np.inf), np.full_like(one, -np.inf)) for one in logs]
    overlaps: list[tuple[list[Floats], list[Floats]]] = [([], []) for _ in records]
    num_done = [0] * len(records)
    # The last token is not fed, so it may lie one beyond the draft's context, as in the loop.
    cut = [(*record.prompt_ids, *record.token_ids)[: lm.context_len + 1] for record in records]
    places = [row for row, record in enumerate(records) if len(cut[row]) > len(record.prompt_ids)]
    texts = [Text(cut[row], len(records[row].prompt_ids)) for row in places]
    chunks = force(lm, texts, [settings]) if texts else iter(())
    for chunk in chunks:
        q_rows = normalised(chunk.probs(settings))
        for at in sorted(set(chunk.rows.tolist())):
            row, is_here = places[at], chunk.rows == at
            q, ids = q_rows[is_here], chunk.ids[is_here]
            part = slice(num_done[row], num_done[row] + len(ids))
            num_done[row] = part.stop
            q_x = _numpy(q.gather(1, ids[:, None])[:, 0])
            with np.errstate(divide="ignore"):
                own_logs[row][part] = np.log(q_x)
            known = _known(records[row], header, part, ids)
            if known is not None:
                logs[row][part] = log_ratios(q_x, _numpy(known.token_probs))
                _keep(bounds(q, ids, known), agreements[row], overlaps[row], part)
    places_of = zip(own_logs, logs, agreements, overlaps, num_done, strict=True)
    has_p = header.sampling.temperature == 0 or header.num_probs is not None
    return [
        ScoredRecord(
            own_log,
            log,
            agreement,
            (_joined(low), _joined(high), np.exp(np.minimum(log[:num], 0.0))) if has_p else None,
        )
        for own_log, log, agreement, (low, high), num in places_of
    ]


def _keep(
    found: Bounds, agreement: tuple[Floats, Floats], overlap: tuple[list[Floats], list[Floats]], part: slice
) -> None:
    with np.errstate(divide="ignore"):
        for place in (0, 1):
            agreement[place][part] = np.log(_numpy(found.agreement[place]))
            overlap[place].append(_numpy(found.overlap[place]))


def _joined(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.zeros(0)


def _known(record: Record, header: Header, part: slice, ids: Tensor) -> TopProbs | None:
    """Recorded part of p, if any. At temperature 0 it is one-hot at the recorded token."""
    if header.sampling.temperature == 0:
        ones = torch.ones(len(ids), dtype=torch.float64, device=ids.device)
        return TopProbs(ones, ids[:, None], ones[:, None], torch.zeros_like(ones))
    return None if record.probs is None else record.probs.at(part, ids.device)


def _numpy(values: Tensor) -> Floats:
    array: Floats = values.to("cpu", torch.float64).numpy()
    return array
