"""Scores of recorded sequences by forcing, for drafters whose q is known in rounds of the target only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.base import Drafter, Rows, altered_drafter
from outrider.options import Sampling
from outrider.replay.bounds import agreement
from outrider.replay.log import Header, Record
from outrider.replay.renewal import Floats, Integers, log_ratios
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalise
from outrider.sampling.rules import GUMBEL, RULES
from outrider.scoring.alpha import overlap
from outrider.scoring.forcing import measure_drafts
from outrider.scoring.teacher_forcing import Text


@dataclass(frozen=True, slots=True)
class ForcedRecord:
    """Rounds of at most K drafted tokens along a record, beginning after each of its tokens.

    Attributes:
        logs: the argument of ``survival``. [n, K]
        num_drafted: [n]
        overlap: sum_v min(p, q) of each round's first drafted token, and min(1, q/p) of the record's token there.
            [at most n] each
    """

    logs: Floats
    num_drafted: Integers
    overlap: tuple[Floats, Floats]


def force_records(
    records: Sequence[Record],
    header: Header,
    target: LM,
    drafter: Drafter,
    acceptance: str,
    k: int,
    draft_sampling: Sampling | None = None,
) -> list[ForcedRecord]:
    """Score records in one batch. p is the target's own, so that the log need not hold it.

    Args:
        target: of the log.
        acceptance: one of ``outrider.replay.replay.PREDICTED_RULES``.
        draft_sampling: options of q, if they differ from those of p.
    """
    sampling = header.sampling.with_ends(header.eos_ids)
    if draft_sampling is not None and draft_sampling != header.sampling:
        drafter = _under(drafter, draft_sampling.with_ends(header.eos_ids), header.vocab_size)
    found = measure_drafts(
        target,
        drafter,
        [Text((*record.prompt_ids, *record.token_ids), len(record.prompt_ids)) for record in records],
        [replace(sampling, max_new_tokens=header.max_new_tokens(len(record.prompt_ids))) for record in records],
        k,
        _measure_all if acceptance == GUMBEL.name else _measure,
        num_values=4 if acceptance == GUMBEL.name else 3,
    )
    forced = []
    for one in found:
        p_x, q_x, overlaps = one.values[:3]
        ratios = log_ratios(q_x, p_x)
        with np.errstate(divide="ignore"):
            # A one-hot q is accepted where it equals the recorded token.
            is_ratio = acceptance in RULES and not drafter.is_one_hot
            logs = ratios if is_ratio else np.log(q_x)
            if is_ratio and acceptance == GUMBEL.name:
                logs = np.log(one.values[3])
        is_scored = ~np.isnan(q_x)
        first = is_scored[:, 0]
        estimate = np.exp(np.minimum(ratios[first, 0], 0.0))
        forced.append(ForcedRecord(np.where(is_scored, logs, -np.inf), one.num_drafted, (overlaps[first, 0], estimate)))
    return forced


def _under(drafter: Drafter, sampling: Sampling, vocab_size: int) -> Drafter:
    """A drafter whose q has its own options."""

    def show(rows: Rows) -> Rows:
        settings = Settings.of([sampling] * len(rows), vocab_size, rows.ids.device)
        return replace(rows, settings=settings)

    return altered_drafter(drafter, drafter.name, show=show)


def _measure(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """p and q of the tokens, and the overlap. [3, M]"""
    p_x, q_x = (normalise(rows).gather(1, ids[:, None])[:, 0] for rows in (p, q))
    return torch.stack((p_x, q_x, overlap(p, q)))


def _measure_all(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """These, and g. [4, M]"""
    return torch.cat((_measure(p, q, ids), agreement(normalise(p), normalise(q), ids)[None]))
