"""Costs of rounds that cannot be, and their upper bounds."""

import pytest

from outrider.decoding.cost_bounds import implausible_k, most_cost

COSTS = {0: 5.2, 1: 6.8, 2: 8.0, 3: 9.4, 4: 10.8, 6: 14.0, 8: 17.0}
VERIFY_S = {0: 5.0, 1: 5.5, 2: 5.8, 3: 6.0, 4: 6.3, 6: 7.0, 8: 8.0}


def test_bounds() -> None:
    assert most_cost(4, {0: 1.0, 2: 3.0, 6: 8.0}) == 6.0
    assert most_cost(3, {2: 3.0}) == 6.0  # in two rounds
    assert most_cost(0, {2: 3.0}) == 3.0
    assert most_cost(2, {0: 1.0}) == float("inf")


@pytest.mark.parametrize(("k", "factor"), [(1, 2.6), (4, 1.8), (0, 1.8), (8, 2.1)])
def test_one_cost_that_is_too_high_is_found(k: int, factor: float) -> None:
    """K = 1 at 3.4 plain rounds among them, as it was once measured on a busy machine."""
    assert implausible_k(COSTS, VERIFY_S) is None
    assert implausible_k({**COSTS, k: factor * COSTS[k]}, VERIFY_S) == k


def test_a_verify_that_takes_longer_than_its_tokens_one_by_one_is_found() -> None:
    """Though all rounds with drafts are as much too long, so that they agree with one another."""
    slow = {k: 3.0 if k else 1.0 for k in COSTS}
    costs, verify_s = ({k: slow[k] * of[k] for k in of} for of in (COSTS, VERIFY_S))
    assert implausible_k(costs, verify_s) == 1


def test_costs_that_scatter_a_little_are_believed() -> None:
    scattered = {k: seconds * (1.1 if k % 3 else 0.9) for k, seconds in COSTS.items()}
    assert implausible_k(scattered, VERIFY_S) is None
    assert implausible_k(dict.fromkeys(COSTS, 1.0), dict.fromkeys(COSTS, 1.0)) is None
