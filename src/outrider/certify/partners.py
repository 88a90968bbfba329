"""Partners: earlier tokens whose random numbers a faulty loop may reuse for a token.

The rank of a token, less its mean under p, has mean 0 given everything before it. So has its product with the rank of
an earlier token, provided that the earlier one is chosen without looking at the token itself. A number that is used
twice pushes both ranks the same way, and the mean of the product is positive. This module pairs:

- within a sequence: the token a few places before; the token in the same place of the previous round;
- between sequences: in the slot above or below, in the same step of the loop and the same place; in the same slot, the
  latest sequence before that had a token in the same place of the same round, or after as many tokens; and the latest
  sequence before in any slot with a token in the same position, or after as many tokens.

Two sequences are compared at the later one, so that the earlier one is known in full.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from outrider.certify.observed import ObservedTokens
from outrider.stats.evidence import Bet, Floats, Increments, Integers, detectable_reuse

Pairs = NDArray[np.int64]
"""Indices of tokens, the earlier and the later. [2, P]"""


def by_distance(observed: ObservedTokens, num_distances: int) -> Iterator[tuple[str, Pairs]]:
    """Pair each token with those 1, 2 ... ``num_distances`` places before; yields names and pairs."""
    for distance in range(1, num_distances + 1):
        later = distance + np.flatnonzero(observed.positions[distance:] >= distance)
        yield f"distance {distance}", np.stack((later - distance, later))


def in_round_before(observed: ObservedTokens) -> Pairs:
    """Pair each token with that in the same place of the previous round."""
    own = _keys(observed.texts, observed.rounds, observed.places)
    return _pairs(own, _keys(observed.texts, observed.rounds - 1, observed.places))


def between(observed: ObservedTokens, *, has_rounds: bool) -> Iterator[tuple[str, Pairs]]:
    """Yield the kinds of pairs between two sequences: names and pairs."""
    if has_rounds:
        own = _keys(observed.steps, observed.slots, observed.places)
        beside = [_pairs(own, _keys(observed.steps, observed.slots + side, observed.places)) for side in (-1, 1)]
        yield "slot beside, same step", np.concatenate(beside, axis=1)
        yield "same slot, same round", _same(_keys(observed.slots, observed.rounds, observed.places))
        yield "same slot, same length", _same(_keys(observed.slots, observed.lengths))
    yield "sequence before, same position", _same(_keys(observed.positions))
    yield "sequence before, same length", _same(_keys(observed.lengths))


def products(observed: ObservedTokens, pairs: Pairs) -> Increments:
    """Rank of each token times the sum of its partners' ranks."""
    earlier, later = pairs
    stakes: Floats = np.bincount(later, weights=observed.rank.values[earlier], minlength=len(observed)).astype(float)
    return observed.rank.scaled(stakes)


def detectable_share(
    observed: ObservedTokens, pairs: Pairs, products: Increments, bet: Bet, level: float
) -> float | None:
    """Smallest share of tokens drawn with their partner's number that would have been detected (``detectable_reuse``).

    A rank is the mean of its uniform number, given the token. If two tokens share a number, the mean product of their
    ranks is 12 times that of their variances, as long as what the tokens leave open of it is uncorrelated.
    """
    variances = observed.rank.moments[0]
    reused = 12 * float((variances[pairs[0]] * variances[pairs[1]]).sum())
    return detectable_reuse(products, bet, level, reused)


_Keys = list[tuple[int, ...]]  # for each token


def _keys(*columns: Integers) -> _Keys:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _same(keys: _Keys) -> Pairs:
    """Pair each token with the latest before it that has the same key."""
    return _pairs(keys, keys)


def _pairs(own: _Keys, wanted: _Keys) -> Pairs:
    """Pair each token with the latest before it whose own key is the wanted one."""
    latest: dict[tuple[int, ...], int] = {}
    found = []
    for index, (mine, partner) in enumerate(zip(own, wanted, strict=True)):
        if partner in latest:
            found.append((latest[partner], index))
        latest[mine] = index
    return np.array(found, dtype=np.int64).reshape(-1, 2).T
