"""Logits that are not finite, in scoring: the same error as in the loop, for the same place."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hybrids import hybrid, hybrid_lm
from native_cases import CASES, CONTEXT, VOCAB, random_model
from outrider.certify.divergence import explain
from outrider.decoding.engine import decode
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.model import model_drafter
from outrider.errors import NumericsError
from outrider.measure import teacher_forcing
from outrider.measure.along import measure_alpha
from outrider.measure.teacher_forcing import Text, force
from outrider.models.executions import choose_execution
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from outrider.serve.logprobs import prompt_logprobs
from toys import as_lm, random_table, request, table_lm, tiny_llama

TEXT = (1, 2, 3, 4, 2, 1)  # after its 4 there is no distribution, for position 4
BAD = {"NaN": (torch.nan, 2), "infinity": (torch.inf, 2), "all minus infinity": (-torch.inf, slice(None))}


def _bad_table(kind: str) -> Tensor:
    value, columns = BAD[kind]
    table = random_table(6, 1)
    table[4, columns] = value
    return table


def _message_of_the_loop(lm: LM, prompt: Sequence[int]) -> str:
    with pytest.raises(NumericsError) as caught:
        list(decode(lm, NO_DRAFTER, [request(prompt, max_new_tokens=1)], REJECTION, num_draft_tokens=0))
    return str(caught.value)


@pytest.mark.parametrize("kind", BAD)
def test_scoring_names_the_model_and_the_position(kind: str) -> None:
    lm = table_lm(_bad_table(kind), name="the big one")
    message = _message_of_the_loop(lm, TEXT[:4])
    assert "the big one" in message and "position 4 of the text;" in message
    good = table_lm(random_table(6, 2))

    scorings = (
        lambda: list(force(lm, [Text((5, 5, 5, 5, 5, 5)), Text(TEXT)])),
        lambda: measure_alpha(good, model_drafter(lm), [Text(TEXT)]),
        lambda: list(prompt_logprobs(lm, TEXT, 2)),
        lambda: explain(lm, 0, TEXT[:3], (4, 2), (4, 1), Sampling(temperature=0.0), 2),
    )
    for scoring in scorings:
        with pytest.raises(NumericsError) as caught:
            scoring()
        assert str(caught.value) == message


def test_a_place_that_is_not_judged_may_be_bad() -> None:
    """As in a prompt; and a token that is impossible is no error."""
    table = _bad_table("NaN")
    table[5, 1] = -torch.inf
    (forced,) = force(table_lm(table), [Text((*TEXT, 5, 1), 5)])
    assert forced.ids.tolist() == [1, 5, 1] and forced.logprobs().tolist()[2] == -torch.inf


@pytest.mark.parametrize("columns", [2, 128])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "native llama", "native qwen3_5_text"])
def test_the_position_is_that_of_the_loop(family: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do later tokens of a forward spoil a place, nor is a place good that sees a bad token of the prompt."""
    monkeypatch.setattr(teacher_forcing, "_MOST_COLUMNS", columns)
    kind, is_native = family.removeprefix("native "), family.startswith("native")
    lm = as_lm(tiny_llama(seed=1)) if kind == "llama" else hybrid_lm(hybrid(kind))
    if is_native:
        model = random_model(kind, next(iter(CASES[kind].values())))
        lm = choose_execution(LM(model, name=kind, vocab_size=VOCAB, context_len=CONTEXT), "native")
    lm.model.get_input_embeddings().weight.data[5] = torch.nan
    text = (1, 2, 3, 4, 5, 2, 1, 7)
    for num_given, position in ((1, 5), (4, 5), (5, 5), (6, 6), (7, 7)):
        message = _message_of_the_loop(lm, text[: max(num_given, 5)])
        assert f"position {position} of the text;" in message
        with pytest.raises(NumericsError) as caught:
            list(force(lm, [Text(text, num_given), Text((1, 2))]))
        assert str(caught.value) == message
    assert len(list(force(lm, [Text(text[:5]), Text((1, 2))]))) >= 1  # its last token is not fed
