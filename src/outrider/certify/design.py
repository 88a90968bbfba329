"""Test design: all choices made before the tested tokens are seen, so that they cannot depend on them; and the tests.

The statistics are defined in outrider.certify.observed, the validity of their p-values in outrider.stats.evidence. This
module chooses the stakes from pilot tokens, which are not tested, and creates the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from outrider.certify import partners
from outrider.certify.certificate import Dependence, StatisticalReport
from outrider.certify.observed import ObservedTokens
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS
from outrider.stats.evidence import (
    Accounts,
    Bet,
    Finding,
    Increments,
    Integers,
    detectable,
    estimate_tv,
    holm,
    mean_wealth,
    p_value,
    pit_tests,
    tokens_needed,
)

_MAX_PROMPT_ACCOUNTS = 16
_NUM_POSITIONS = 12  # 0, 1-2, 3-6, 7-14 ... share an account
_NUM_BINS, _NUM_STEPS = 20, 100  # in the report's histogram and curve


@dataclass(frozen=True, slots=True)
class _Split:
    """Statistic with a separate account for each kind of token."""

    increments: Callable[[ObservedTokens], Increments]
    kinds: Callable[[ObservedTokens], Integers]


def _position_kinds(observed: ObservedTokens) -> Integers:
    kinds: Integers = np.minimum(np.log2(observed.positions + 1).astype(np.int64), _NUM_POSITIONS)
    return kinds


def _accepted_before(observed: ObservedTokens) -> Integers:
    """Number of tokens accepted in the previous round; -1 in a first round. [n]"""
    last = np.arange(len(observed)) - observed.places - 1  # of the previous round
    kinds: Integers = np.where((observed.rounds > 0) & (last >= 0), observed.places[last], -1)
    return kinds


_SPLITS = {
    "score-by-position": _Split(lambda o: o.score, _position_kinds),
    "score-by-prompt": _Split(lambda o: o.score, lambda o: o.prompts % _MAX_PROMPT_ACCOUNTS),
}
_ROUND_SPLITS = {
    "score-by-place": _Split(lambda o: o.score, lambda o: o.places),
    "likelihood-by-place": _Split(lambda o: o.surprise, lambda o: o.places),
    "rank-by-place": _Split(lambda o: o.rank, lambda o: o.places),
    "score-by-round-before": _Split(lambda o: o.score, _accepted_before),
}
_ALL_SPLITS = _ROUND_SPLITS | _SPLITS
_NUM_WHOLE = 5  # tests of all tokens: score, likelihood, rank, two of the PIT
_NUM_OF_PAIRS = 2  # tests of pairs of tokens; one more if rounds are known
_PAIRS_PER_TOKEN = 0.5  # approximate, of the rarer kinds
_MOST_DISTANCE = 2 * DEFAULT_NUM_DRAFT_TOKENS + 2  # between two tokens of a sequence, if K is unknown

_Dependent = dict[str, dict[str, tuple[partners.Pairs, Increments]]]
"""By test of dependence and kind: the pairs of tokens, and the products of their ranks."""


def num_tests(*, has_rounds: bool) -> int:
    return _NUM_WHOLE + _NUM_OF_PAIRS + (1 + len(_ALL_SPLITS) if has_rounds else len(_SPLITS))


@dataclass(frozen=True, slots=True)
class Design:
    """Choices made before the tested tokens were drawn.

    Attributes:
        num_tokens: n, or an estimate if the data determine it.
        level: of each single test: the strictest threshold of Holm's procedure.
        product: the bet on the product of two tokens' ranks.
        num_distances: largest distance of two tokens of a sequence that are compared.
    """

    num_tokens: int
    level: float
    score: Bet
    surprise: Bet
    rank: Bet
    splits: Mapping[str, Accounts]
    product: Bet
    num_distances: int
    has_rounds: bool

    @classmethod
    def of(
        cls,
        pilot: ObservedTokens,
        num_tokens: int,
        level: float,
        num_prompts: int,
        *,
        num_distances: int = _MOST_DISTANCE,
        has_rounds: bool = True,
    ) -> Design:
        """Choose stakes from the tokens of the pilot.

        Args:
            level: of all tests together.
            has_rounds: whether each token's place in its round is known.
        """
        single = level / num_tests(has_rounds=has_rounds)

        def accounts(name: str, split: _Split) -> Accounts:
            if name == "score-by-prompt":  # the pilot may not contain all of them
                num_groups = min(num_prompts, _MAX_PROMPT_ACCOUNTS)
                shares = dict.fromkeys(range(num_groups), 1 / num_groups)
            else:
                kinds, counts = np.unique(split.kinds(pilot), return_counts=True)
                shares = dict(zip(kinds.tolist(), (counts / len(pilot)).tolist(), strict=True))
            like, each = split.increments(pilot), single / len(shares)  # the other accounts contribute little
            return Accounts({kind: Bet.for_sample(like, num_tokens * share, each) for kind, share in shares.items()})

        splits = _ALL_SPLITS if has_rounds else _SPLITS
        neighbours = pilot.rank.scaled(np.roll(pilot.rank.values, 1))
        return cls(
            num_tokens=num_tokens,
            level=single,
            score=Bet.for_sample(pilot.score, num_tokens, single),
            surprise=Bet.for_sample(pilot.surprise, num_tokens, single),
            rank=Bet.for_sample(pilot.rank, num_tokens, single),
            splits={name: accounts(name, split) for name, split in splits.items()},
            product=Bet.for_sample(neighbours, _PAIRS_PER_TOKEN * num_tokens, single / num_distances),
            num_distances=num_distances,
            has_rounds=has_rounds,
        )

    def _dependent(self, observed: ObservedTokens) -> _Dependent:
        pairs = {"rank-by-distance": dict(partners.by_distance(observed, self.num_distances))}
        if self.has_rounds:
            pairs["rank-by-round-before"] = {"round before": partners.in_round_before(observed)}
        pairs["rank-by-sequence"] = dict(partners.between(observed, has_rounds=self.has_rounds))
        return {
            test: {name: (each, partners.products(observed, each)) for name, each in kinds.items()}
            for test, kinds in pairs.items()
        }

    def tests(self, observed: ObservedTokens, level: float) -> list[Finding]:
        """Run all tests, with thresholds for a joint false-alarm probability of ``level``."""
        return self._tests(observed, self._dependent(observed), level)

    def _tests(self, observed: ObservedTokens, dependent: _Dependent, level: float) -> list[Finding]:
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
        for name, kinds in dependent.items():
            wealth = mean_wealth([self.product.log_wealth(products) for _, products in kinds.values()], len(kinds))
            found.append(Finding(name, wealth, p_value(wealth)))
        return holm(found, level)

    def _dependence(self, observed: ObservedTokens, dependent: _Dependent) -> Iterator[Dependence]:
        for test, kinds in dependent.items():
            for name, (pairs, products) in kinds.items():
                least = partners.detectable_share(observed, pairs, products, self.product, self.level / len(kinds))
                yield Dependence(test, name, pairs.shape[1], products.z, least)

    def report(self, observed: ObservedTokens, level: float, num_texts: int, wanted: float | None) -> StatisticalReport:
        """Results of the statistical layer.

        Args:
            wanted: total variation that must be detectable.
        """
        kinds = sorted(set(observed.places.tolist()))
        places = [observed.score[observed.places == place] for place in kinds]
        steps = np.linspace(0.0, 1.0, _NUM_STEPS + 1)
        below = np.searchsorted(np.sort(observed.pits), steps, side="right") / len(observed)
        drift = observed.drift
        estimate = estimate_tv(observed.score, drift)
        least = detectable(observed.score, drift, self.score, self.level)
        is_enough = least is not None and (wanted is None or least <= wanted)
        distance = float(drift.distances.mean())
        dependent = self._dependent(observed)
        needed = None
        if not is_enough and distance > 0:
            needed = tokens_needed(observed.score, drift, wanted or distance, self.level)
        return StatisticalReport(
            num_tokens=len(observed),
            num_texts=num_texts,
            num_forbidden=int(observed.is_forbidden.sum()),
            num_at_edge=int(observed.is_at_edge.sum()),
            alpha=1 - distance,
            detectable=least,
            wanted=wanted,
            num_tokens_needed=needed,
            estimate=None if estimate is None else estimate[0],
            estimate_std=None if estimate is None else estimate[1],
            surprise_excess=float(observed.surprise.values.mean()),
            tests=self._tests(observed, dependent, level),
            dependence=list(self._dependence(observed, dependent)),
            places=[(len(part.values), part.z) for part in places] if "score-by-place" in self.splits else [],
            pit_histogram=np.histogram(observed.pits, bins=_NUM_BINS, range=(0.0, 1.0))[0].tolist(),
            pit_excess=(below - steps).tolist(),
        )
