"""The acceptance rules: their identity, their thresholds, and the exact law of what they put out."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from candidate_rows import on_candidates
from enumeration import Table, outcomes, round_laws
from outrider.certify.controls import ACCEPT_ALL
from outrider.options import Sampling
from outrider.records import Draft
from outrider.sampling.noise import RoundUniforms
from outrider.sampling.probs import Settings, to_probs
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, Rule, residual
from reference import LENGTHS, RESTS, THRESHOLDS, Law, Probs, cells, invert, law_distance, rounds_law
from toys import random_table

UNIFORM_RULES = [REJECTION, BLOCK]
# On full rows in PyTorch, and on candidates in C++.
ON_ALL_ROWS = {
    **{rule.name: rule for rule in UNIFORM_RULES},
    **{f"{rule.name} on candidates": on_candidates(rule) for rule in UNIFORM_RULES},
    **{f"{rule.name} on rows of all tokens": on_candidates(rule, lists_all=True) for rule in UNIFORM_RULES},
}

# Rows of probabilities: some weights are zero, some tiny, and p and q may be equal, disjoint or one-hot.
WEIGHTS = st.sampled_from([0.0, 1e-12, 1e-3, 0.1, 0.5, 1.0, 2.0])


def _rows(vocab_size: int) -> st.SearchStrategy[Probs]:
    weights = st.lists(WEIGHTS | st.floats(0.0, 1.0), min_size=vocab_size, max_size=vocab_size)
    return weights.filter(lambda row: sum(row) > 1e-6).map(lambda row: [w / math.fsum(row) for w in row])


@given(st.integers(1, 6).flatmap(lambda v: st.tuples(_rows(v), _rows(v))))
@example(([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.25, 0.75]))
@example(([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]))
@example(([0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]))
@example(([0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 1.0, 0.0]))
@example(([0.0, 0.0, 1.0, 0.0], [0.1, 0.2, 0.3, 0.4]))
@example(([1 / 3, 1 / 3, 1 / 3, 0.0], [1 / 3, 1 / 3 - 1e-16, 1 / 3, 1e-16]))
def test_accepted_and_residual_add_up_to_p(rows: tuple[Probs, Probs]) -> None:
    """min(p, q) + (1 - sum min(p, q)) * residual == p to 1e-12. Of equal rows nothing is left, and p would be drawn."""
    p, q = torch.tensor(rows, dtype=torch.float64)
    rest, both = residual(p, q), torch.minimum(p, q)
    assert rest.sum() > 0
    assert not torch.equal(p, q) or torch.allclose(rest / rest.sum(), p, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(both + (1 - both.sum()) * rest / rest.sum(), p, rtol=0.0, atol=1e-12)


def _random_rounds(rng: np.random.Generator, num: int, k: int) -> tuple[Tensor, Draft]:
    """p [B, K+1, V] and a ragged draft. Probabilities are in 64ths, many zero; in a third of the rows p = q."""
    weights = rng.dirichlet([0.4] * 4, size=(num, 2 * k + 1))
    probs = np.apply_along_axis(lambda row: rng.multinomial(64, row), -1, weights) / 64
    p, q = probs[:, : k + 1], probs[:, k + 1 :]
    q = np.where(rng.random((num, k, 1)) < 0.33, p[:, :k], q)
    ids = [[int(rng.choice(4, p=row)) for row in rows] for rows in q]
    num_drafted = torch.tensor(rng.integers(0, k + 1, num))
    return torch.tensor(p), Draft(torch.tensor(ids), torch.tensor(q), num_drafted)


@pytest.mark.parametrize(
    "rule, off_by",
    [(rule, 0.0) for rule in ON_ALL_ROWS.values()] + [(rule, 1e-5) for rule in UNIFORM_RULES],
    ids=[*ON_ALL_ROWS, *(f"{rule.name}, rows that nearly sum to 1" for rule in UNIFORM_RULES)],
)
def test_rules_equal_their_slow_twins(rule: Rule, off_by: float) -> None:
    """1,000 ragged rounds. Half of the uniform numbers lie 1e-9 from a threshold, or from the end of a token's cell,
    also where rows are not quite normalised. Only the token drawn from an (almost) empty rest is left out."""
    rng = np.random.default_rng(1)
    p, draft = _random_rounds(rng, 1000, 4)
    cases, accept, uniforms = [], rng.uniform(1e-6, 1 - 1e-6, (1000, 4)), rng.uniform(1e-6, 1 - 1e-6, 1000)
    for b in range(1000):
        n = int(draft.num_drafted[b])
        rows = p[b].tolist()[: n + 1], draft.probs[b].tolist()[:n], draft.ids[b].tolist()[:n]
        thresholds = THRESHOLDS[rule.name](*rows)
        for i, threshold in enumerate(thresholds):
            if rng.random() < 0.5 and 1e-6 < threshold < 1 - 1e-6:
                accept[b, i] = threshold + rng.choice([-1e-9, 1e-9])
        length = LENGTHS[rule.name](thresholds, accept[b, :n])
        rest = RESTS[rule.name](*rows, length)
        if sum(rest) > 1e-3 and rng.random() < 0.5:
            _, low, high = list(cells(rest))[-1 if rng.random() < 0.5 else 0]
            uniforms[b] = high - 1e-9 if high < 0.999 else low + 1e-9
        cases.append((*rows, length, rest))
    noise = RoundUniforms.of(torch.full((1000, 4), torch.nan), torch.tensor(accept), torch.tensor(uniforms))
    p_scale, q_scale = (torch.tensor(1 + off_by * rng.uniform(-1, 1, (1000, n, 1))) for n in (5, 4))
    verdict = rule.verify(p * p_scale, dataclasses.replace(draft, probs=draft.probs * q_scale), noise)
    num_compared = 0
    for b, (p_rows, q_rows, ids, length, rest) in enumerate(cases):
        assert verdict.num_accepted[b] == length
        pairs = [[p_rows[i][ids[i]], q_rows[i][ids[i]]] for i in range(len(ids))]
        assert verdict.drafted_probs[b, : len(ids)].numpy() == pytest.approx(np.array(pairs).reshape(-1, 2))
        if sum(rest) > 1e-3:
            assert verdict.next_ids[b] == invert(rest, uniforms[b])
            num_compared += 1
    assert num_compared > 960


def test_gumbel_takes_what_the_target_would_take() -> None:
    """1,000 ragged rounds, against plain loops: the argmax of log p + noise at each position."""
    rng = np.random.default_rng(2)
    p, draft = _random_rounds(rng, 1000, 4)
    noise = rng.gumbel(size=(1000, 6, 4))
    taken = [
        [max(range(4), key=lambda v: math.log(row[v]) + g[v] if row[v] > 0 else -math.inf) for row, g in rows]
        for rows in (zip(p[b].tolist(), noise[b], strict=False) for b in range(1000))
    ]
    agreeing = torch.tensor(taken)[:, :4]
    ids = torch.where(torch.tensor(rng.random((1000, 4)) < 0.7), agreeing, draft.ids)
    given = SimpleNamespace(at=lambda i: SimpleNamespace(values=lambda: torch.tensor(noise)[:, i]))
    verdict = GUMBEL.verify(p, dataclasses.replace(draft, ids=ids), given)
    for b in range(1000):
        n = int(draft.num_drafted[b])
        length = next((i for i in range(n) if ids[b, i] != taken[b][i]), n)
        assert verdict.num_accepted[b] == length
        assert verdict.next_ids[b] == taken[b][length]
    assert verdict.num_accepted.bincount(minlength=5).min() > 20


PLAIN, TOP_K, TOP_P = Sampling(), Sampling(top_k=2), Sampling(top_p=0.7)
COLD, MIN_P, GREEDY = Sampling(temperature=0.5), Sampling(min_p=0.3), Sampling(temperature=0.0)
SIDES = [  # options of the target and of the draft
    (PLAIN, PLAIN),
    (TOP_K, TOP_K),
    (TOP_P, TOP_P),
    (PLAIN, TOP_K),
    (TOP_K, PLAIN),
    (TOP_P, Sampling(temperature=0.5, top_k=2)),
    (MIN_P, TOP_P),
    (COLD, PLAIN),
    (GREEDY, PLAIN),
    (PLAIN, GREEDY),
]


def _table(seed: int, sampling: Sampling, scale: float = 1.2) -> Table:
    settings = Settings.of([sampling] * 3, 3, torch.device("cpu"))
    rows = to_probs(random_table(3, seed, scale)[:, None], settings)[:, 0]
    rows = (rows * 2**20).round() / 2**20
    return rows.scatter_add(1, rows.argmax(1, keepdim=True), 1 - rows.sum(1, keepdim=True)).tolist()


def _markov_law(table: Table, first: int, num_tokens: int) -> Law:
    return rounds_law(lambda text: {(v,): w for v, w in enumerate(table[(first, *text)[-1]]) if w > 0}, num_tokens)


def _assert_law(laws: dict[tuple[int, int], Law], target: Table, drafted_after: list[int], num_tokens: int) -> None:
    """The rounds' law of the first tokens is the target's to 1e-12. ``drafted_after[i]``: tokens drafted after i."""
    for first in range(3):
        law = rounds_law(lambda text, first=first: laws[(first, *text)[-1], drafted_after[len(text)]], num_tokens)
        assert law_distance(law, _markov_law(target, first, num_tokens)) < 1e-12


@pytest.mark.parametrize("rule", ON_ALL_ROWS.values(), ids=ON_ALL_ROWS)
def test_output_law_is_the_targets(rule: Rule) -> None:
    """Four tokens, from one to four rounds: all with K drafts; of 0 to 3 drafts in one batch, padded with rubbish; and
    one-hot drafts, ragged as well, in each of the 27 ways to propose one token after each."""
    for (of_target, of_draft), k in itertools.product(SIDES, (1, 2, 3)):
        target, draft = _table(k, of_target), _table(k + 10, of_draft)
        laws = round_laws(outcomes(rule, rule.name, target, draft, [k]))
        _assert_law(laws, target, [k] * 4, num_tokens=4)
    target, draft = _table(2, PLAIN), _table(3, PLAIN)
    laws = round_laws(outcomes(rule, rule.name, target, draft, [0, 1, 2, 3]))
    for drafted_after in ([3, 1, 0, 2], [0, 3, 2, 1], [1, 2, 3, 0], [2, 0, 1, 3]):
        _assert_law(laws, target, drafted_after, num_tokens=4)
    for successors in itertools.product(range(3), repeat=3):
        target = _table(4, TOP_K if successors[0] == 2 else PLAIN)
        draft = [[float(v == successor) for v in range(3)] for successor in successors]
        laws = round_laws(outcomes(rule, rule.name, target, draft, [1, 2]))
        _assert_law(laws, target, [2, 2, 1, 2], num_tokens=4)
    found = outcomes(rule, rule.name, target, target, [3])
    assert {one.num_accepted for one in found} == {3}


def test_enumeration_sees_a_wrong_rule() -> None:
    """The control: one rule's cases through the other, and a rule that accepts everything, are off by far more."""
    target, draft = _table(0, PLAIN), _table(10, PLAIN)
    for rule, name in ((BLOCK, "rejection"), (REJECTION, "block"), (ACCEPT_ALL, "rejection")):
        laws = round_laws(outcomes(rule, name, target, draft, [2]))
        with pytest.raises(AssertionError):
            _assert_law(laws, target, [2] * 4, num_tokens=4)
