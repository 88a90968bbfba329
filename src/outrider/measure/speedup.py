"""Closed forms of the speed-up by speculation.

In a round of K drafted tokens the i-th is accepted with probability a_i if those before it are. With c the time of a
draft step and v that of a verify, both over the time of a plain step of the target, the speed-up follows from the
tokens that a round commits and from its duration.

Source: Leviathan et al. 2211.17192, section 3, where every a_i is the same alpha and v is 1; there K is gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """tau(K), the expected tokens committed by a round of K drafted tokens, for K = 0, 1, ..., len(acceptance).

    tau(K) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K; for equal a_i it is (1 - alpha^(K+1)) / (1 - alpha), equation 1.

    Args:
        acceptance: a_1, a_2, ...
    """
    expected, reach = [1.0], 1.0
    for a in acceptance:
        reach *= a
        expected.append(expected[-1] + reach)
    return expected


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for K drafted tokens per round.

    Attributes:
        tau: tokens per round.
        speed_up: speed over that of plain decoding.
        operations: arithmetic operations over those of plain decoding.
    """

    k: int
    tau: float
    speed_up: float
    operations: float


def predict(ks: Sequence[int], *, alpha: float, c: float, v: float, c_ops: float) -> list[Prediction]:
    """For each K: the speed-up tau / (K c + v), for v = 1 that of theorem 3.8, and the operations (K c_ops + K + 1) /
    tau of theorem 3.11.

    Args:
        alpha: the probability that a drafted token is accepted if those before it are, at any position.
        c, v: the time of a draft step and that of a verify, over that of a plain step.
        c_ops: the operations of a draft step over those of a plain step.
    """
    tau = expected_tokens([alpha] * max(ks))
    return [Prediction(k, tau[k], tau[k] / (k * c + v), (k * c_ops + k + 1) / tau[k]) for k in ks]
