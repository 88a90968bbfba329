"""The noise: the published generator, keyed as it says, and with the laws it claims."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import reference
from outrider.sampling import noise as noise_module
from outrider.sampling.noise import (
    GumbelNoise,
    NoiseAhead,
    RoundUniforms,
    gumbels,
    philox_4x32,
    round_uniforms,
    split_words,
)
from outrider.sampling.rules import GUMBEL, REJECTION

WORDS = st.integers(0, 2**32 - 1)
SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(1, 2**31)

# Random123, examples/kat_vectors, "philox4x32 10".
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@given(st.lists(st.tuples(*[WORDS] * 6), max_size=5))
@example([])
def test_philox_gives_the_published_known_answers(rows: list[tuple[int, ...]]) -> None:
    """And so does its slow twin. At the extremes of the words the uniform numbers do not reach 0 or 1."""
    known = [[int(word, 16) for word in " ".join(one).split()] for one in KNOWN_ANSWERS]
    words = torch.tensor([*rows, *(one[:6] for one in known)])
    expected = [reference.philox(row[:4], row[4:]) for row in words.tolist()]
    assert expected[len(rows) :] == [one[6:] for one in known]
    assert philox_4x32(words[:, :4], words[:, 4:]).tolist() == expected
    low, high = (noise_module._to_uniform(torch.tensor(one), torch.tensor(one)).item() for one in (0, 2**32 - 1))
    assert (low, high) == (2.0**-53, 1.0 - 2.0**-53)
    assert math.isfinite(math.log(-math.log(low))) and math.isfinite(math.log(-math.log(high)))


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=3), st.integers(0, 6))
def test_round_uniforms_are_keyed_by_seed_round_offset_and_use(rows: list[tuple[int, int]], k: int) -> None:
    """Every number is the slow twin's for its counter: (round start, offset, 0, use)."""
    seeds, starts = torch.tensor(rows).T
    assert split_words(seeds).tolist() == [[seed % 2**32, seed // 2**32] for seed, _ in rows]
    uniforms = round_uniforms(seeds, starts, k)
    pairs = [[reference.philox_uniforms(seed, (start, i, 0, 0)) for i in range(k)] for seed, start in rows]
    assert uniforms.draft.tolist() == [[draft for draft, _ in row] for row in pairs]
    assert uniforms.accept.tolist() == [[accept for _, accept in row] for row in pairs]
    assert uniforms.next.tolist() == [reference.philox_uniforms(seed, (start, 0, 0, 1))[0] for seed, start in rows]


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=2), st.sampled_from([1, 2, 7, 64, 65, 130]))
def test_gumbels_are_keyed_by_seed_position_and_token(rows: list[tuple[int, int]], vocab_size: int) -> None:
    """Every number is the slow twin's: the least exponential of its block of 64, by the counter (position, block, 0,
    3), and for all tokens but the one that holds it an exponential of their own, by (position, token // 2, 0, 2)."""
    seeds, positions = torch.tensor(rows).T
    result = gumbels(seeds, positions[:, None], vocab_size)
    assert result.shape == (len(rows), 1, vocab_size)
    for found, (seed, position) in zip(result[:, 0], rows, strict=True):
        expected = []
        for v in range(vocab_size):
            exponential = -math.log(reference.philox_uniforms(seed, (position, v // 64, 0, 3))[0]) / 64
            if reference.philox((position, v // 64, 0, 3), (seed % 2**32, seed >> 32))[2] % 64 != v % 64:
                exponential -= math.log(reference.philox_uniforms(seed, (position, v // 2, 0, 2))[v % 2])
            expected.append(-math.log(exponential))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    noise = GumbelNoise(seeds, positions, vocab_size)
    for offset in (2, 0, 1):  # made as it is asked for, in any order
        assert torch.equal(noise.at(offset).values(), gumbels(seeds, positions[:, None] + offset, vocab_size)[:, 0])


@pytest.mark.parametrize("make_noise", [REJECTION.make_noise, GUMBEL.make_noise], ids=["uniforms", "gumbels"])
def test_noise_made_ahead_is_the_noise_of_the_round(make_noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that advance each at its own pace, and rows that are taken out: always what the round alone would get."""
    monkeypatch.setattr(noise_module, "_MAX_STARTS_AHEAD", 9)  # so that it is often made anew
    generator = torch.Generator().manual_seed(0)
    seeds, lengths = torch.tensor([5, 2**62, 0]), torch.tensor([1, 90, 4])
    ahead = NoiseAhead(make_noise, 3, 7)
    for step in range(60):
        if step == 30:
            seeds, lengths = seeds[[0, 2]], lengths[[0, 2]]
        k = int(torch.randint(4, (1,), generator=generator))
        got = ahead.at(seeds, lengths, k)
        want = make_noise(seeds, lengths, k, 7)
        for offset in range(k):
            a, b = got.at(offset), want.at(offset)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else torch.equal(a.values(), b.values())
        if isinstance(want, RoundUniforms):
            assert torch.equal(got.accept, want.accept) and torch.equal(got.next, want.next)
        lengths = lengths + torch.randint(k + 2, lengths.shape, generator=generator)  # 0: it is at its limit
