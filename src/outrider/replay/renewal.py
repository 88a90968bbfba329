"""Rounds of speculation over a text that is there already, by probability.

Let x_1 ... x_n be a text written by the target. Of a lossless rule and a draft it can be said, without running the
target, how probable it is, *given this text*, that a round which begins after t tokens keeps at least i drafted ones:

- ``rejection``: S_i = prod_{j<=i} min(1, r_j), with r_j = q(x_{t+j}) / p(x_{t+j}).
- ``block``: S_i = min(1, rho_1, ..., rho_i), with rho_j = r_1 ... r_j.
- ``gumbel``: S_i = prod_{j<=i} g_j, with g_j as in outrider.replay.bounds.

A round that keeps i tokens commits i+1, and the next one begins there. Its noise is its own, so where rounds begin is a
renewal process, and every expectation follows from u(t), the probability that a round begins at t. The proofs are in
docs/record-and-replay.md. Greedy decoding is the case where every r is 0 or 1.

Numbers in, numbers out: this module knows no models and no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from outrider.stats.counts import RoundCounts

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def log_ratios(draft_probs: Floats, target_probs: Floats) -> Floats:
    """log(q/p) of tokens that stand in the text. [n], [n] -> [n]

    A p of zero can only be rounding (the token was sampled, at the edge of a filter say). How large q/p is, nobody
    knows then; as an infinite ratio it would let ``block`` keep whatever follows. So it counts as 1, or 0 where q is 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Floats = np.log(draft_probs) - np.log(target_probs)
    return np.where(target_probs > 0, logs, np.where(draft_probs > 0, 0.0, -np.inf))


def token_by_token(logs: Floats, k: int) -> Floats:
    """S of a rule that judges each token by itself and keeps it with probability min(1, exp(log)).

    Args:
        logs: of each token of the text. [n]

    Returns:
        At [t, i] the probability that a round beginning after t tokens keeps at least i; 0 beyond the text. [n, K+1]
    """
    return _with_none(np.exp(np.cumsum(np.minimum(_windows(logs, k), 0.0), axis=1)))


def by_block(logs: Floats, k: int) -> Floats:
    """S of ``block``: min(1, rho_1, ..., rho_i). [n] -> [n, K+1]"""
    return _with_none(np.exp(np.minimum(np.minimum.accumulate(np.cumsum(_windows(logs, k), axis=1), axis=1), 0.0)))


def by_matches(num_matching: Integers, k: int) -> Floats:
    """S where it is known that exactly so many drafted tokens stand. [n] -> [n, K+1]"""
    kept: Floats = (np.arange(k + 1) <= num_matching[:, None]).astype(np.float64)
    return kept


def _windows(logs: Floats, k: int) -> Floats:
    """At [t, j] the value of the token j places after the first t. [n] -> [n, K]"""
    windows: Floats = sliding_window_view(np.concatenate((logs, np.full(k, -np.inf))), k)[: len(logs)]
    return windows


def _with_none(survival: Floats) -> Floats:
    """With S_0 = 1. [n, K] -> [n, K+1]"""
    return np.concatenate((np.ones((len(survival), 1)), survival), axis=1)


@dataclass(frozen=True, slots=True)
class RoundLaw:
    """How rounds over one text go.

    Attributes:
        probs: at [t, i] the probability that a round beginning after t tokens keeps exactly i drafted ones. If i is
            n - t, the round would commit a token beyond the text: it is cut short by its end. [n, K+1]
        num_drafted: how many tokens such a round drafts. [n]
    """

    probs: Floats
    num_drafted: Integers

    def __post_init__(self) -> None:
        assert self.num_drafted.shape == self.probs.shape[:1]
        assert self.num_drafted.max(initial=0) < self.probs.shape[1]

    @classmethod
    def of(cls, survival: Floats, num_drafted: Integers) -> RoundLaw:
        """
        Args:
            survival: S. [n, K+1]
            num_drafted: each at most K. [n]
        """
        counts, drafted = np.arange(survival.shape[1]), num_drafted[:, None]
        following = np.concatenate((survival[:, 1:], np.zeros((len(survival), 1))), axis=1)
        exactly = np.where(counts < drafted, survival - following, survival)
        return cls(np.where(counts <= drafted, exactly, 0.0), num_drafted)

    def expected(self) -> RoundCounts:
        """The counts of rounds to expect."""
        n, width = self.probs.shape
        begins = np.zeros(n + width)  # u; beyond n: rounds that were cut short
        begins[0] = 1.0
        for t in range(n):
            begins[t + 1 : t + 1 + width] += begins[t] * self.probs[t]
        # A round is whole if its last token, after i accepted ones, is still in the text.
        is_whole = np.arange(width) < (n - np.arange(n))[:, None]
        whole = begins[:n, None] * self.probs * is_whole
        all_stood = whole[np.arange(n), self.num_drafted]
        return RoundCounts(
            accepted=tuple(whole.sum(axis=0).tolist()),
            drafted=tuple(np.bincount(self.num_drafted, whole.sum(axis=1), width).tolist()),
            full=tuple(np.bincount(self.num_drafted, all_stood, width).tolist()),
            num_truncated=float(begins[n + 1 :].sum()),
            num_generated_tokens=n,
        )

    def draw(self, generator: np.random.Generator) -> tuple[list[tuple[int, int]], bool]:
        """Rounds as they may have gone.

        Returns:
            (drafted, accepted) of each whole round, and whether another was cut short by the end of the text.
        """
        rounds: list[tuple[int, int]] = []
        n, t = len(self.probs), 0
        while t < n:
            cumulative = np.cumsum(self.probs[t])
            num_accepted = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
            t += num_accepted + 1
            if t > n:
                return rounds, True
            rounds.append((int(self.num_drafted[t - num_accepted - 1]), num_accepted))
        return rounds, False


def survival(rule: str, values: Any, k: int) -> Floats:
    """S of a rule by name, from log(q/p) of each token (for ``gumbel``: from log g). [n] -> [n, K+1]"""
    return by_block(values, k) if rule == "block" else token_by_token(values, k)
