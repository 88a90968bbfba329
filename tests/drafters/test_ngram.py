"""Prompt look-up, against a search in plain Python."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.lookups import ngram_drafter
from outrider.measure.along import proposals
from outrider.measure.teacher_forcing import Text

K = 4


def _expected(text: Sequence[int], wanted: int, max_ngram: int) -> list[int]:
    """What followed the longest suffix that occurs earlier: of several places the one with most to offer, then the
    latest."""
    for n in range(min(max_ngram, len(text)), 0, -1):
        suffix = text[len(text) - n :]
        ends = [j + n for j in range(len(text) - n) if text[j : j + n] == suffix]
        offers = [(min(len(text) - end, wanted), end) for end in ends if wanted]
        if offers:
            length, end = max(offers)
            return list(text[end : end + length])
    return []


def _proposed(texts: Sequence[Sequence[int]], wanted: Sequence[int], max_ngram: int) -> list[list[int]]:
    """The proposals after whole texts."""
    scored = [Text((*text, 0), len(text)) for text in texts]
    found = proposals(ngram_drafter(max_ngram), scored, [[num] for num in wanted])
    return [ids for (ids,) in found]


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4)


@given(TEXTS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_proposals_equal_the_slow_twins(texts: list[list[int]], max_ngram: int, rng: random.Random) -> None:
    """Ragged texts over three tokens, each with its own number of wanted tokens."""
    wanted = [rng.randrange(K + 1) for _ in texts]
    expected = [_expected(text, n, max_ngram) for text, n in zip(texts, wanted, strict=True)]
    assert _proposed(texts, wanted, max_ngram) == expected
