"""Losses for a draft: the distance of its distribution q from the target's p, token by token.

Each is a pure function of the logits of both, [..., V] and [..., V] -> [...], zero where q = p, in nats. Zhou et al.
compare all of them for drafts (DistillSpec, 2310.08461); the best choice depends on the pair. This module knows no
models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LK_DECAY = 3.0


def kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Forward KL, sum_v p log(p / q): the draft must cover all that the target may generate.

    Its gradient is q - p, which never vanishes while they differ, so it is the loss to start with. Hinton et al.
    1503.02531 (there with a temperature).
    """
    log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def tv(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Total variation, sum_v |p - q| / 2 = 1 - alpha: it determines acceptance directly.

    (Leviathan et al. 2211.17192, corollary 3.6.) Its gradient vanishes where p and q have nothing in common, so a draft
    cannot learn new tokens from it: use it for a draft that already agrees.
    """
    return (target_logits.softmax(-1) - draft_logits.softmax(-1)).abs().sum(-1) / 2


def lk(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """LK loss, w KL + (1 - w) TV with w = exp(-3 alpha): KL where little is accepted, TV where much is.

    So tokens are learned from KL, and the end of training serves acceptance. Samarin et al. 2602.23881, the hybrid
    form. They take w from the mean alpha of a batch; here it is that of the position, so that the loss is a function of
    one position.
    """
    missed = tv(target_logits, draft_logits)
    weight = torch.exp(-_LK_DECAY * (1 - missed.detach()))
    return weight * kl(target_logits, draft_logits) + (1 - weight) * missed


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"kl": kl, "tv": tv, "lk": lk}
