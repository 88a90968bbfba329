"""Certificate: the findings of each layer, and the verdict.

This module does not know how the findings were obtained (outrider.certify.run).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from outrider.certify.divergence import GreedyReport
from outrider.certify.evidence import Finding
from outrider.certify.exact import ExactReport

NEGLIGIBLE_TV = 0.005  # total variation: smaller deviations need not be detectable


@dataclass(frozen=True, slots=True)
class Dependence:
    """Test of dependence between pairs of tokens of one kind. ``detectable`` is the smallest share of tokens drawn with
    their partner's random number that is detected with probability 0.99; None if even full reuse would be missed."""

    test: str  # that these pairs belong to
    pairs: str  # the kind
    num_pairs: int
    z: float  # of the summed products of their ranks
    detectable: float | None


@dataclass(frozen=True, slots=True)
class StatisticalReport:
    """Results of the statistical layer.

    Attributes:
        num_tokens_needed: tokens that would make ``wanted`` (by default: the draft's distribution) detectable; None if
            it is already, or if no number suffices.
        estimate, estimate_std: deviation towards the draft in total variation, estimated from the score, and its
            standard error; None if no token distinguishes the two.
        surprise_excess: mean of -log p less the entropy, in nats (both clipped as in outrider.certify.observed).
    """

    num_tokens: int
    num_texts: int
    num_forbidden: int  # tokens with p = 0; a single one raises an alarm
    num_at_edge: int  # tokens at the edge of a filter, where rounding decides; not tested
    alpha: float  # mean of sum min(p, q) over the tokens
    detectable: float | None  # smallest total variation that the score test detects with probability 0.99
    wanted: float | None  # the requested one, if any
    num_tokens_needed: int | None
    estimate: float | None
    estimate_std: float | None
    surprise_excess: float
    tests: Sequence[Finding]
    dependence: Sequence[Dependence]
    places: Sequence[tuple[int, float]]  # number of tokens and z of the score for each place; empty without rounds

    @property
    def is_alarm(self) -> bool:
        return self.num_forbidden > 0 or any(test.is_alarm for test in self.tests)

    @property
    def is_enough(self) -> bool:
        if self.detectable is None:
            return self.wanted is None and 1 - self.alpha < NEGLIGIBLE_TV
        return self.wanted is None or self.detectable <= self.wanted

    def reuse_limits(self) -> Iterator[tuple[str, float]]:
        """Yield each place of reuse with the smallest share of tokens that is detected for every kind of pairs. Skips
        tests without pairs, and tests with an undetectable kind."""
        for test, where in (
            ("rank-by-distance", "within a sequence, a few places on"),
            ("rank-by-round-before", "in the next round"),
            ("rank-by-sequence", "in another sequence"),
        ):
            shares = [kind.detectable for kind in self.dependence if kind.test == test and kind.num_pairs]
            if shares and (known := [share for share in shares if share is not None]) == shares:
                yield where, max(known)


@dataclass(frozen=True, slots=True)
class ControlReport:
    """Result of a control: a deliberate mistake in the loop."""

    name: str
    about: str
    excuse: str | None = (
        None  # if it is ineffective here: it was not run, or its output is too close to the correct one
    )
    is_caught: bool = False
    num_tokens: int = 0  # tested until it was detected, or all
    by: str | None = None  # test with the smallest p
    p: float | None = None
    num_tokens_needed: int | None = None  # about how many would detect or excuse it, if these did not

    @property
    def is_ok(self) -> bool:
        return self.excuse is not None or self.is_caught


@dataclass(frozen=True, slots=True)
class Certificate:
    """All findings, of a pair or about samples of another system."""

    exact: ExactReport | None  # None for samples
    statistical: StatisticalReport | None  # None at temperature 0, where decoding is deterministic
    controls: Sequence[ControlReport]
    greedy: Sequence[GreedyReport]
    num_repeats: int = 0  # samples equal to an earlier one of the same prompt

    @property
    def verdict(self) -> Literal["passed", "failed", "inconclusive"]:
        """``failed`` on any deviation, ``inconclusive`` if a mistake might have gone undetected."""
        statistical = self.statistical
        is_alarm = statistical is not None and statistical.is_alarm
        if is_alarm or not (self.exact is None or self.exact.is_ok) or not all(one.is_ok for one in self.greedy):
            return "failed"
        is_enough = statistical is None or statistical.is_enough
        is_sensitive = is_enough and all(one.is_ok for one in self.controls)
        return "passed" if is_sensitive and not self.is_idle else "inconclusive"

    @property
    def num_tokens_needed(self) -> int | None:
        """Approximate number of tokens for a verdict; None if there is one, or if no number suffices."""
        if self.verdict != "inconclusive" or self.is_idle:
            return None
        needed = [one.num_tokens_needed for one in self.controls if not one.is_ok]
        if self.statistical is not None and not self.statistical.is_enough:
            needed.append(self.statistical.num_tokens_needed)
        known = [one for one in needed if one is not None]
        return max(known) if len(known) == len(needed) else None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to certify: no effective control, or no accepted token."""
        has_rounds = self.exact is None or self.statistical is None or len(self.statistical.places) > 1
        is_blind = bool(self.controls) and all(one.excuse is not None for one in self.controls)
        return is_blind or not has_rounds

    def to_json(self) -> dict[str, Any]:
        conclusion = {"verdict": self.verdict, "num_tokens_needed": self.num_tokens_needed, "is_idle": self.is_idle}
        return conclusion | asdict(self)
