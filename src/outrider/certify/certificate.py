"""The contents of a certificate: the findings of each layer, and whether they suffice.

This module does not know how they were obtained (outrider.certify.run).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from outrider.certify.controls import Control
from outrider.certify.divergence import Divergence
from outrider.certify.exact import ExactReport
from outrider.stats.evidence import Finding

HARDLY_OFF = 0.005  # total variation below which a deviation need not be detectable

Verdict = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Dependence:
    """Pairs of tokens of one kind.

    Attributes:
        test: the test that this kind of pairs is a part of.
        pairs: the kind.
        z: of the sum of the products of their ranks.
        detectable: the least share of tokens drawn with their partner's random number that is detected with a
            probability of 0.99; None where not even all would be.
    """

    test: str
    pairs: str
    num_pairs: int
    z: float
    detectable: float | None


REUSE = {  # each test of dependence, and where numbers are used again
    "rank-by-distance": "within a sequence, a few places on",
    "rank-by-round-before": "in the next round",
    "rank-by-sequence": "in another sequence",
}


def reuse_limits(dependence: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Where numbers are used again, and the least share of tokens for which that is detected, whichever kind of pairs
    shares them. A test is left out if it has no pairs, or some kind of them is not detected.

    Args:
        dependence: as in JSON.
    """
    for test, where in REUSE.items():
        shares = [kind["detectable"] for kind in dependence if kind["test"] == test and kind["num_pairs"]]
        if shares and None not in shares:
            yield where, max(shares)


@dataclass(frozen=True, slots=True)
class StatisticalReport:
    """The statistical layer.

    Attributes:
        num_forbidden: tokens that the target does not allow: a single one raises an alarm.
        num_at_edge: tokens at the edge of a filter, where rounding decides; they were not tested.
        alpha: mean of sum min(p, q) over the tokens.
        detectable: the least total variation that the score test detects with a probability of 0.99.
        wanted: the total variation that had to be detectable, if one was requested.
        num_tokens_needed: that would make ``wanted`` detectable, or the draft's own law where none was requested; None
            where it is, or where no number would.
        estimate, estimate_std: the deviation towards the draft, estimated from the score, in total variation, and its
            standard error; None where no token distinguishes the two.
        surprise_excess: mean of -log p less the entropy, in nats (both clipped as in outrider.certify.observed).
        dependence: for each kind of pairs of tokens, whether they seem to share random numbers.
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
    num_tokens_needed: int | None
    estimate: float | None
    estimate_std: float | None
    surprise_excess: float
    tests: Sequence[Finding]
    dependence: Sequence[Dependence]
    places: Sequence[tuple[int, float]]
    pit_histogram: Sequence[int]
    pit_excess: Sequence[float]

    @property
    def is_alarm(self) -> bool:
        return self.num_forbidden > 0 or any(test.is_alarm for test in self.tests)

    @property
    def is_enough(self) -> bool:
        """Whether the tokens suffice for a verdict."""
        if self.detectable is None:
            return self.wanted is None and 1 - self.alpha < HARDLY_OFF
        return self.wanted is None or self.detectable <= self.wanted

    @property
    def is_ok(self) -> bool:
        return not self.is_alarm and self.is_enough

    def to_json(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "num_texts": self.num_texts,
            "num_forbidden": self.num_forbidden,
            "num_at_edge": self.num_at_edge,
            "alpha": self.alpha,
            "detectable": self.detectable,
            "wanted": self.wanted,
            "num_tokens_needed": self.num_tokens_needed,
            "estimate": self.estimate,
            "estimate_std": self.estimate_std,
            "surprise_excess": self.surprise_excess,
            "tests": [test.to_json() for test in self.tests],
            "dependence": [asdict(one) for one in self.dependence],
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
        num_tokens_needed: about how many would detect it, or excuse it, where these did not.
    """

    control: Control
    excuse: str | None = None
    is_caught: bool = False
    num_tokens: int = 0
    by: str | None = None
    p: float | None = None
    num_tokens_needed: int | None = None

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
            "num_tokens_needed": self.num_tokens_needed,
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
    def verdict(self) -> Verdict:
        """``failed`` if something is wrong, ``inconclusive`` if a mistake might have gone undetected."""
        is_alarm = self.statistical is not None and self.statistical.is_alarm
        if is_alarm or not self.exact.is_ok or not all(one.is_ok for one in self.greedy):
            return "failed"
        is_enough = self.statistical is None or self.statistical.is_enough
        is_sensitive = is_enough and all(one.is_ok for one in self.controls)
        return "passed" if is_sensitive and not self.is_idle else "inconclusive"

    @property
    def is_certified(self) -> bool:
        return self.verdict == "passed"

    @property
    def num_tokens_needed(self) -> int | None:
        """About how many tokens would decide, where these do not; None where they do, or where no number would."""
        if self.verdict != "inconclusive" or self.is_idle:
            return None
        needed = [one.num_tokens_needed for one in self.controls if not one.is_ok]
        if self.statistical is not None and not self.statistical.is_enough:
            needed.append(self.statistical.num_tokens_needed)
        known = [one for one in needed if one is not None]
        return max(known) if len(known) == len(needed) else None

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to certify: no control is effective, or no drafted token was ever accepted."""
        has_rounds = self.statistical is None or len(self.statistical.places) > 1
        is_blind = bool(self.controls) and all(one.excuse is not None for one in self.controls)
        return is_blind or not has_rounds

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "is_certified": self.is_certified,
            "num_tokens_needed": self.num_tokens_needed,
            "is_idle": self.is_idle,
            "exact": self.exact.to_json(),
            "statistical": self.statistical and self.statistical.to_json(),
            "controls": [one.to_json() for one in self.controls],
            "greedy": [one.to_json() for one in self.greedy],
        }
