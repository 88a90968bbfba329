"""Effects of rounding: how far logits move, and which tokens cross the edge of a filter."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.sampling.history import History
from outrider.sampling.probs import Settings, to_probs

# Logits this close may change their order by rounding (observed values: docs/internals/numerics.md).
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
_LEAST_TOP_P = 1e-9


def is_allowed(logits: Tensor, history: History, token_id: int, sampling: Sampling, shift: float) -> bool:
    """Whether a token has a probability above 0 if its logit is shifted by ``shift``, and the mass of the others
    accordingly: a tail with mass 1 - top-p has at most e^shift times that (at temperature 1).

    Args:
        logits: [V]
        history: before it, at one position.
    """
    moved = logits.clone()
    moved[token_id] += shift
    top_p = 1 - (1 - sampling.top_p) * math.exp(min(50.0, -shift / sampling.temperature))
    loose = replace(sampling, top_p=min(1.0, max(_LEAST_TOP_P, top_p)))
    settings = Settings.of([loose], len(logits), logits.device)
    probs = to_probs(moved[None, None], settings, history.map(lambda values: values[None, None]))
    return bool(probs[0, 0, token_id] > 0)


def is_at_edge(logits: Tensor, history: History, token_id: int, sampling: Sampling) -> bool:
    """Whether rounding decides if a token is allowed. Arguments: see ``is_allowed``."""
    shift = 2 * ROUNDING[logits.dtype]
    loose, tight = (is_allowed(logits, history, token_id, sampling, sign * shift) for sign in (1, -1))
    return loose and not tight
