"""Teacher forcing and alpha: against plain forwards, and against numbers worked out by hand."""

from operator import itemgetter

import pytest
import torch

from outrider.drafters.model import model_drafter
from outrider.drafters.window import window_start
from outrider.errors import PromptError
from outrider.measure.along import measure_alpha, needs_forcing, overlap
from outrider.measure.teacher_forcing import Text, force
from outrider.options import Sampling
from outrider.sampling.probs import Settings, to_probs
from round_drafters import two_tables
from toys import as_lm, llama_pair, random_table, table_lm, tiny_llama

TEXTS = [Text([3, 1, 4, 1, 5, 9, 2, 6], 3), Text(list(range(2, 55)) * 3, 1), Text([7, 7], 1), Text([5], 1)]


@pytest.mark.parametrize("has_penalty", [False, True])
def test_forced_logits_are_those_of_one_forward(has_penalty: bool) -> None:
    """Over ragged texts longer than a chunk; and what was seen is what occurs before the token."""
    lm = as_lm(tiny_llama())
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=1.0, min_tokens=2, stop_token_ids=(1,))
    settings = [Settings.of([sampling], lm.vocab_size, torch.device("cpu"))] if has_penalty else []
    chunks = list(force(lm, TEXTS, settings))
    assert len(chunks) == 2
    for row, text in enumerate(TEXTS):
        want = lm.model(torch.tensor([text.ids])).logits[0, text.num_given - 1 : -1]
        got = torch.cat([chunk.logits[chunk.rows == row] for chunk in chunks])
        assert torch.cat([chunk.ids[chunk.rows == row] for chunk in chunks]).tolist() == list(
            text.ids[text.num_given :]
        )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        if has_penalty:
            fields = zip(*(chunk.history.map(itemgetter(chunk.rows == row)).tensors for chunk in chunks), strict=True)
            history = zip(*map(torch.cat, fields), strict=True)
            for i, (seen, counts, num_generated) in enumerate(history, start=text.num_given):
                output = list(text.ids[text.num_given : i])
                assert set(seen.nonzero().flatten().tolist()) == set(text.ids[:i])
                assert counts.tolist() == [output.count(token) for token in range(lm.vocab_size)]
                assert num_generated == len(output)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(temperature=0.5, top_p=0.8)])
def test_alpha_is_the_mean_overlap(sampling: Sampling) -> None:
    """Markov chains: alpha follows from the tables' rows at the tokens of the sequence. Of a drafter with one table for
    the first token of a round, and another for the rest, alpha is that of the first."""
    tables = [random_table(5, seed) for seed in range(3)]
    texts = [Text([0, 1, 2, 3, 4, 0, 2]), Text([4, 4, 1, 0], 2), Text([3])]
    places = [0, 1, 2, 3, 4, 0, 4, 1]  # the tokens before those that are judged
    p, q = (to_probs(one[None], Settings.of([sampling], 5, torch.device("cpu")))[0] for one in tables[:2])
    want = float(torch.minimum(p, q).sum(-1)[places].mean())
    target = table_lm(tables[0])
    for drafter in (model_drafter(table_lm(tables[1])), two_tables(*tables[1:])):
        got = measure_alpha(target, drafter, texts, sampling, batch_size=2)
        assert got.value == pytest.approx(want, abs=1e-12) and got.low is not None and got.low <= got.value
    assert measure_alpha(target, model_drafter(target), texts).value == pytest.approx(1, abs=1e-12)
    short = table_lm(tables[0], context_len=4)
    assert measure_alpha(short, model_drafter(short), texts[:1]).value == pytest.approx(1)  # of the first 4 tokens
    with pytest.raises(PromptError, match="two tokens or more"):
        measure_alpha(target, model_drafter(target), [Text([0])])


def test_alpha_beyond_the_context_of_a_draft_is_that_of_its_windows() -> None:
    """The mean overlap with forwards of the draft over its windows: of the last 9 to 16 tokens. A draft that read whole
    texts would have another alpha."""
    target, drafter = llama_pair(draft_context_len=16)
    (text,) = texts = [Text([int(i) for i in torch.randint(60, (30,), generator=torch.Generator().manual_seed(2))])]
    assert needs_forcing(drafter, texts) and not needs_forcing(drafter, [Text(text.ids[:17])])

    def alpha(starts: list[int]) -> float:
        overlaps = []
        for length, start in enumerate(starts, start=1):
            p = target.model(torch.tensor([text.ids[:length]])).logits[0, -1].softmax(-1)
            q = drafter.models[0].model(torch.tensor([text.ids[start:length]])).logits[0, -1].softmax(-1)
            overlaps.append(float(overlap(p, q)))
        return sum(overlaps) / len(overlaps)

    got = measure_alpha(target, drafter, texts).value
    assert got == pytest.approx(alpha([window_start(n, 16) for n in range(1, 30)]), abs=1e-9)
    assert abs(got - alpha([0] * 29)) > 1e-3


def test_overlap_of_rows_that_do_not_sum_to_one() -> None:
    """float32 rows are off by 1e-6; here by more, to see it."""
    assert float(overlap(torch.tensor([0.2, 0.2]), torch.tensor([3.0, 1.0]))) == pytest.approx(0.75)
