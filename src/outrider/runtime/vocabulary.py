"""Logits of a model or head that does not know all tokens of the vocabulary."""

from __future__ import annotations

from torch import Tensor

UNKNOWN = -1e4
"""Logit of an unknown token: finite, so that there is a q where constraints allow no other tokens."""


def spread(logits: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits over the whole vocabulary, of D tokens with these ids, below V; None if they are the first ones. [..., D]
    -> [..., V]"""
    if token_ids is None:
        return logits[..., :vocab_size]
    results = logits.new_full((*logits.shape[:-1], vocab_size), UNKNOWN)
    return results.index_copy(-1, token_ids.to(logits.device), logits)
