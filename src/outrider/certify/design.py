"""Test design: all choices made before the tested tokens are seen, so that they cannot depend on them; and the tests.

outrider.certify.observed defines the statistics, outrider.certify.evidence why their p-values are valid. This module
chooses the stakes from pilot tokens, which are not tested, and creates the report.

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

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.certify import evidence
from outrider.certify.certificate import Dependence, StatisticalReport
from outrider.certify.observed import ObservedTokens
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS

_MAX_PROMPT_ACCOUNTS = 16
_MOST_DISTANCE = 2 * DEFAULT_NUM_DRAFT_TOKENS + 2  # between two tokens of a sequence, if K is unknown


# Tests by stakes, whose names tell the statistic and the kinds of tokens, each with an account of its own.
_WHOLE = "score", "likelihood", "rank"  # all tokens are alike
_OF_ROUNDS = "score-by-place", "likelihood-by-place", "rank-by-place", "score-by-round-before"
_ALWAYS = "score-by-position", "score-by-prompt"
_BY_STAKES = {False: _WHOLE + _ALWAYS, True: _WHOLE + _OF_ROUNDS + _ALWAYS}  # whether rounds are known


def _kinds_of(observed: ObservedTokens, kinds: str) -> evidence.Integers:
    """Kind of each token, by the end of a test's name. [n]"""
    places = observed["places"]
    last = np.arange(len(observed)) - places - 1  # of the previous round
    found: dict[str, evidence.Integers] = {
        "": np.zeros(len(observed), np.int64),
        "place": places,
        # Tokens accepted in the previous round; -1 in a first round.
        "round-before": np.where((observed["rounds"] > 0) & (last >= 0), places[last], -1),
        "position": np.minimum(np.log2(observed["positions"] + 1).astype(np.int64), 12),  # 0, 1-2, 3-6, 7-14 ...
        "prompt": observed["prompts"] % _MAX_PROMPT_ACCOUNTS,
    }
    return found[kinds]


def num_tests(*, has_rounds: bool) -> int:
    """Number of tests: by stakes, two of the PIT, and those of pairs."""
    return len(_BY_STAKES[has_rounds]) + 2 + (3 if has_rounds else 2)


Pairs = NDArray[np.int64]
"""Indices of tokens, the earlier and the later. [2, P]"""


@dataclass(frozen=True, slots=True)
class Design:
    """Choices made before the tested tokens were drawn."""

    level: float  # of each single test: the strictest threshold of Holm's procedure
    bets: Mapping[str, Mapping[int, evidence.Bet]]  # for each test by stakes, on each kind of token
    product: evidence.Bet  # on the product of two tokens' ranks
    num_distances: int  # largest distance of two tokens of a sequence that are compared
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
        """Choose stakes from the tokens of the pilot, for this number of tokens to be tested (an estimate if the data
        determine it) and this level of all tests together."""
        single = level / num_tests(has_rounds=has_rounds)
        bets = {}
        for name in _BY_STAKES[has_rounds]:
            statistic, _, kinds = name.partition("-by-")
            if name == "score-by-prompt":  # the pilot may not contain all of them
                num_groups = min(num_prompts, _MAX_PROMPT_ACCOUNTS)
                shares = dict.fromkeys(range(num_groups), 1 / num_groups)
            else:
                found, counts = np.unique(_kinds_of(pilot, kinds), return_counts=True)
                shares = dict(zip(found.tolist(), (counts / len(pilot)).tolist(), strict=True))
            like, each = pilot.statistic(statistic), single / len(shares)  # the other accounts contribute little
            bet = evidence.Bet.for_sample
            bets[name] = {kind: bet(like, num_tokens * share, each) for kind, share in shares.items()}
        rank = pilot.statistic("rank")
        neighbours = rank.scaled(np.roll(rank.values, 1))
        # The rarer kinds have about a pair for every second token.
        product = evidence.Bet.for_sample(neighbours, num_tokens / 2, single / num_distances)
        return cls(single, bets, product, num_distances, has_rounds)

    def tests(self, observed: ObservedTokens, level: float) -> list[evidence.Finding]:
        """Run all tests, with thresholds for a joint false-alarm probability of ``level``."""
        return self._run(observed, level)[0]

    def _run(self, observed: ObservedTokens, level: float) -> tuple[list[evidence.Finding], list[Dependence]]:
        found, dependence = [], []
        for name, bets in self.bets.items():
            statistic, _, by = name.partition("-by-")
            whole, kinds = observed.statistic(statistic), _kinds_of(observed, by)
            # Tokens of a kind without a bet are ignored.
            staked = sorted(set(kinds.tolist()) & set(bets))
            wealth = evidence.mean_wealth([bets[kind].log_wealth(whole[kinds == kind]) for kind in staked], len(bets))
            found.append(evidence.Finding(name, wealth if by else whole.z, evidence.p_value(wealth)))
        found[len(_WHOLE) : len(_WHOLE)] = evidence.pit_tests(observed["pits"])
        variances = observed.statistic("rank").moments[0]
        for name, by_kind in pairs_by_test(observed, self.num_distances, has_rounds=self.has_rounds).items():
            logs = []
            for kind, pairs in by_kind.items():
                products = products_of(observed, pairs)
                logs.append(self.product.log_wealth(products))
                # A rank is the mean of its uniform number, given the token. If two tokens share a number, the mean
                # product of their ranks is 12 times that of their variances, as long as what the tokens leave open of
                # it is uncorrelated.
                reused = 12 * float((variances[pairs[0]] * variances[pairs[1]]).sum())
                share = evidence.detectable_reuse(products, self.product, self.level / len(by_kind), reused)
                dependence.append(Dependence(name, kind, pairs.shape[1], products.z, share))
            wealth = evidence.mean_wealth(logs, len(logs))
            found.append(evidence.Finding(name, wealth, evidence.p_value(wealth)))
        return evidence.holm(found, level), dependence

    def report(self, observed: ObservedTokens, level: float, num_texts: int, wanted: float | None) -> StatisticalReport:
        """Results of the statistical layer. ``wanted`` is a total variation that must be detectable."""
        score, drift = observed.statistic("score"), observed.drift
        places = [score[observed["places"] == place] for place in sorted(set(observed["places"].tolist()))]
        estimate, std = evidence.estimate_tv(score, drift) or (None, None)
        least = evidence.detectable(score, drift, self.bets["score"][0], self.level)
        distance, needed = float(drift.distances.mean()), None
        if distance > 0 and (least is None or (wanted is not None and least > wanted)):
            needed = evidence.tokens_needed(score, drift, wanted or distance, self.level)
        tests, dependence = self._run(observed, level)
        return StatisticalReport(
            num_tokens=len(observed),
            num_texts=num_texts,
            num_forbidden=int(observed["is_forbidden"].sum()),
            num_at_edge=int(observed["is_at_edge"].sum()),
            alpha=1 - distance,
            detectable=least,
            wanted=wanted,
            num_tokens_needed=needed,
            estimate=estimate,
            estimate_std=std,
            surprise_excess=float(observed.statistic("likelihood").values.mean()),
            tests=tests,
            dependence=dependence,
            places=[(len(part.values), part.z) for part in places] if self.has_rounds else [],
        )


def pairs_by_test(observed: ObservedTokens, num_distances: int, *, has_rounds: bool) -> dict[str, dict[str, Pairs]]:
    """Pairs of each test of dependence, by kind."""
    by_distance = {}
    for distance in range(1, num_distances + 1):
        later = distance + np.flatnonzero(observed["positions"][distance:] >= distance)
        by_distance[f"distance {distance}"] = np.stack((later - distance, later))
    between: dict[str, Pairs] = {}
    pairs = {"rank-by-distance": by_distance}
    if has_rounds:
        names = "texts", "places", "rounds", "slots", "steps"
        texts, places, rounds, slots, steps = (observed[name] for name in names)
        before = _latest((texts, rounds, places), (texts, rounds - 1, places))
        pairs["rank-by-round-before"] = {"round before": before}
        beside = [_latest((steps, slots, places), (steps, slots + side, places)) for side in (-1, 1)]
        between["slot beside, same step"] = np.concatenate(beside, axis=1)
        between["same slot, same round"] = _latest((slots, rounds, places))
        between["same slot, same length"] = _latest((slots, observed["lengths"]))
    between["sequence before, same position"] = _latest((observed["positions"],))
    between["sequence before, same length"] = _latest((observed["lengths"],))
    return pairs | {"rank-by-sequence": between}


def _latest(own: tuple[evidence.Integers, ...], wanted: tuple[evidence.Integers, ...] | None = None) -> Pairs:
    """Pair each token with the latest before it whose own key, of a number from each column, is the wanted one: by
    default its own."""
    latest: dict[tuple[int, ...], int] = {}
    found = []
    keys = [zip(*(column.tolist() for column in columns), strict=True) for columns in (own, wanted or own)]
    for index, (mine, partner) in enumerate(zip(*keys, strict=True)):
        if partner in latest:
            found.append((latest[partner], index))
        latest[mine] = index
    return np.array(found, dtype=np.int64).reshape(-1, 2).T


def products_of(observed: ObservedTokens, pairs: Pairs) -> evidence.Increments:
    """Rank of each token times the sum of its partners' ranks."""
    earlier, later = pairs
    rank = observed.statistic("rank")
    stakes = np.bincount(later, weights=rank.values[earlier], minlength=len(observed)).astype(float)
    return rank.scaled(stakes)
