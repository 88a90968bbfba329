"""What is observed of tokens, against rows by hand, and at the edge of what filters leave; and pairs of tokens."""

from typing import Any

import numpy as np
import pytest
import torch

from outrider.certify.design import pairs_by_test, products_of
from outrider.certify.observed import MAX_RATIO, MAX_SURPRISE, GeneratedText, observe
from outrider.drafters.model import model_drafter
from outrider.options import Sampling
from outrider.sampling.probs import Settings, to_probs
from round_drafters import two_tables
from toys import random_table, table_lm, table_pair

# Rounds: (4 1 5) (0) (2), (2 2) (3), (1 1), and in the first slot after the first sequence (5) (3 3).
TEXTS = [
    GeneratedText(0, 0, (3, 1), (4, 1, 5, 0, 2), (0, 1, 2, 0, 0), slot=0, first_step=0),
    GeneratedText(1, 1, (2,), (2, 2, 3), (0, 1, 0), slot=1, first_step=0),
    GeneratedText(2, 0, (3, 1), (1, 1), (0, 1), slot=2, first_step=1),
    GeneratedText(3, 1, (2,), (5, 3, 3), (0, 0, 1), slot=0, first_step=3),
]
CPU = torch.device("cpu")


def test_the_statistics_are_those_of_the_rows() -> None:
    """Token by token in plain Python, for chains whose rows are known."""
    target, drafter = table_pair(6)
    sampling = Sampling(temperature=0.7, top_k=4)
    seen = observe(target, drafter, sampling, TEXTS, seed=5, batch_size=2)
    settings = Settings.of([sampling], 6, CPU)
    p_table, q_table = (to_probs(lm.model.table[None], settings)[0].numpy() for lm in (target, drafter.lm))
    at = 0
    for text in TEXTS:
        whole = (*text.prompt_ids, *text.token_ids)
        uniforms = np.random.default_rng([5, text.index]).random(len(text.token_ids))
        for i, y in enumerate(text.token_ids):
            before = whole[len(text.prompt_ids) + i - 1]
            p, q = p_table[before], q_table[before]
            assert (seen["places"][at], seen["positions"][at], seen["prompts"][at]) == (text.places[i], i, text.prompt)
            assert seen.drift.distances[at] == pytest.approx(np.abs(p - q).sum() / 2)
            assert seen["is_forbidden"][at] == (p[y] == 0)
            if p[y] > 0:
                order = sorted(range(6), key=lambda v: (q[v] - p[v], v))
                pit = sum(p[v] for v in order[: order.index(y)]) + uniforms[i] * p[y]
                assert seen["pits"][at] == pytest.approx(pit)
                for increments, x in (
                    (seen.statistic("score"), [min(b / a, MAX_RATIO) if a else 0 for a, b in zip(p, q, strict=True)]),
                    (seen.statistic("likelihood"), [min(-np.log(a), MAX_SURPRISE) if a else 0 for a in p]),
                    (seen.statistic("rank"), [sum(p[:v]) + p[v] / 2 for v in range(6)]),
                ):
                    centred = np.array(x) - p @ np.array(x)
                    assert increments.values[at] == pytest.approx(centred[y])
                    assert increments.moments[:, at] == pytest.approx([p @ centred**k for k in (2, 3, 4)])
                    assert increments.highs[at] == pytest.approx(max(centred[p > 0]))
                    assert increments.lows[at] == pytest.approx(-min(centred[p > 0]))
            at += 1
    assert at == len(seen) and 0 < seen["is_forbidden"].sum() < len(seen)
    # A draft that is the target, but for the last bits of its rows, is no deviation.
    draft = model_drafter(table_lm(target.model.table * (1 + 1e-15)))
    same = observe(target, draft, Sampling(), TEXTS, seed=5, batch_size=2)
    assert not same.statistic("score").moments.any() and same.statistic("likelihood").moments.all()


def test_q_is_that_of_the_place_in_the_round() -> None:
    """A drafter with two tables. At K = 2 the token at place 2 was not drafted, and counts as a round's first."""
    tables = [random_table(6, seed) for seed in range(3)]
    target, drafter = table_lm(tables[0]), two_tables(*tables[1:])
    sampling = Sampling(temperature=0.7)
    p, *q = (to_probs(table[None], Settings.of([sampling], 6, CPU))[0] for table in tables)
    for k in (2, 3):
        seen = observe(target, drafter, sampling, TEXTS, seed=5, batch_size=2, num_draft_tokens=k)
        want = []
        for text in TEXTS:
            before = [text.prompt_ids[-1], *text.token_ids]
            for last, place in zip(before, text.places, strict=False):
                want.append(float((p[last] - q[0 < place < k][last]).abs().sum()) / 2)
        np.testing.assert_allclose(seen.drift.distances, want, rtol=0, atol=1e-12)


TAIL = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]).log().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "row", "said", "is_edge"),
    [
        ({"top_k": 2}, torch.tensor([2.0, 1.0, 1.0 - 1e-5, -5.0]), 2, True),
        ({"min_p": 0.5}, torch.tensor([2.0, 1.9, 2.0 - 0.693148, -5.0]), 2, True),
        # In bfloat16 the tail that rounding may add to 0.8 is a part of the tail, not all of it.
        ({"top_p": 0.7}, TAIL, 4, False),
        ({"top_p": 0.7}, TAIL, 2, True),
    ],
    ids=str,
)
def test_rounding_may_move_a_token_over_the_edge(options: Any, row: torch.Tensor, said: int, is_edge: bool) -> None:
    """The token that was said is forbidden; in float32 a logit that is off by 1e-3 may explain it, one by 0.1 not."""
    target = table_lm(row.repeat(len(row), 1))
    text = GeneratedText(0, 0, (0,), (said, 0), (0, 0))
    seen = observe(target, model_drafter(target), Sampling(**options), [text], seed=0, batch_size=1)
    assert seen["is_at_edge"].tolist() == [is_edge, False]
    assert seen["is_forbidden"].tolist() == [not is_edge, False]


def test_pairs_of_tokens_by_hand() -> None:
    observed = observe(*table_pair(6), Sampling(), TEXTS, seed=5, batch_size=4)

    def kinds(test: str, num_tokens: int = 13, has_rounds: bool = True) -> dict[str, list[tuple[int, int]]]:
        pairs = pairs_by_test(observed.part(slice(num_tokens)), 4, has_rounds=has_rounds).get(test, {})
        return {name: sorted(map(tuple, found.T.tolist())) for name, found in pairs.items()}

    within = kinds("rank-by-distance")
    assert within["distance 1"] == [(0, 1), (1, 2), (2, 3), (3, 4), (5, 6), (6, 7), (8, 9), (10, 11), (11, 12)]
    assert within["distance 3"] == [(0, 3), (1, 4)] and within["distance 4"] == [(0, 4)]
    assert kinds("rank-by-round-before") == {"round before": [(0, 3), (3, 4), (5, 7), (10, 11)]}
    positions = [(0, 5), (1, 6), (2, 7), (5, 8), (6, 9), (7, 12), (8, 10), (9, 11)]
    lengths = [(0, 6), (1, 7), (5, 10), (6, 8), (7, 9), (8, 11), (9, 12)]
    of_others = {"sequence before, same position": positions, "sequence before, same length": lengths}
    assert kinds("rank-by-sequence") == of_others | {
        "slot beside, same step": [(0, 5), (1, 6), (3, 7), (7, 8)],  # slots 0 and 1; then 0, 1 and 2; then 0 alone
        "same slot, same round": [(0, 10), (3, 11)],
        "same slot, same length": [(0, 11), (1, 12)],
    }
    assert kinds("rank-by-sequence", has_rounds=False) == of_others
    assert not kinds("rank-by-round-before", has_rounds=False)
    # A part of a sequence, as in a sample that was cut, has no partners beyond it.
    assert kinds("rank-by-round-before", 4) == {"round before": [(0, 3)]}
    # Values and moments of a token with two partners.
    found, rank = products_of(observed, np.array([[0, 1, 2], [4, 4, 7]])), observed.statistic("rank")
    factor = rank.values[0] + rank.values[1]
    want = np.zeros(13)
    want[4], want[7] = factor * rank.values[4], rank.values[2] * rank.values[7]
    assert np.allclose(found.values, want)
    assert np.allclose(found.moments[:, 4], [factor**n * rank.moments[n - 2, 4] for n in (2, 3, 4)])
    assert np.allclose([-found.lows[4], found.highs[4]], sorted((-factor * rank.lows[4], factor * rank.highs[4])))
