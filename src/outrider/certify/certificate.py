"""The contents of a certificate: the findings of each layer, and whether they suffice.

This module does not know how they were obtained (outrider.certify.run).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.certify.controls import Control
from outrider.certify.divergence import Divergence
from outrider.certify.exact import ExactReport
from outrider.stats.evidence import Finding


@dataclass(frozen=True, slots=True)
class StatisticalReport:
    """The statistical layer.

    Attributes:
        num_forbidden: tokens that the target does not allow: a single one raises an alarm.
        num_at_edge: tokens at the edge of a filter, where rounding decides; they were not tested.
        alpha: mean of sum min(p, q) over the tokens.
        detectable: the least total variation that the score test detects with a probability of 0.99.
        wanted: the total variation that had to be detectable, if one was requested.
        estimate, estimate_std: the deviation towards the draft, estimated from the score, in total variation, and its
            standard error; None where no token distinguishes the two.
        surprise_excess: mean of -log p less the entropy, in nats (both clipped as in outrider.certify.observed).
        places: for each place in a round the number of tokens and the score's z; empty where rounds are not known.
        pit_histogram: tokens in twenty equal bins.
        pit_excess: share of tokens with a PIT of at most u, less u, for u = 0, 0.01 ... 1.
    """

    num_tokens: int
    num_texts: int
    num_forbidden: int
    num_at_edge: int
    alpha: float
    detectable: float | None
    wanted: float | None
    estimate: float | None
    estimate_std: float | None
    surprise_excess: float
    tests: Sequence[Finding]
    places: Sequence[tuple[int, float]]
    pit_histogram: Sequence[int]
    pit_excess: Sequence[float]

    @property
    def is_alarm(self) -> bool:
        return self.num_forbidden > 0 or any(test.is_alarm for test in self.tests)

    @property
    def is_ok(self) -> bool:
        is_enough = self.wanted is None or (self.detectable is not None and self.detectable <= self.wanted)
        return not self.is_alarm and is_enough

    def to_json(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "num_texts": self.num_texts,
            "num_forbidden": self.num_forbidden,
            "num_at_edge": self.num_at_edge,
            "alpha": self.alpha,
            "detectable": self.detectable,
            "wanted": self.wanted,
            "estimate": self.estimate,
            "estimate_std": self.estimate_std,
            "surprise_excess": self.surprise_excess,
            "tests": [test.to_json() for test in self.tests],
            "places": [{"num_tokens": count, "z": z} for count, z in self.places],
            "pit_histogram": list(self.pit_histogram),
            "pit_excess": list(self.pit_excess),
            "is_ok": self.is_ok,
        }


@dataclass(frozen=True, slots=True)
class ControlReport:
    """The result of a deliberate mistake.

    Attributes:
        excuse: why it is ineffective here: it was not run, or its texts are too close to the right ones.
        num_tokens: the number tested when it was detected, or given up.
        by: the test with the smallest p, and that p.
    """

    control: Control
    excuse: str | None = None
    is_caught: bool = False
    num_tokens: int = 0
    by: str | None = None
    p: float | None = None

    @property
    def is_ok(self) -> bool:
        return self.excuse is not None or self.is_caught

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.control.name,
            "about": self.control.about,
            "excuse": self.excuse,
            "is_caught": self.is_caught,
            "num_tokens": self.num_tokens,
            "by": self.by,
            "p": self.p,
        }


@dataclass(frozen=True, slots=True)
class GreedyReport:
    """Texts compared with those of plain decoding, token by token.

    Attributes:
        differences: the first of each pair of texts that differ.
        has_noise: the texts were sampled, by ``gumbel`` with the same seeds.
    """

    num_texts: int
    num_tokens: int
    differences: Sequence[Divergence]
    has_noise: bool

    @property
    def is_ok(self) -> bool:
        return all(one.verdict == "numerics" for one in self.differences)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "differences": [one.to_json() for one in self.differences],
            "has_noise": self.has_noise,
            "is_ok": self.is_ok,
        }


@dataclass(frozen=True, slots=True)
class Certificate:
    """All findings. ``statistical`` is None at temperature 0, where nothing is left to chance."""

    exact: ExactReport
    statistical: StatisticalReport | None
    controls: Sequence[ControlReport]
    greedy: Sequence[GreedyReport]

    @property
    def is_certified(self) -> bool:
        is_ok = [self.exact.is_ok, *(one.is_ok for one in self.controls), *(one.is_ok for one in self.greedy)]
        return all(is_ok) and not self.is_idle and (self.statistical is None or self.statistical.is_ok)

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to certify: no control is effective, or no drafted token was ever accepted."""
        has_rounds = self.statistical is None or len(self.statistical.places) > 1
        is_blind = bool(self.controls) and not any(one.is_caught for one in self.controls)
        return is_blind or not has_rounds

    def to_json(self) -> dict[str, Any]:
        return {
            "is_certified": self.is_certified,
            "is_idle": self.is_idle,
            "exact": self.exact.to_json(),
            "statistical": self.statistical and self.statistical.to_json(),
            "controls": [one.to_json() for one in self.controls],
            "greedy": [one.to_json() for one in self.greedy],
        }
