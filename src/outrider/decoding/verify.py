"""The second step of a round: feed the drafts to the target, and judge them.

Source: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.history import History
from outrider.sampling.probs import Settings, is_finite, to_probs
from outrider.sampling.rules import Rule


class Judged(NamedTuple):
    """The results of a verify step.

    Attributes:
        logits: [B, K+1, V]
        committed: the accepted tokens and the one after them, which fills the remaining columns. [B, K+1]
        places: of the committed tokens in the text. [B, K+1]
        lengths: of the texts with them. [B]
        last_ids: the last two tokens of the texts with them. [B, 2]
        report: for the host: ``committed``; how many drafted tokens are accepted, and of how many; and at which of the
            K+1 places logits are not finite first, the target's and the draft's (K+1: nowhere). [B, K+5]
        drafted_probs: see ``Verdict``. [B, K, 2]
        features: of the tokens fed, if the drafter asks for them. [B, K+1, F]
    """

    logits: Tensor
    committed: Tensor
    places: Tensor
    lengths: Tensor
    last_ids: Tensor
    report: Tensor
    drafted_probs: Tensor
    features: Tensor | None = None


def verify_step(
    lm: LM,
    rule: Rule,
    view_len: int,
    features: tuple[int, ...],
    cache: SlotCache,
    last_ids: Tensor,
    lengths: Tensor,
    limits: Tensor,
    draft: Draft,
    settings: Settings,
    history: History,
    allowed: Tensor | None,
    noise: Any,
) -> tuple[Tensor, ...]:
    """Feed each row's last token and its drafted tokens, and judge them. A row at its limit stays as it is, and a slot
    that takes no part has limit 0.

    Args:
        last_ids: see ``Rows``. [B, 2]
        allowed: see ``Masks.along``; None without constraints. [B, K+1, V]

    Returns:
        The parts of a ``Judged``, the features only where some are asked for.
    """
    offsets = torch.arange(draft.ids.shape[1] + 1, device=lengths.device)
    goes_on = lengths < limits
    is_fed = (offsets <= draft.num_drafted[:, None]) & goes_on[:, None]
    known = torch.cat((last_ids, draft.ids), dim=1)  # [B, K+2]
    ids = known[:, 1:]
    places = lengths[:, None] + offsets  # of the tokens after those that are fed
    positions = torch.where(is_fed, places - 1, -1)
    logits, found = lm.forward_with_features(ids, positions, cache, view_len, features)
    probs = to_probs(logits, settings, history.along(draft.ids), allowed)  # [B, K+1, V]
    verdict = rule.verify(probs, draft, noise)
    if cache.has_states:
        cache.settle(lengths + verdict.num_accepted)
    num_accepted, next_ids = verdict.num_accepted, verdict.next_ids[:, None]
    committed = torch.where(offsets < num_accepted[:, None], torch.cat((draft.ids, next_ids), dim=1), next_ids)
    is_bad = is_fed & ~is_finite(logits)
    is_bad_draft = torch.zeros_like(is_fed)
    if draft.is_finite is not None:
        is_bad_draft[:, :-1] = is_fed[:, 1:] & ~draft.is_finite
    numbers = num_accepted, draft.num_drafted, _first(is_bad), _first(is_bad_draft)
    report = torch.cat((committed, torch.stack(numbers, dim=1)), dim=1)
    lengths = lengths + torch.where(goes_on, num_accepted + 1, 0)
    last_ids = torch.cat((known.gather(1, num_accepted[:, None] + 1), next_ids), dim=1)
    results = logits, committed, places, lengths, last_ids, report, verdict.drafted_probs
    return results if found is None else (*results, found)


def _first(is_hit: Tensor) -> Tensor:
    """The first column that is hit, their number where none is. [B, K+1] -> [B]"""
    num_columns = is_hit.shape[1]
    return torch.where(is_hit, torch.arange(num_columns, device=is_hit.device), num_columns).amin(dim=1)
