"""The second step of a round: feed the drafts to the target, and verify them.

Source: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import VerifyResult
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.history import History
from outrider.sampling.masks import Masked
from outrider.sampling.probs import Settings, probs_of
from outrider.sampling.rules import Rule


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Feed each row's last token and its drafted tokens, and verify them. A row at its limit stays unchanged; inactive
    slots have limit 0.

    A draft is cut before the first token for which the draft or the target has no distribution. That depends on the
    tokens before it alone, like any length of a draft, so the output distribution stays the target's. Only the position
    from which the next token is drawn can end a row, as in plain decoding."""

    rule: Rule
    view_len: int  # above every position that is fed
    features: tuple[int, ...]  # see ``Drafter``

    def __call__(
        self,
        lm: LM,
        *,
        cache: SlotCache,
        last_ids: Tensor,  # see ``Rows``. [B, 2]
        lengths: Tensor,
        limits: Tensor,
        draft: Draft,
        settings: Settings,
        history: History,
        allowed: Masked,  # see ``Masks.along``. [B, K+1, V]
        noise: Any,
    ) -> VerifyResult:
        offsets = torch.arange(draft.ids.shape[1] + 1, device=lengths.device)
        is_active = lengths < limits
        num_drafted = draft.num_drafted
        if draft.is_finite is not None:
            num_drafted = torch.minimum(num_drafted, _first(~draft.is_finite))
        is_fed = (offsets <= num_drafted[:, None]) & is_active[:, None]
        known = torch.cat((last_ids, draft.ids), dim=1)  # [B, K+2]
        ids = known[:, 1:]
        places = lengths[:, None] + offsets  # of the tokens after the fed ones
        positions = torch.where(is_fed, places - 1, -1)
        logits, features = lm.forward_with_features(
            ids, positions, cache, self.view_len, self.features, keeps_finite=True
        )
        probs, is_finite = probs_of(logits, settings, history.along(draft.ids), allowed)  # [B, K+1, V], [B, K+1]
        is_bad = is_fed & ~is_finite
        num_verified = torch.minimum(num_drafted, _first(is_bad))
        verdict = self.rule.verify(probs, replace(draft, num_drafted=num_verified), noise)
        num_accepted, next_ids = verdict.num_accepted, verdict.next_ids[:, None]
        if cache.has_states:
            cache.settle(lengths + num_accepted)
        committed = torch.where(offsets < num_accepted[:, None], torch.cat((draft.ids, next_ids), dim=1), next_ids)
        is_bad_end = is_bad.gather(1, num_accepted[:, None]).squeeze(1)
        numbers = num_accepted, num_verified, is_bad_end.long(), (is_active & (num_drafted < draft.num_drafted)).long()
        return VerifyResult(
            logits=logits,
            committed=committed,
            places=places,
            lengths=lengths + torch.where(is_active, num_accepted + 1, 0),
            last_ids=torch.cat((known.gather(1, num_accepted[:, None] + 1), next_ids), dim=1),
            report=torch.cat((committed, torch.stack(numbers, dim=1)), dim=1),
            drafted_probs=verdict.drafted_probs,
            features=features,
        )


def _first(is_hit: Tensor) -> Tensor:
    """First column that is True; the number of columns if none is. [B, K+1] -> [B]"""
    num_columns = is_hit.shape[1]
    return torch.where(is_hit, torch.arange(num_columns, device=is_hit.device), num_columns).amin(dim=1)
