"""Scores of recorded sequences by teacher forcing, for draft models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.window import window_start
from outrider.options import Sampling
from outrider.replay.bounds import Bounds, bounds
from outrider.replay.log import Header, Record, TopProbs
from outrider.replay.renewal import Floats, log_ratios
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalise
from outrider.scoring.teacher_forcing import ForcedTokens, Text, force


@dataclass(frozen=True, slots=True)
class ScoredRecord:
    """Logarithms for each recorded token.

    Attributes:
        log_probs: log q. [n]
        log_ratios: log(q/p). [n]
        agreement: bounds of log g. [n], [n]
        overlap: see ``outrider.replay.replay.ReplayedRecord``. [n] each
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
    for places, chunk in _forced(records, lm, settings):
        q_rows = normalise(chunk.probs(settings))
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


def _windows(record: Record, context_len: int) -> Iterator[Text]:
    """The parts of a sequence that a draft reads for its tokens: one, unless the sequence exceeds the draft's
    context."""
    ids, num_prompt = (*record.prompt_ids, *record.token_ids), len(record.prompt_ids)
    place = num_prompt
    while place < len(ids):
        start = window_start(place, context_len)
        end = min(len(ids), start + context_len + 1)  # the last token is not fed
        yield Text(ids[start:end], place - start, num_prompt, ids[:start])
        place = end


def _forced(records: Sequence[Record], lm: LM, settings: Settings) -> Iterator[tuple[list[int], ForcedTokens]]:
    """Force the windows of all sequences, the first ones first. Yields the records of a chunk's rows with it."""
    windows = [list(_windows(record, lm.context_len)) for record in records]
    for nth in range(max(map(len, windows), default=0)):
        places = [i for i, own in enumerate(windows) if len(own) > nth]
        for chunk in force(lm, [windows[i][nth] for i in places], [settings]):
            yield places, chunk


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
