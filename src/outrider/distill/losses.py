"""What a draft is trained on: how far its distribution q is from the target's p, token by token.

Each is a pure function of the logits of both, [..., V] and [..., V] -> [...], zero where q = p, in natural units. All
of them are among those compared for drafts by Zhou et al. (DistillSpec, 2310.08461); which is best depends on the pair.
This module does not know models or texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Forward KL, sum_v p log(p / q): the draft is to cover all that the target may say.

    Its gradient is q - p, which never vanishes while they differ, so it is the one to begin with. Hinton et al.
    1503.02531 (there with a temperature).
    """
    log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Reverse KL, sum_v q log(q / p): the draft is to say nothing that the target would not.

    A draft too small for all of p spends itself on its likeliest tokens. Gu et al. (MiniLLM) 2306.08543.
    """
    log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jsd(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Jensen-Shannon divergence, (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2: between the two, and bounded.

    Agarwal et al. (GKD) 2306.13649, equation 1 with beta = 1/2.
    """
    log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)) / 2


def tv(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Total variation, sum_v |p - q| / 2 = 1 - alpha: the very thing that decides how much is accepted.

    (Leviathan et al. 2211.17192, corollary 3.6.) Its gradient vanishes where p and q have nothing in common, so a draft
    does not learn from it what it does not know yet: it is for a draft that agrees already.
    """
    return (target_logits.softmax(-1) - draft_logits.softmax(-1)).abs().sum(-1) / 2


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"kl": kl, "reverse-kl": reverse_kl, "jsd": jsd, "tv": tv}
