"""Training of EAGLE-3 heads, by unrolling: as in a round, each later token is drafted from the head's own states.

The head that runs is that of inference (models/heads), over another cache. For every position of a sequence at once, a
round that begins there is followed along the sequence: step d reads the token at d places further on, attends to the
entries with the target's states up to the beginning of the round, and to the d entries of its own round since then.

Source: training-time test, Li et al. 2503.01840, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from outrider.distill.heads import (
    HeadStudent,
    borrow,
    default_features,
    from_target,
    initialise,
    new_config,
    num_layers_of,
)
from outrider.distill.student import Pair
from outrider.models.heads.base import Head, layer_config
from outrider.models.heads.chains import LAYER_IDS, Eagle3Head
from outrider.runtime.lm import LM


def unroll(head: Head, ids: Tensor, target_logits: Tensor, features: Tensor, depth: int) -> Iterator[Pair]:
    """Follow rounds along sequences.

    Args:
        ids: [B, T]
        target_logits, features: of the target along them. [B, T, V], [B, T, F]
        depth: drafted tokens.

    Yields:
        For each drafted token d = 0, 1, ...: logits of the target [B, T-1-d, V] and of the head [B, T-1-d, D], for the
        token at i + d + 2 in row i: the first token that the round can draft is at i + 2.
    """
    states = head.fuse(features.to(next(head.parameters()).dtype))
    cache, seen = DynamicCache(), torch.empty(0)
    for d in range(depth):
        num = ids.shape[1] - 1 - d  # rounds that have not reached the end of the sequence
        own = torch.eye(num, dtype=torch.bool, device=ids.device)
        # A round sees the same entries of earlier steps as before, and its own of this step.
        seen = torch.ones_like(own).tril() if d == 0 else torch.cat((seen[:num], own), dim=1)
        mask = torch.zeros(seen.shape, dtype=states.dtype, device=ids.device)
        mask = mask.masked_fill_(~seen, torch.finfo(states.dtype).min)[None, None]
        positions = torch.arange(d, d + num, device=ids.device).expand(len(ids), -1)
        outputs, states = head(ids[:, 1 + d :], states[:, :num], positions, mask, cache)
        yield target_logits[:, 1 + d :], head.lm_head(outputs)


def new_eagle3(target: LM, token_ids: Tensor | None, seed: int) -> Eagle3Head:
    """Create an EAGLE-3 head of one layer for a target, in float32.

    It begins with the deepest of the target's states and the target's LM head; its layer is random. Its embedding is
    the target's: seen, and not a part of it, so that it is neither trained nor stored.

    Args:
        token_ids: the target's ids of its tokens, ascending; None for all. D numbers
    """
    config = layer_config(new_config(LlamaConfig, target, 1), 1, target.model)  # known to the engines as EAGLE-3
    features = default_features(num_layers_of(target))
    tensors = from_target(target, len(features), token_ids)
    head = Eagle3Head(config, {LAYER_IDS: features}, tensors, target)
    borrow(head, "embed_tokens")
    return initialise(head, tensors, token_ids, seed).to(target.device)


class ChainStudent(HeadStudent[Eagle3Head]):
    """An EAGLE-3 head, from ``new_eagle3``."""

    later = 0.8  # Li et al.

    def rounds(
        self,
        head: Eagle3Head,
        ids: Tensor,
        target_logits: Tensor,
        features: Tensor,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Iterator[Pair]]:
        """Rounds from all places."""
        places = torch.arange(2, ids.shape[1] + 1, device=ids.device)
        return places, unroll(head, ids, target_logits, features, self.depth)

    def settings(self) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            LAYER_IDS: list(self.head.features),
            "norm_before_residual": self.head.norm_before_residual,
            "norm_output": self.head.norm_output,
            "norm_before_fc": False,
            "fc_norm": False,
        }
