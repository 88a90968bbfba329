"""The tests of a certificate, simulated on laws that depend on what came before and are known exactly: alarms are false
at most as often as stated, and what is said to be detectable is detected."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.certify.evidence import (
    Bet,
    Drift,
    Finding,
    Increments,
    detectable,
    holm,
    log_mgfs,
    mean_wealth,
    p_value,
    pit_tests,
    tokens_needed,
    tokens_to_alarm,
)
from outrider.certify.observed import statistics_of

VOCAB = 5


class Judged:
    """The statistics of many runs of chains, drawn from (1 - mixed) p + mixed q; all of a run's tokens in a row."""

    def __init__(self, seed: int, num_runs: int, num_tokens: int, mixed: float = 0.0) -> None:
        rows, rng = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        p, q = rows.dirichlet([0.5] * VOCAB, size=VOCAB), rows.dirichlet([0.5] * VOCAB, size=VOCAB)
        q = 0.5 * p + 0.5 * q
        walks = np.zeros((num_runs, num_tokens + 1), dtype=np.int64)
        edges = ((1 - mixed) * p + mixed * q).cumsum(axis=1)
        for j in range(num_tokens):
            walks[:, j + 1] = (rng.random((num_runs, 1)) > edges[walks[:, j]][:, :-1]).sum(axis=1)
        before, after = walks[:, :-1].ravel(), walks[:, 1:].ravel()
        uniforms = torch.tensor(rng.random(len(before)))
        columns = statistics_of(torch.tensor(p)[before], torch.tensor(q)[before], torch.tensor(after), uniforms)
        self.columns = {name: column.numpy().reshape(num_runs, num_tokens) for name, column in columns.items()}

    def increments(self, name: str, run: int) -> Increments:
        moments = np.stack([self.columns[f"{name}_m{power}"][run] for power in (2, 3, 4)])
        values, lows, highs = (self.columns[f"{name}_{part}"][run] for part in ("values", "lows", "highs"))
        return Increments(values, moments, lows, highs)

    def drift(self, run: int) -> Drift:
        return Drift(*(self.columns[name][run] for name in ("drift", "drift_m2", "distance")))


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.floats(-2, 2))
def test_the_bound_of_the_mgf_is_one(points: list[float], theta: float) -> None:
    """For a uniform law over points: never below the truth; for small stakes hardly above it."""
    x = np.array(points) - np.mean(points)
    one = Increments(x[:1], np.array([[np.mean(x**k)] for k in (2, 3, 4)]), -x.min(keepdims=True), x.max(keepdims=True))
    if theta == 0:
        return
    got, want = float(log_mgfs(one, theta)[0]), math.log(np.mean(np.exp(theta * x)))
    assert got >= want - 1e-12
    if abs(theta) < 0.05:
        assert got <= want * 1.02 + 1e-12


def test_wealth_is_a_valid_p_value() -> None:
    """2,000 runs of 60 tokens, too few for a normal approximation. If P(p <= a) <= a, more alarms: under 1e-6."""
    nothing = Increments(np.zeros(4), np.zeros((3, 4)), np.zeros(4), np.zeros(4))
    assert Bet(0.3).log_wealth(nothing) == pytest.approx(0)  # two accounts of 1/2 each
    judged = Judged(3, 2000, 60)
    bet = Bet.for_sample(judged.increments("likelihood", 0), 60, 0.01)
    logs = [bet.log_wealth(judged.increments("likelihood", run)) for run in range(2000)]
    p = np.array(list(map(p_value, logs)))
    for level in (0.001, 0.01, 0.1):
        assert (p <= level).sum() <= stats.binom.isf(1e-6, 2000, level)


def test_pits_are_uniform() -> None:
    """30,000 of them; false alarm 1e-6 each. And those of a law that leans to the draft are not."""
    right, wrong = Judged(5, 1, 30_000), Judged(5, 1, 30_000, mixed=0.3)
    assert all(finding.p > 1e-6 for finding in pit_tests(right.columns["pits"][0]))
    assert all(finding.p < 1e-9 for finding in pit_tests(wrong.columns["pits"][0]))


def test_evidence_detects_the_stated_deviation() -> None:
    """400 runs of 1,500 tokens with the deviation that a run is said to find out with 99%: fewer than 379 found come by
    chance less than once in a million times, if it were 98%. With a third of the deviation, not half of them."""
    level, num_tokens = 1e-4, 1500
    null = Judged(6, 1, num_tokens)
    bet = Bet.for_sample(null.increments("score", 0), num_tokens, level)
    least = detectable(null.increments("score", 0), null.drift(0), bet, level)
    assert least is not None
    mean_distance = float(null.drift(0).distances.mean())
    found = {}
    for share in (1.0, 0.3):
        judged = Judged(6, 400, num_tokens, mixed=share * least / mean_distance)
        found[share] = sum(p_value(bet.log_wealth(judged.increments("score", r))) <= level for r in range(400))
    assert found[1.0] >= 379
    assert found[0.3] < 200
    needed = tokens_needed(null.increments("score", 0), null.drift(0), least, level)
    assert needed == pytest.approx(num_tokens, rel=0.05)
    assert tokens_to_alarm(1.0, 500, level) > tokens_to_alarm(0.01, 500, level) > 2 * 500


def test_holm_bonferroni_corrects_p_values() -> None:
    """By hand, for three tests at 0.05: 0.05/3, 0.05/2, 0.05; after the first that is no alarm, none is."""
    judged = holm([Finding("a", 0, 0.04), Finding("b", 0, 0.001), Finding("c", 0, 0.03)], 0.05)
    assert [one.is_alarm for one in judged] == [False, True, False]
    assert [one.threshold for one in judged] == [0.0, pytest.approx(0.05 / 3), 0.025]
    assert all(one.is_alarm for one in holm([Finding("a", 0, 0.04), Finding("b", 0, 0.0)], 0.05))
    assert mean_wealth([math.log(5.0)], 3) == pytest.approx(math.log(7 / 3))  # idle accounts hold 1
