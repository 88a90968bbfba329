"""How the costs of rounds with different K are related, whatever the models and the machine.

A round of k drafted tokens is a draft of k tokens and a forward of the target over k + 1. For 0 < j < k:

    cost(j) <= cost(k)               to draft and verify more takes longer; also for j = 0
    cost(k) <= ceil(k / j) cost(j)   in so many rounds of j as many tokens are drafted, and more verified
    verify(k) <= (k + 1) verify(0)   the same tokens could be fed one by one

So a measurement can be seen to be wrong, and costs of some K bound those of others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_TOLERANCE = 1.25  # measured costs scatter, and a kernel may be a little better at more rows


def least_cost(k: int, others: Mapping[int, float]) -> float:
    """The least that a round of k drafted tokens can take.

    Args:
        others: costs of other K.
    """
    below = (cost for j, cost in others.items() if j < k)
    above = (cost / math.ceil(j / k) for j, cost in others.items() if j > k > 0)
    return max([*below, *above], default=0.0)


def most_cost(k: int, others: Mapping[int, float]) -> float:
    """The most, likewise."""
    below = (cost * math.ceil(k / j) for j, cost in others.items() if 0 < j < k)
    above = (cost for j, cost in others.items() if j > k)
    return min([*below, *above], default=math.inf)


def implausible_k(costs: Mapping[int, float], verify_s: Mapping[int, float]) -> int | None:
    """The K whose cost is above its bounds by the most, if that is more than a quarter; None if no cost is.

    Args:
        costs: K -> seconds of a round; 0 is among them.
        verify_s: K -> seconds of its verify.
    """

    def excess(k: int) -> float:
        others = {other: cost for other, cost in costs.items() if other != k}
        return max(costs[k] / most_cost(k, others), verify_s[k] / ((k + 1) * verify_s[0]))

    worst = max(costs, key=excess)
    return worst if excess(worst) > _TOLERANCE else None
