"""All tokens of a draft in one forward: PARD.

An ordinary causal model was trained to fill in mask tokens: after the committed tokens it is fed K-1 of them, and the
logits at the last K positions are those of the K drafted tokens. So the logits at an offset do not depend on the tokens
drafted before it. The mask tokens' entries in the cache lie beyond the sequence and are never counted as cached.

Source: An et al. 2504.18583.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.drawing import draw_all, end_before, is_unsure
from outrider.errors import UnsupportedModel
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.sampling.history import History
from outrider.sampling.probs import Settings
from outrider.sampling.rules import Rule

FAVOURED_K = (7, 15)  # a large K costs little; K + 1 tokens are verified, and kernels work in eights

_KEYS = ("pard_token", "ptd_token_id")


def mask_token_of(name: str, model: Any) -> int | None:
    """The mask token of a model that drafts all tokens in one forward, by its configuration; None for other models.

    Raises:
        UnsupportedModel: it has no embedding for that token.
    """
    key = next((key for key in _KEYS if getattr(model.config, key, None) is not None), None)
    if key is None:
        return None
    mask_id, num_rows = int(getattr(model.config, key)), len(model.get_input_embeddings().weight)
    if not 0 <= mask_id < num_rows:
        raise UnsupportedModel(f"{name} states {key} = {mask_id}, but has embeddings for {num_rows} tokens")
    return mask_id


def parallel_logits(
    lm: LM,
    view_len: int,
    k: int,
    mask_id: int,
    cache: SlotCache,
    fed: Tensor,
    cached: Tensor,
    lengths: Tensor,
    num_drafted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Feed the committed tokens that the cache lacks, and K-1 mask tokens. Arguments: see ``draft_steps``.

    Returns:
        logits [B, K, V], and the number of cached tokens [B]
    """
    offsets = torch.arange(1 - fed.shape[1], k, device=lengths.device)  # from the last committed token on
    ids = torch.cat((fed, fed.new_full((len(fed), k - 1), mask_id)), dim=1)
    positions = lengths[:, None] - 1 + offsets
    cached = torch.minimum(cached, lengths - 1)
    is_fed = (positions >= cached[:, None]) & (offsets < num_drafted[:, None])
    positions = torch.where(is_fed, positions, -1)
    logits = lm.forward(ids, positions, cache, view_len, num_logits=k, keeps_finite=True)
    return logits, torch.where(num_drafted > 0, lengths, cached)


def draft_at_once(
    lm: LM,
    rule: Rule,
    options: DraftOptions,
    view_len: int,
    k: int,
    mask_id: int,
    cache: SlotCache,
    fed: Tensor,
    cached: Tensor,
    lengths: Tensor,
    num_drafted: Tensor,
    settings: Settings,
    history: History,
    noise: Any,
) -> tuple[Tensor, ...]:
    """Draft K tokens in one forward. Arguments and results: see ``draft_steps``."""
    if options.is_greedy:
        settings = settings.greedy()
    logits, cached = parallel_logits(lm, view_len, k, mask_id, cache, fed, cached, lengths, num_drafted)
    if options.min_prob > 0:
        for i, is_cut in enumerate(is_unsure(logits, options.min_prob).unbind(dim=1)):
            num_drafted = end_before(num_drafted, i, is_cut)
    ids, probs, finite = draw_all(rule, logits, settings, history, noise, is_greedy=options.is_greedy)
    results = ids, finite, cached, num_drafted
    return results if options.is_greedy else (*results, probs)
