"""Perplexity and agreement: against plain forwards, one token at a time, and against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.evals.perplexity import judge, windows
from outrider.options import Sampling
from outrider.scoring.alpha import measure_alpha
from outrider.scoring.teacher_forcing import Text
from outrider.stats.intervals import ratio_of_sums
from toys import as_lm, llama_pair, perturbed, random_table, table_lm, tiny_llama

IDS = torch.randint(60, (150,), generator=torch.Generator().manual_seed(0)).tolist()


@given(st.data())
def test_every_token_but_the_first_is_judged_once(data: st.DataObject) -> None:
    """In order, by at most ``context`` tokens, and after the first window by at least context - stride + 1."""
    ids = range(data.draw(st.integers(2, 80)))
    context = data.draw(st.integers(1, 30))
    stride = data.draw(st.integers(1, context))
    texts = windows(ids, context, stride)
    assert [i for text in texts for i in text.ids[text.num_given :]] == list(ids)[1:]
    assert texts[0].num_given == 1
    assert all(len(text.ids) <= context + 1 for text in texts)
    assert all(text.num_given >= context - stride + 1 for text in texts[1:])


def test_windows_by_hand() -> None:
    assert windows(range(7), 3, 3) == [Text(range(4), 1), Text(range(3, 7), 1)]
    assert windows(range(7), 4, 2) == [Text(range(5), 1), Text(range(2, 7), 3)]
    assert windows(range(2), 100, 100) == [Text(range(2), 1)]


@pytest.mark.parametrize(("context", "stride"), [(32, 32), (32, 12), (200, 200)])
def test_numbers_are_those_of_plain_forwards(context: int, stride: int) -> None:
    """A forward for each token, of the tokens before it in its window, which begins at a multiple of the stride."""
    models = tiny_llama(), perturbed(tiny_llama(), 0.3)
    rows = []
    for place in range(1, len(IDS)):
        begin = max(0, math.ceil((place - context) / stride)) * stride
        p, q = (model(torch.tensor([IDS[begin:place]])).logits[0, -1].softmax(-1) for model in models)
        is_same = float(p.argmax() == q.argmax())
        rows.append(
            [-float(p[IDS[place]].log()), -float(q[IDS[place]].log()), is_same, float(torch.minimum(p, q).sum())]
        )
    want = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
    target, draft = (as_lm(model) for model in models)
    texts = windows(IDS, context, stride)
    result = judge(target, draft, texts, 300, batch_size=3)
    assert result.agreement is not None and result.alpha is not None
    got = [one.nats_per_token.value for one in result.perplexities] + [result.agreement.value, result.alpha.value]
    assert got == pytest.approx(want, abs=1e-9)
    assert 0 < want[2] < 1 and want[0] != pytest.approx(want[1])
    assert (result.num_tokens, result.num_windows) == (149, len(texts))


def test_one_window_is_the_loss_of_hugging_face() -> None:
    model = tiny_llama()
    ids = torch.tensor([IDS])
    (perplexity,) = judge(as_lm(model), None, windows(IDS, 200, 200), 149).perplexities
    assert perplexity.nats_per_token.value == pytest.approx(float(model(ids, labels=ids).loss), abs=1e-6)
    assert perplexity.nats_per_token.low is None  # one window says nothing of the spread


def test_a_markov_chain_needs_no_context() -> None:
    """Whatever the windows, the numbers are those of the rows of the table; the intervals are over the windows."""
    table = random_table(5, 0)
    ids = [i % 5 for i in IDS]
    nats = [-float(table[a].log_softmax(-1)[b]) for a, b in zip(ids, ids[1:], strict=False)]
    for context, stride in ((1, 1), (10, 10), (40, 7), (512, 512)):
        (perplexity,) = judge(table_lm(table), None, windows(ids, context, stride), 200).perplexities
        assert perplexity.nats_per_token.value == pytest.approx(sum(nats) / 149, abs=1e-12)
    (perplexity,) = judge(table_lm(table), None, windows(ids, 50, 50), 200).perplexities
    sums = [sum(nats[:50]), sum(nats[50:100]), sum(nats[100:])]
    want = ratio_of_sums(sums, [50, 50, 49])
    got = perplexity.nats_per_token
    assert (got.value, got.low, got.high) == pytest.approx((want.value, want.low, want.high))


def test_units() -> None:
    """ln 8 a token, and 3 bytes a token: 8 a token, 2 a byte, 1 bit a byte."""
    (perplexity,) = judge(table_lm(torch.zeros(8, 8)), None, windows([1, 2, 3, 4, 5], 2, 2), 12).perplexities
    for interval, value in ((perplexity.per_token, 8), (perplexity.per_byte, 2), (perplexity.bits_per_byte, 1)):
        assert (interval.value, interval.low, interval.high) == pytest.approx((value,) * 3)
    assert perplexity.to_json()["bits_per_byte"]["value"] == pytest.approx(1)


def test_alone_and_with_a_draft() -> None:
    target, drafter = llama_pair()
    texts = windows(IDS, 32, 32)
    steps: list[int] = []
    alone = judge(target, None, texts, 300)
    both = judge(target, drafter.lm, texts, 300, batch_size=2, on_done=steps.append)
    assert steps == [2, 2, 1]
    assert (alone.agreement, alone.alpha) == (None, None)
    assert alone.perplexities[0].nats_per_token.value == pytest.approx(both.perplexities[0].nats_per_token.value)
    assert [one.model for one in both.perplexities] == ["target", "draft"]
    same = judge(target, target, texts, 300)
    assert same.agreement is not None and same.alpha is not None
    assert (same.agreement.value, same.alpha.value) == pytest.approx((1, 1))


def test_alpha_is_that_of_the_command() -> None:
    target, drafter = llama_pair()
    texts = [Text(IDS[:70]), Text(IDS[70:])]
    result = judge(target, drafter.lm, texts, 300)
    assert result.alpha == measure_alpha(target, drafter.lm, texts, [Sampling()])[0].alpha
