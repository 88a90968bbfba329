"""Design: all choices made before the tested tokens are seen, so that they cannot depend on them; and the tests.

The statistics are defined in outrider.certify.observed, the validity of their p-values in outrider.stats.evidence. This
module joins them: it chooses stakes from tokens that are not tested, and makes the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from outrider.certify.certificate import StatisticalReport
from outrider.certify.observed import Observed
from outrider.stats.evidence import (
    Accounts,
    Bet,
    Finding,
    Increments,
    Integers,
    detectable,
    estimated,
    holm,
    p_value,
    pit_tests,
)

_MAX_PROMPT_ACCOUNTS = 16
_NUM_POSITIONS = 12  # 0, 1-2, 3-6, 7-14 ... share an account
_NUM_BINS, _NUM_STEPS = 20, 100  # of the histogram and of the curve in the report


@dataclass(frozen=True, slots=True)
class _Split:
    """A statistic with an account for each kind of token."""

    increments: Callable[[Observed], Increments]
    kinds: Callable[[Observed], Integers]


def _position_kinds(observed: Observed) -> Integers:
    kinds: Integers = np.minimum(np.log2(observed.positions + 1).astype(np.int64), _NUM_POSITIONS)
    return kinds


_SPLITS = {
    "score-by-position": _Split(lambda o: o.score, _position_kinds),
    "score-by-prompt": _Split(lambda o: o.score, lambda o: o.prompts % _MAX_PROMPT_ACCOUNTS),
}
_ROUND_SPLITS = {
    "score-by-place": _Split(lambda o: o.score, lambda o: o.places),
    "likelihood-by-place": _Split(lambda o: o.surprise, lambda o: o.places),
    "rank-by-place": _Split(lambda o: o.rank, lambda o: o.places),
}
_ALL_SPLITS = _ROUND_SPLITS | _SPLITS
_NUM_WHOLE = 5  # tests of all tokens together: score, likelihood, rank, two of the PIT


def num_tests(*, has_rounds: bool) -> int:
    return _NUM_WHOLE + len(_ALL_SPLITS if has_rounds else _SPLITS)


@dataclass(frozen=True, slots=True)
class Design:
    """The choices made before the tested tokens were drawn.

    Attributes:
        num_tokens: n, or an estimate of it where the data decide.
        level: of each single test: the strictest threshold of Holm's procedure.
    """

    num_tokens: int
    level: float
    score: Bet
    surprise: Bet
    rank: Bet
    splits: Mapping[str, Accounts]

    @classmethod
    def of(cls, pilot: Observed, num_tokens: int, level: float, num_prompts: int, *, has_rounds: bool = True) -> Design:
        """Stakes that suit tokens like those of the pilot.

        Args:
            level: of all tests together.
            has_rounds: whether the place of a token in its round is known.
        """
        single = level / num_tests(has_rounds=has_rounds)

        def accounts(name: str, split: _Split) -> Accounts:
            if name == "score-by-prompt":  # the pilot may not have met all of them
                num_groups = min(num_prompts, _MAX_PROMPT_ACCOUNTS)
                shares = dict.fromkeys(range(num_groups), 1 / num_groups)
            else:
                kinds, counts = np.unique(split.kinds(pilot), return_counts=True)
                shares = dict(zip(kinds.tolist(), (counts / len(pilot)).tolist(), strict=True))
            like, each = split.increments(pilot), single / len(shares)  # the other accounts contribute little
            return Accounts({kind: Bet.for_sample(like, num_tokens * share, each) for kind, share in shares.items()})

        splits = _ALL_SPLITS if has_rounds else _SPLITS
        return cls(
            num_tokens=num_tokens,
            level=single,
            score=Bet.for_sample(pilot.score, num_tokens, single),
            surprise=Bet.for_sample(pilot.surprise, num_tokens, single),
            rank=Bet.for_sample(pilot.rank, num_tokens, single),
            splits={name: accounts(name, split) for name, split in splits.items()},
        )

    def tests(self, observed: Observed, level: float) -> list[Finding]:
        """All tests of the tokens, with thresholds under which any of them is an alarm with probability ``level``."""
        wholes = {
            "score": (self.score, observed.score),
            "likelihood": (self.surprise, observed.surprise),
            "rank": (self.rank, observed.rank),
        }
        found = [Finding(name, one.z, p_value(bet.log_wealth(one))) for name, (bet, one) in wholes.items()]
        found += pit_tests(observed.pits)
        for name, accounts in self.splits.items():
            split = _ALL_SPLITS[name]
            wealth = accounts.log_wealth(split.increments(observed), split.kinds(observed))
            found.append(Finding(name, wealth, p_value(wealth)))
        return holm(found, level)

    def report(self, observed: Observed, level: float, num_texts: int, wanted: float | None) -> StatisticalReport:
        """The statistical layer.

        Args:
            wanted: the total variation that must be detectable.
        """
        kinds = sorted(set(observed.places.tolist()))
        places = [observed.score[observed.places == place] for place in kinds]
        steps = np.linspace(0.0, 1.0, _NUM_STEPS + 1)
        below = np.searchsorted(np.sort(observed.pits), steps, side="right") / len(observed)
        estimate = estimated(observed.score, observed.drift)
        return StatisticalReport(
            num_tokens=len(observed),
            num_texts=num_texts,
            num_forbidden=int(observed.is_forbidden.sum()),
            num_at_edge=int(observed.is_at_edge.sum()),
            alpha=1 - float(observed.drift.distances.mean()),
            detectable=detectable(observed.score, observed.drift, self.score, self.level),
            wanted=wanted,
            estimate=None if estimate is None else estimate[0],
            estimate_std=None if estimate is None else estimate[1],
            surprise_excess=float(observed.surprise.values.mean()),
            tests=self.tests(observed, level),
            places=[(len(part.values), part.z) for part in places] if "score-by-place" in self.splits else [],
            pit_histogram=np.histogram(observed.pits, bins=_NUM_BINS, range=(0.0, 1.0))[0].tolist(),
            pit_excess=(below - steps).tolist(),
        )
