"""What is observed of tokens: against rows worked out by hand, and at the edge of what filters leave."""

import numpy as np
import pytest
import torch

from outrider.certify.observed import MAX_RATIO, MAX_SURPRISE, GeneratedText, draft_rows, observe
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.measure.along import force_drafts
from outrider.measure.teacher_forcing import Text
from outrider.options import Sampling
from outrider.sampling.probs import Settings, normalise, to_probs
from round_drafters import head, two_tables
from toys import llama_pair, random_table, table_lm, table_pair

TEXTS = [
    GeneratedText(0, 0, (3, 1), (4, 1, 5, 0, 2), (0, 1, 2, 0, 0)),
    GeneratedText(1, 1, (2,), (2, 2, 3), (0, 1, 0)),
    GeneratedText(2, 0, (3, 1), (1,), (0,)),
]


def test_the_statistics_are_those_of_the_rows() -> None:
    """Token by token in plain Python, for chains whose rows are known."""
    target, drafter = table_pair(6)
    sampling = Sampling(temperature=0.7, top_k=4)
    seen = observe(target, drafter, sampling, TEXTS, seed=5, batch_size=2)
    settings = Settings.of([sampling], 6, torch.device("cpu"))
    p_table, q_table = (to_probs(lm.model.table[None], settings)[0].numpy() for lm in (target, drafter.lm))
    at = 0
    for text in TEXTS:
        whole = (*text.prompt_ids, *text.token_ids)
        uniforms = np.random.default_rng([5, text.index]).random(len(text.token_ids))
        for i, y in enumerate(text.token_ids):
            before = whole[len(text.prompt_ids) + i - 1]
            p, q = p_table[before], q_table[before]
            assert (seen.places[at], seen.positions[at], seen.prompts[at]) == (text.places[i], i, text.prompt)
            assert seen.drift.distances[at] == pytest.approx(np.abs(p - q).sum() / 2)
            assert seen.is_forbidden[at] == (p[y] == 0)
            if p[y] > 0:
                order = sorted(range(6), key=lambda v: (q[v] - p[v], v))
                pit = sum(p[v] for v in order[: order.index(y)]) + uniforms[i] * p[y]
                assert seen.pits[at] == pytest.approx(pit)
                for increments, x in (
                    (seen.statistics["score"], [min(b / a, MAX_RATIO) if a else 0 for a, b in zip(p, q, strict=True)]),
                    (seen.statistics["likelihood"], [min(-np.log(a), MAX_SURPRISE) if a else 0 for a in p]),
                    (seen.statistics["rank"], [sum(p[:v]) + p[v] / 2 for v in range(6)]),
                ):
                    centred = np.array(x) - p @ np.array(x)
                    assert increments.values[at] == pytest.approx(centred[y])
                    assert increments.moments[:, at] == pytest.approx([p @ centred**k for k in (2, 3, 4)])
                    assert increments.highs[at] == pytest.approx(max(centred[p > 0]))
                    assert increments.lows[at] == pytest.approx(-min(centred[p > 0]))
            at += 1
    assert at == len(seen) and 0 < seen.is_forbidden.sum() < len(seen)


def test_a_look_up_is_asked_at_every_token() -> None:
    """q is one-hot where something is proposed, else p."""
    target = table_lm(random_table(6, 0))
    drafter: Drafter = ngram_drafter()
    ((chunk, p, q),) = draft_rows(target, drafter, Sampling(), [Text((1, 2, 1, 2, 5, 4), 2)])
    assert chunk.ids.tolist() == [1, 2, 5, 4]
    assert torch.equal(q[0], p[0]) and torch.equal(q[3], p[3])  # after 1 2, and after 1 2 1 2 5
    assert q[1].tolist() == [0, 0, 1, 0, 0, 0]  # 1 was followed by 2
    assert q[2].tolist() == [0, 1, 0, 0, 0, 0]  # 1 2 was followed by 1
    np.testing.assert_allclose(
        p, normalise(to_probs(target.model.table[[2, 1, 2, 5]][None], Settings.of([Sampling()], 6, p.device)))[0]
    )


def test_q_is_that_of_the_place_in_the_round() -> None:
    """A drafter with one table for the first token of a round and another for the rest. At K = 2 the token at place 2
    was not drafted, and counts as the first of a round."""
    tables = [random_table(6, seed) for seed in range(3)]
    target, drafter = table_lm(tables[0]), two_tables(*tables[1:])
    sampling = Sampling(temperature=0.7)
    settings = Settings.of([sampling], 6, torch.device("cpu"))
    p, *q = (to_probs(table[None], settings)[0] for table in tables)
    for k in (2, 3):
        seen = observe(target, drafter, sampling, TEXTS, seed=5, batch_size=2, num_draft_tokens=k)
        want = []
        for text in TEXTS:
            before = [text.prompt_ids[-1], *text.token_ids]
            for last, place in zip(before, text.places, strict=False):
                want.append(float((p[last] - q[0 < place < k][last]).abs().sum()) / 2)
        np.testing.assert_allclose(seen.drift.distances, want, rtol=0, atol=1e-12)


def test_q_of_a_head_is_its_own() -> None:
    """By forcing, in whatever chunks p comes; p is that of teacher forcing."""
    target, _ = llama_pair()
    drafter = head(target)
    texts = [Text((*(i % 60 for i in range(5, 200)),), 130), Text((1, 2, 3, 4), 1), Text((7, 7), 1)]
    samplings = [Sampling(max_new_tokens=200)] * len(texts)
    want = {}
    for one in force_drafts(target, drafter, texts, samplings, 1):
        for row, place, q in zip(one.rows.tolist(), one.places.tolist(), one.q[:, 0], strict=True):
            want[row, place] = q
    taken = [0] * len(texts)
    for (chunk, p, q), (_, p_alone, _) in zip(
        draft_rows(target, drafter, Sampling(), texts), draft_rows(target, NO_DRAFTER, Sampling(), texts), strict=True
    ):
        assert torch.equal(p, p_alone)
        for i, row in enumerate(chunk.rows.tolist()):
            torch.testing.assert_close(q[i], want.pop((row, taken[row])), rtol=0, atol=1e-9)
            taken[row] += 1
        assert float((p - q).abs().sum(-1).mean()) > 0.1
    assert not want


@pytest.mark.parametrize(
    ("options", "third", "is_edge"),
    [
        ({"top_k": 2}, 1.0 - 1e-5, True),
        ({"top_k": 2}, 0.9, False),
        ({"min_p": 0.5}, 2.0 - 0.693148, True),
        ({"min_p": 0.5}, 1.2, False),
    ],
    ids=str,
)
def test_rounding_may_move_a_token_over_the_edge(options: dict, third: float, is_edge: bool) -> None:
    """The token that was said is forbidden; in float32 a logit that is off by 1e-3 may explain it, one by 0.1 not."""
    table = torch.tensor([[2.0, 1.0 if "top_k" in options else 1.9, third, -5.0]] * 4)
    target = table_lm(table)
    text = GeneratedText(0, 0, (0,), (2, 0), (0, 0))
    seen = observe(target, model_drafter(table_lm(table)), Sampling(**options), [text], seed=0, batch_size=1)
    assert seen.is_at_edge.tolist() == [is_edge, False]
    assert seen.is_forbidden.tolist() == [not is_edge, False]


def test_in_bfloat16_top_p_still_forbids() -> None:
    """The tail that rounding may add to 0.8 is a part of the tail, not all of it."""
    probs = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])
    table = probs.log().expand(5, 5).to(torch.bfloat16).contiguous()
    text = GeneratedText(0, 0, (0,), (4, 2), (0, 0))
    target = table_lm(table)
    seen = observe(target, model_drafter(table_lm(table)), Sampling(top_p=0.7), [text], seed=0, batch_size=1)
    assert seen.is_forbidden.tolist() == [True, False] and seen.is_at_edge.tolist() == [False, True]


def test_what_hardly_varies_is_nothing() -> None:
    """A draft that is the target, but for the last bits of its rows."""
    table = random_table(6, 0)
    draft = model_drafter(table_lm(table * (1 + 1e-15)))
    seen = observe(table_lm(table), draft, Sampling(), TEXTS, seed=5, batch_size=2)
    score = seen.statistics["score"]
    assert not score.moments.any() and not score.values.any() and seen.statistics["likelihood"].moments.all()
