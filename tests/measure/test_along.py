"""p and q at every place and offset of given texts, and alpha: against forwards over whole sequences, and by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter

import pytest
import torch

from hybrids import hybrid, hybrid_lm
from native_cases import CASES, CONTEXT, VOCAB, random_model
from outrider.certify.divergence import explain
from outrider.decoding.engine import decode
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.model import model_drafter
from outrider.errors import NumericsError, PromptError
from outrider.measure import teacher_forcing
from outrider.measure.along import force_drafts, measure_alpha, overlap
from outrider.measure.teacher_forcing import Text, force
from outrider.models.executions import choose_execution
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.runtime.transformers_forward import TransformersForward
from outrider.sampling.probs import Settings, normalise, to_probs
from outrider.sampling.rules import REJECTION
from outrider.serve.logprobs import prompt_logprobs
from round_drafters import two_tables
from toys import as_lm, llama_pair, random_table, request, table_lm, tiny_llama

K = 3
CPU = torch.device("cpu")
TEXTS = [
    Text((5, 6, 7, 5, 6, 7, 5, 6, 1), 4),
    Text((1, 2), 1),
    Text((*range(20, 42), 7, 7, 3), 18),
    Text((*range(20, 40), 9, 4, 7, 9, 1, 1), 21, num_prompt=16),
    Text((2, 3, 2, 3, 3), 2),
]
LONG = [Text([3, 1, 4, 1, 5, 9, 2, 6], 3), Text(list(range(2, 55)) * 3, 1), Text([7, 7], 1), Text([5], 1)]
SAMPLING = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5)


def test_forced_logits_are_those_of_one_forward() -> None:
    """Over ragged texts longer than a chunk; and what was seen is what occurs before the token."""
    lm = as_lm(tiny_llama())
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=1.0, min_tokens=2, stop_token_ids=(1,))
    chunks = list(force(lm, LONG, [Settings.of([sampling], lm.vocab_size, CPU)]))
    for row, text in enumerate(LONG):
        want = lm.model(torch.tensor([text.ids])).logits[0, text.num_given - 1 : -1]
        got = torch.cat([chunk.logits[chunk.rows == row] for chunk in chunks])
        ids = torch.cat([chunk.ids[chunk.rows == row] for chunk in chunks])
        assert ids.tolist() == list(text.ids[text.num_given :])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        fields = zip(*(chunk.history.map(itemgetter(chunk.rows == row)).tensors for chunk in chunks), strict=True)
        for i, (seen, counts, num_generated) in enumerate(zip(*map(torch.cat, fields), strict=True), text.num_given):
            output = list(text.ids[text.num_given : i])
            assert set(seen.nonzero().flatten().tolist()) == set(text.ids[:i])
            assert counts.tolist() == [output.count(token) for token in range(lm.vocab_size)]
            assert num_generated == len(output)


def _whole(lm: LM, texts: Sequence[Text], sampling: Sampling) -> list[torch.Tensor]:
    """Probabilities by teacher forcing. [n, V] for each text"""
    settings = Settings.of([sampling], lm.vocab_size, lm.device)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for chunk in force(lm, texts, [settings]):
        for row, probs in zip(chunk.rows.tolist(), normalise(chunk.probs(settings)), strict=True):
            found[row].append(probs)
    return [torch.stack(rows) for rows in found]


def test_p_and_q_are_those_of_teacher_forcing() -> None:
    """At every place and offset; also for texts that join later, and for prompts that have output among them."""
    target, drafter = llama_pair()
    samplings = [replace(SAMPLING, max_new_tokens=30)] * len(TEXTS)
    p_rows, q_rows = _whole(target, TEXTS, SAMPLING), _whole(drafter.lm, TEXTS, SAMPLING)
    scored = set()
    for one in force_drafts(target, drafter, TEXTS, samplings, K, num_slots=2):
        assert one.num_drafted.tolist() == [K] * len(one.rows)
        for i, (row, place) in enumerate(zip(one.rows.tolist(), one.places.tolist(), strict=True)):
            text = TEXTS[row]
            for offset in range(K):
                at = place + offset
                is_inside = at < len(text.ids) - text.num_given
                assert bool(one.is_scored[i, offset]) == is_inside
                if is_inside:
                    assert one.ids[i, offset] == text.ids[text.num_given + at]
                    for rows, got in ((p_rows, one.p), (q_rows, one.q)):
                        torch.testing.assert_close(normalise(got[i, offset]), rows[row][at], rtol=0, atol=1e-9)
                    scored.add((row, place, offset))
    lengths = [len(text.ids) - text.num_given for text in TEXTS]
    assert len(scored) == sum(min(K, n - place) for n in lengths for place in range(n))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.5, top_p=0.8)])
def test_alpha_is_the_mean_overlap(sampling: Sampling) -> None:
    """Markov chains: alpha follows from the rows at the tokens; of a drafter with two tables from the first one's."""
    tables = [random_table(5, seed) for seed in range(3)]
    texts = [Text([0, 1, 2, 3, 4, 0, 2]), Text([4, 4, 1, 0], 2), Text([3])]
    places = [0, 1, 2, 3, 4, 0, 4, 1]  # the tokens before those that are judged
    p, q = (to_probs(one[None], Settings.of([sampling], 5, CPU))[0] for one in tables[:2])
    want = float(torch.minimum(p, q).sum(-1)[places].mean())
    target, short = table_lm(tables[0]), table_lm(tables[0], context_len=4)
    for drafter in (model_drafter(table_lm(tables[1])), two_tables(*tables[1:])):
        got = measure_alpha(target, drafter, texts, sampling, batch_size=2)
        assert got.value == pytest.approx(want, abs=1e-12) and got.low is not None and got.low <= got.value
    assert measure_alpha(short, model_drafter(short), texts[:1]).value == pytest.approx(1)  # of the first 4 tokens
    with pytest.raises(PromptError, match="two tokens or more"):
        measure_alpha(target, model_drafter(target), [Text([0])])
    # float32 rows are off by 1e-6; here by more, to see it.
    assert float(overlap(torch.tensor([0.2, 0.2]), torch.tensor([3.0, 1.0]))) == pytest.approx(0.75)


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(NumericsError) as caught:
        call()
    return str(caught.value)


def _message_of_the_loop(lm: LM, prompt: Sequence[int]) -> str:
    one = request(prompt, max_new_tokens=1)
    return _message(lambda: list(decode(lm, NO_DRAFTER, [one], REJECTION, num_draft_tokens=0)))


@pytest.mark.parametrize(("value", "columns"), [(torch.nan, 2), (torch.inf, 2), (-torch.inf, slice(None))])
def test_scoring_names_the_model_and_the_position_without_a_distribution(value: float, columns: int | slice) -> None:
    """As the loop does. A place that is not judged may be bad; and a token that is impossible is no error."""
    text = (1, 2, 3, 4, 2, 1)  # after its 4 there is no distribution, for position 4
    table = random_table(6, 1)
    table[4, columns] = value
    lm, good = table_lm(table, name="the big one"), table_lm(random_table(6, 2))
    message = _message_of_the_loop(lm, text[:4])
    assert "the big one" in message and "position 4 of the text;" in message
    for scoring in (
        lambda: list(force(lm, [Text((5, 5, 5, 5, 5, 5)), Text(text)])),
        lambda: measure_alpha(good, model_drafter(lm), [Text(text)]),
        lambda: list(prompt_logprobs(lm, text, 2)),
        lambda: explain(lm, 0, text[:3], (4, 2), (4, 1), Sampling(temperature=0.0), 2),
    ):
        assert _message(scoring) == message
    table[5, 1] = -torch.inf
    (forced,) = force(table_lm(table), [Text((*text, 5, 1), 5)])
    assert forced.ids.tolist() == [1, 5, 1] and forced.logprobs().tolist()[2] == -torch.inf


@pytest.mark.parametrize("family", ["llama", "native llama", "qwen3_5_text"])
def test_the_bad_position_is_that_of_the_loop(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do later tokens of a forward spoil a place, nor is a place good that sees a bad token of the prompt."""
    monkeypatch.setattr(teacher_forcing, "_MOST_COLUMNS", 2)
    lm = as_lm(tiny_llama(seed=1)) if family == "llama" else hybrid_lm(hybrid("qwen3_5_text"))
    if family == "native llama":
        model = random_model("llama", next(iter(CASES["llama"].values())))
        lm = choose_execution(
            LM(TransformersForward(model), name="llama", vocab_size=VOCAB, context_len=CONTEXT), "native"
        )
    lm.model.get_input_embeddings().weight.data[5] = torch.nan
    text = (1, 2, 3, 4, 5, 2, 1, 7)
    for num_given, position in ((1, 5), (5, 5), (6, 6), (7, 7)):
        message = _message_of_the_loop(lm, text[: max(num_given, 5)])
        assert f"position {position} of the text;" in message
        assert _message(lambda n=num_given: list(force(lm, [Text(text, n), Text((1, 2))]))) == message
    assert len(list(force(lm, [Text(text[:5]), Text((1, 2))]))) >= 1  # its last token is not fed
