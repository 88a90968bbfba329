"""Bounds between the costs of rounds with different K, whatever the models and the machine.

A round of k drafted tokens is a draft of k tokens and a forward of the target over k + 1. For 0 < j < k:

    cost(j) <= cost(k)               drafting and verifying more takes longer; also for j = 0
    cost(k) <= ceil(k / j) cost(j)   that many rounds of j draft as many tokens, and verify more
    verify(k) <= (k + 1) verify(0)   the tokens could be fed one by one

So wrong measurements can be detected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_TOLERANCE = 1.25  # measured costs scatter, and a kernel may be a little better at more rows


def most_cost(k: int, others: Mapping[int, float]) -> float:
    """Upper bound of the cost of a round of k drafted tokens.

    Args:
        others: costs of other K.
    """
    below = (cost * math.ceil(k / j) for j, cost in others.items() if 0 < j < k)
    above = (cost for j, cost in others.items() if j > k)
    return min([*below, *above], default=math.inf)


def implausible_k(costs: Mapping[int, float], verify_s: Mapping[int, float]) -> int | None:
    """The K whose cost exceeds its upper bounds by the largest factor; None if all are within a quarter.

    Args:
        costs: K -> seconds of a round; 0 is among them.
        verify_s: K -> seconds of its verify.
    """

    def excess(k: int) -> float:
        others = {other: cost for other, cost in costs.items() if other != k}
        return max(costs[k] / most_cost(k, others), verify_s[k] / ((k + 1) * verify_s[0]))

    worst = max(costs, key=excess)
    return worst if excess(worst) > _TOLERANCE else None
