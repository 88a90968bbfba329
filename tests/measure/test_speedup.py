"""The closed forms, against what their authors published."""

import pytest

from outrider.decoding.schedule import expected_tokens
from outrider.measure.tau import predict

# Leviathan et al. 2211.17192, table 1: alpha, gamma, operations, speed; for c = 0.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# The expected improvements of their T5-XXL with T5-small, c = 0.02: alpha, gamma, improvement.
TABLE_OF_T5 = [(0.75, 7, 3.2), (0.62, 7, 2.3), (0.65, 5, 2.4), (0.53, 5, 1.9)]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_published_table(alpha: float, gamma: int, operations: float, speed: float) -> None:
    (one,) = predict([gamma], alpha=alpha, c=0.0, v=1.0, c_ops=0.0)
    assert (round(one.operations, 2), round(one.speed_up, 2)) == (operations, speed)


@pytest.mark.parametrize(("alpha", "gamma", "improvement"), TABLE_OF_T5)
def test_published_improvements(alpha: float, gamma: int, improvement: float) -> None:
    (one,) = predict([gamma], alpha=alpha, c=0.02, v=1.0, c_ops=0.02)
    assert round(one.speed_up, 1) == improvement


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.99])
def test_equal_acceptance_is_equation_1(alpha: float) -> None:
    for k, tau in enumerate(expected_tokens([alpha] * 12)):
        assert tau == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-12)
    assert expected_tokens([1.0] * 5)[-1] == 6.0  # where the fraction is 0/0
    assert expected_tokens([]) == [1.0]


def test_unequal_acceptance_by_hand() -> None:
    assert expected_tokens([0.9, 0.5, 0.8])[-1] == pytest.approx(1 + 0.9 + 0.45 + 0.36)


def test_a_slower_verify_and_a_draft_that_costs() -> None:
    (one,) = predict([4], alpha=1.0, c=0.25, v=1.5, c_ops=0.1)
    assert (one.tau, one.speed_up, one.operations) == (5.0, 2.0, pytest.approx(1.08))
