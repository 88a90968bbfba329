"""Test design: all choices made before the tested tokens are seen, so that they cannot depend on them; and the tests.

The statistics are defined in outrider.certify.observed, the validity of their p-values in outrider.certify.evidence. This
module chooses the stakes from pilot tokens, which are not tested, and creates the report.

Random numbers that a faulty loop uses twice show in *pairs* of tokens. The rank of a token, less its mean under p, has
mean 0 given everything before it. So has its product with the rank of an earlier token, provided that the earlier one
is chosen without looking at the token itself. A number that is used twice pushes both ranks the same way, and the mean
of the product is positive. Paired are:

- within a sequence: the token a few places before; the token in the same place of the previous round;
- between sequences: in the slot above or below, in the same step of the loop and the same place; in the same slot, the
  latest sequence before that had a token in the same place of the same round, or after as many tokens; and the latest
  sequence before in any slot with a token in the same position, or after as many tokens.

Two sequences are compared at the later one, so that the earlier one is known in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.certify.certificate import Dependence, StatisticalReport
from outrider.certify.evidence import (
    Bet,
    Finding,
    Floats,
    Increments,
    Integers,
    detectable,
    detectable_reuse,
    estimate_tv,
    holm,
    mean_wealth,
    p_value,
    pit_tests,
    tokens_needed,
)
from outrider.certify.observed import ObservedTokens
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS

_MAX_PROMPT_ACCOUNTS = 16
_NUM_POSITIONS = 12  # 0, 1-2, 3-6, 7-14 ... share an account


def _position_kinds(observed: ObservedTokens) -> Integers:
    kinds: Integers = np.minimum(np.log2(observed.positions + 1).astype(np.int64), _NUM_POSITIONS)
    return kinds


def _accepted_before(observed: ObservedTokens) -> Integers:
    """Number of tokens accepted in the previous round; -1 in a first round. [n]"""
    last = np.arange(len(observed)) - observed.places - 1  # of the previous round
    kinds: Integers = np.where((observed.rounds > 0) & (last >= 0), observed.places[last], -1)
    return kinds


_Kinds = Callable[[ObservedTokens], Integers]
# Tests with a separate account for each kind of token: the statistic, and the kinds.
_SPLITS: dict[str, tuple[str, _Kinds]] = {
    "score-by-position": ("score", _position_kinds),
    "score-by-prompt": ("score", lambda o: o.prompts % _MAX_PROMPT_ACCOUNTS),
}
_ROUND_SPLITS: dict[str, tuple[str, _Kinds]] = {
    "score-by-place": ("score", lambda o: o.places),
    "likelihood-by-place": ("likelihood", lambda o: o.places),
    "rank-by-place": ("rank", lambda o: o.places),
    "score-by-round-before": ("score", _accepted_before),
}
_ALL_SPLITS = _ROUND_SPLITS | _SPLITS
_WHOLE = ("score", "likelihood", "rank")  # statistics, each tested over all tokens
_NUM_WHOLE = len(_WHOLE) + 2  # two of the PIT
_NUM_OF_PAIRS = 2  # tests of pairs of tokens; one more if rounds are known
_PAIRS_PER_TOKEN = 0.5  # approximate, of the rarer kinds
_MOST_DISTANCE = 2 * DEFAULT_NUM_DRAFT_TOKENS + 2  # between two tokens of a sequence, if K is unknown

_Pairs = NDArray[np.int64]
"""Indices of tokens, the earlier and the later. [2, P]"""
_Dependent = dict[str, dict[str, tuple[_Pairs, Increments]]]
"""By test of dependence and kind: the pairs of tokens, and the products of their ranks."""


def num_tests(*, has_rounds: bool) -> int:
    return _NUM_WHOLE + _NUM_OF_PAIRS + (1 + len(_ALL_SPLITS) if has_rounds else len(_SPLITS))


@dataclass(frozen=True, slots=True)
class Design:
    """Choices made before the tested tokens were drawn.

    Attributes:
        num_tokens: n, or an estimate if the data determine it.
        level: of each single test: the strictest threshold of Holm's procedure.
        bets: on each statistic over all tokens.
        splits: for each test by kind, a bet on each kind.
        product: the bet on the product of two tokens' ranks.
        num_distances: largest distance of two tokens of a sequence that are compared.
    """

    num_tokens: int
    level: float
    bets: Mapping[str, Bet]
    splits: Mapping[str, Mapping[int, Bet]]
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

        def accounts(name: str, statistic: str, kinds_of: _Kinds) -> dict[int, Bet]:
            if name == "score-by-prompt":  # the pilot may not contain all of them
                num_groups = min(num_prompts, _MAX_PROMPT_ACCOUNTS)
                shares = dict.fromkeys(range(num_groups), 1 / num_groups)
            else:
                kinds, counts = np.unique(kinds_of(pilot), return_counts=True)
                shares = dict(zip(kinds.tolist(), (counts / len(pilot)).tolist(), strict=True))
            like, each = pilot.statistics[statistic], single / len(shares)  # the other accounts contribute little
            return {kind: Bet.for_sample(like, num_tokens * share, each) for kind, share in shares.items()}

        splits = _ALL_SPLITS if has_rounds else _SPLITS
        rank = pilot.statistics["rank"]
        neighbours = rank.scaled(np.roll(rank.values, 1))
        return cls(
            num_tokens=num_tokens,
            level=single,
            bets={name: Bet.for_sample(pilot.statistics[name], num_tokens, single) for name in _WHOLE},
            splits={name: accounts(name, *split) for name, split in splits.items()},
            product=Bet.for_sample(neighbours, _PAIRS_PER_TOKEN * num_tokens, single / num_distances),
            num_distances=num_distances,
            has_rounds=has_rounds,
        )

    def tests(self, observed: ObservedTokens, level: float) -> list[Finding]:
        """Run all tests, with thresholds for a joint false-alarm probability of ``level``."""
        return self._tests(observed, self._dependent(observed), level)

    def _dependent(self, observed: ObservedTokens) -> _Dependent:
        return {
            test: {name: (pairs, _products(observed, pairs)) for name, pairs in kinds.items()}
            for test, kinds in _pairs_by_test(observed, self.num_distances, has_rounds=self.has_rounds).items()
        }

    def _tests(self, observed: ObservedTokens, dependent: _Dependent, level: float) -> list[Finding]:
        found = []
        for name, bet in self.bets.items():
            one = observed.statistics[name]
            found.append(Finding(name, one.z, p_value(bet.log_wealth(one))))
        found += pit_tests(observed.pits)
        wealths = {}
        for name, bets in self.splits.items():
            statistic, kinds_of = _ALL_SPLITS[name]
            increments, kinds = observed.statistics[statistic], kinds_of(observed)
            # Tokens of a kind without a bet are ignored.
            staked = sorted(set(kinds.tolist()) & set(bets))
            wealths[name] = mean_wealth(
                [bets[kind].log_wealth(increments[kinds == kind]) for kind in staked], len(bets)
            )
        for name, by_kind in dependent.items():
            logs = [self.product.log_wealth(products) for _, products in by_kind.values()]
            wealths[name] = mean_wealth(logs, len(logs))
        found += [Finding(name, wealth, p_value(wealth)) for name, wealth in wealths.items()]
        return holm(found, level)

    def report(self, observed: ObservedTokens, level: float, num_texts: int, wanted: float | None) -> StatisticalReport:
        """Results of the statistical layer.

        Args:
            wanted: total variation that must be detectable.
        """
        score, drift = observed.statistics["score"], observed.drift
        places = [score[observed.places == place] for place in sorted(set(observed.places.tolist()))]
        estimate = estimate_tv(score, drift)
        least = detectable(score, drift, self.bets["score"], self.level)
        is_enough = least is not None and (wanted is None or least <= wanted)
        distance = float(drift.distances.mean())
        dependent = self._dependent(observed)
        needed = None
        if not is_enough and distance > 0:
            needed = tokens_needed(score, drift, wanted or distance, self.level)
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
            surprise_excess=float(observed.statistics["likelihood"].values.mean()),
            tests=self._tests(observed, dependent, level),
            dependence=[
                Dependence(
                    test, name, pairs.shape[1], products.z, self._detectable_share(observed, pairs, products, kinds)
                )
                for test, kinds in dependent.items()
                for name, (pairs, products) in kinds.items()
            ],
            places=[(len(part.values), part.z) for part in places] if self.has_rounds else [],
        )

    def _detectable_share(
        self, observed: ObservedTokens, pairs: _Pairs, products: Increments, kinds: Mapping[str, object]
    ) -> float | None:
        """Smallest share of tokens drawn with their partner's number that would have been detected.

        A rank is the mean of its uniform number, given the token. If two tokens share a number, the mean product of
        their ranks is 12 times that of their variances, as long as what the tokens leave open of it is uncorrelated.
        """
        variances = observed.statistics["rank"].moments[0]
        reused = 12 * float((variances[pairs[0]] * variances[pairs[1]]).sum())
        return detectable_reuse(products, self.product, self.level / len(kinds), reused)


def _pairs_by_test(observed: ObservedTokens, num_distances: int, *, has_rounds: bool) -> dict[str, dict[str, _Pairs]]:
    """Pairs of each test of dependence, by kind."""
    by_distance = {}
    for distance in range(1, num_distances + 1):
        later = distance + np.flatnonzero(observed.positions[distance:] >= distance)
        by_distance[f"distance {distance}"] = np.stack((later - distance, later))
    between: dict[str, _Pairs] = {}
    pairs = {"rank-by-distance": by_distance}
    if has_rounds:
        places, rounds, slots, steps = observed.places, observed.rounds, observed.slots, observed.steps
        own = _keys(observed.texts, rounds, places)
        before = _keys(observed.texts, rounds - 1, places)
        pairs["rank-by-round-before"] = {"round before": _latest(own, before)}
        own = _keys(steps, slots, places)
        beside = [_latest(own, _keys(steps, slots + side, places)) for side in (-1, 1)]
        between["slot beside, same step"] = np.concatenate(beside, axis=1)
        between["same slot, same round"] = _latest(_keys(slots, rounds, places))
        between["same slot, same length"] = _latest(_keys(slots, observed.lengths))
    between["sequence before, same position"] = _latest(_keys(observed.positions))
    between["sequence before, same length"] = _latest(_keys(observed.lengths))
    return pairs | {"rank-by-sequence": between}


def _products(observed: ObservedTokens, pairs: _Pairs) -> Increments:
    """Rank of each token times the sum of its partners' ranks."""
    earlier, later = pairs
    rank = observed.statistics["rank"]
    stakes: Floats = np.bincount(later, weights=rank.values[earlier], minlength=len(observed)).astype(float)
    return rank.scaled(stakes)


_Keys = list[tuple[int, ...]]  # for each token


def _keys(*columns: Integers) -> _Keys:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _latest(own: _Keys, wanted: _Keys | None = None) -> _Pairs:
    """Pair each token with the latest before it whose own key is the wanted one: by default its own."""
    latest: dict[tuple[int, ...], int] = {}
    found = []
    for index, (mine, partner) in enumerate(zip(own, wanted or own, strict=True)):
        if partner in latest:
            found.append((latest[partner], index))
        latest[mine] = index
    return np.array(found, dtype=np.int64).reshape(-1, 2).T
