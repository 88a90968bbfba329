"""Pairs of tokens that a mistake may give the same random numbers, by hand; and what their ranks show."""

import numpy as np

from outrider.certify.design import pairs_by_test, products_of
from outrider.certify.observed import GeneratedText, ObservedTokens, observe
from outrider.options import Sampling
from toys import table_pair

# Rounds: (4 1 5) (0) (2), (2 2) (3), (1 1), and in the first slot after the first sequence (5) (3 3).
TEXTS = [
    GeneratedText(0, 0, (3, 1), (4, 1, 5, 0, 2), (0, 1, 2, 0, 0), slot=0, first_step=0),
    GeneratedText(1, 1, (2,), (2, 2, 3), (0, 1, 0), slot=1, first_step=0),
    GeneratedText(2, 0, (3, 1), (1, 1), (0, 1), slot=2, first_step=1),
    GeneratedText(3, 1, (2,), (5, 3, 3), (0, 0, 1), slot=0, first_step=3),
]


def _observed() -> ObservedTokens:
    target, drafter = table_pair(6)
    return observe(target, drafter, Sampling(), TEXTS, seed=5, batch_size=4)


def _listed(pairs: np.ndarray) -> list[tuple[int, int]]:
    return sorted(map(tuple, pairs.T.tolist()))


def test_pairs_of_a_sequence() -> None:
    observed = _observed()
    pairs = pairs_by_test(observed, 4, has_rounds=True)
    kinds = {name: _listed(of_kind) for name, of_kind in pairs["rank-by-distance"].items()}
    assert kinds["distance 1"] == [(0, 1), (1, 2), (2, 3), (3, 4), (5, 6), (6, 7), (8, 9), (10, 11), (11, 12)]
    assert kinds["distance 3"] == [(0, 3), (1, 4)] and kinds["distance 4"] == [(0, 4)]
    assert _listed(pairs["rank-by-round-before"]["round before"]) == [(0, 3), (3, 4), (5, 7), (10, 11)]


def test_pairs_of_two_sequences() -> None:
    found = pairs_by_test(_observed(), 4, has_rounds=True)["rank-by-sequence"]
    kinds = {name: _listed(pairs) for name, pairs in found.items()}
    # Step 0: slots 0 and 1; step 1: slots 0, 1 and 2; then slot 0 is alone.
    assert kinds["slot beside, same step"] == [(0, 5), (1, 6), (3, 7), (7, 8)]
    assert kinds["same slot, same round"] == [(0, 10), (3, 11)]
    assert kinds["same slot, same length"] == [(0, 11), (1, 12)]
    assert kinds["sequence before, same position"] == [
        (0, 5),
        (1, 6),
        (2, 7),
        (5, 8),
        (6, 9),
        (7, 12),
        (8, 10),
        (9, 11),
    ]
    assert kinds["sequence before, same length"] == [(0, 6), (1, 7), (5, 10), (6, 8), (7, 9), (8, 11), (9, 12)]
    without_rounds = pairs_by_test(_observed(), 4, has_rounds=False)
    assert len(without_rounds["rank-by-sequence"]) == 2 and "rank-by-round-before" not in without_rounds


def test_a_part_of_a_sequence_has_no_partners_before_it() -> None:
    """As in a sample that was cut."""
    pairs = pairs_by_test(_observed().first(4), 4, has_rounds=True)
    assert all(of_kind.max(initial=0) < 4 for of_kind in pairs["rank-by-distance"].values())
    assert _listed(pairs["rank-by-round-before"]["round before"]) == [(0, 3)]


def test_products_of_ranks() -> None:
    """Values and moments of a token with two partners."""
    observed = _observed()
    pairs = np.array([[0, 1, 2], [4, 4, 7]])
    found, rank = products_of(observed, pairs), observed.statistics["rank"]
    values = rank.values
    factor = values[0] + values[1]
    assert np.isclose(found.values[4], factor * values[4]) and np.isclose(found.values[7], values[2] * values[7])
    assert not found.values[[0, 1, 2, 3, 5, 6]].any()
    for index, power in enumerate((2, 3, 4)):
        assert np.isclose(found.moments[index, 4], factor**power * rank.moments[index, 4])
    ends = sorted((-factor * rank.lows[4], factor * rank.highs[4]))
    assert np.allclose([-found.lows[4], found.highs[4]], ends)
