"""p and q at every place and offset, against forwards of the models over whole sequences."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.measure.along import along, force_drafts, needs_forcing
from outrider.measure.teacher_forcing import Text, force
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalise
from round_drafters import in_rounds, parallel
from toys import as_lm, llama_pair, perturbed, tiny_llama

K = 3
TEXTS = [
    Text((5, 6, 7, 5, 6, 7, 5, 6, 1), 4),
    Text((1, 2), 1),
    Text((*range(20, 42), 7, 7, 3), 18),
    Text((*range(20, 40), 9, 4, 7, 9, 1, 1), 21, num_prompt=16),
    Text((2, 3, 2, 3, 3), 2),
]
SAMPLING = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5)


def _whole(lm: LM, texts: Sequence[Text], sampling: Sampling) -> list[torch.Tensor]:
    """Probabilities by teacher forcing. [n, V] for each text"""
    settings = Settings.of([sampling], lm.vocab_size, lm.device)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for chunk in force(lm, texts, [settings]):
        for row, probs in zip(chunk.rows.tolist(), normalise(chunk.probs(settings)), strict=True):
            found[row].append(probs)
    return [torch.stack(rows) for rows in found]


@pytest.mark.parametrize("num_slots", [None, 2])
def test_p_and_q_are_those_of_teacher_forcing(num_slots: int | None) -> None:
    """Where q depends on the tokens alone, at every place and offset within the text; also for texts that join later,
    find their beginning in a cache, and have output among the given tokens."""
    target, drafter = llama_pair()
    samplings = [replace(SAMPLING, max_new_tokens=30)] * len(TEXTS)
    p_rows, q_rows = _whole(target, TEXTS, SAMPLING), _whole(drafter.lm, TEXTS, SAMPLING)
    scored = set()
    for one in force_drafts(target, drafter, TEXTS, samplings, K, num_slots=num_slots):
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


def test_q_of_a_parallel_draft_is_that_of_one_forward() -> None:
    """Over the sequence and masks, without a cache."""
    model = perturbed(tiny_llama(), 0.1)
    target, drafter = as_lm(tiny_llama()), parallel(as_lm(model, "draft"))
    assert needs_forcing(drafter)
    samplings = [Sampling(max_new_tokens=30)] * len(TEXTS)
    for one in force_drafts(target, drafter, TEXTS, samplings, K):
        for i, (row, place) in enumerate(zip(one.rows.tolist(), one.places.tolist(), strict=True)):
            ids = [*TEXTS[row].ids[: TEXTS[row].num_given + place], *[59] * (K - 1)]
            want = model(torch.tensor([ids])).logits[0, -K:].softmax(-1)
            torch.testing.assert_close(one.q[i], want, rtol=0, atol=1e-9)


def test_drafts_end_as_in_the_loop() -> None:
    """Near the most tokens that a text may have, and where the draft's context ends."""
    target, drafter = llama_pair(draft_context_len=8)
    rounds = list(force_drafts(target, drafter, [Text((1, 2, 3, 4, 5, 6, 7), 3)], [Sampling(max_new_tokens=5)], K))
    assert [int(one.num_drafted) for one in rounds] == [3, 3, 2, 1]
    assert [int(one.is_scored.sum()) for one in rounds] == [3, 3, 2, 1]
    text = Text((1, 2, 3, 4, 5, 6, 7, 8, 9, 9), 5)
    assert needs_forcing(drafter, [text])
    long = along(drafter, [text], Sampling(), K, target=target)
    assert [int(one.num_drafted) for one in long] == [3, 3, 2, 1, 3]  # then a window of the last tokens


def test_a_one_hot_draft_is_scored_up_to_its_first_other_token() -> None:
    target, drafter = llama_pair()
    greedy = in_rounds(model_drafter(drafter.lm, options=DraftOptions(is_greedy=True)))
    (q_rows,) = _whole(drafter.lm, TEXTS[:1], Sampling(temperature=0.0))
    text, num_scored = TEXTS[0], 0
    for one in force_drafts(target, greedy, [text], [Sampling(max_new_tokens=30)], K):
        place, is_right = int(one.places[0]), True
        for offset in range(K):
            inside = place + offset < len(q_rows)
            assert bool(one.is_scored[0, offset]) == (is_right and inside)
            if is_right and inside:
                assert one.q is None and int(one.drafted_ids[0, offset]) == int(q_rows[place + offset].argmax())
                is_right = bool(one.q_of_ids()[0, offset] == 1)
                num_scored += 1
    assert num_scored >= len(q_rows)


def test_a_look_up_is_asked_at_every_place() -> None:
    """Without a target: up to the first other token, the end of the text, and the limit."""
    text = Text((1, 2, 3, 1, 2, 3, 1, 2, 4), 4)
    (one,) = along(ngram_drafter(), [text], Sampling(), 2, limits=[5])
    assert one.q is None and one.p is None and one.places.tolist() == [0, 1, 2, 3, 4]
    assert one.num_drafted.tolist() == [2, 2, 2, 1, 0]
    assert one.drafted_ids[:4, 0].tolist() == [2, 3, 1, 2]
    assert one.is_scored.tolist() == [[True] * 2] * 3 + [[True, False], [False] * 2]
    (longer,) = along(ngram_drafter(), [text], Sampling(), 2)
    assert longer.drafted_ids[3:].tolist() == [[2, 3], [3, 1]]
    assert longer.is_scored[3:].tolist() == [[True] * 2, [True, False]]
    assert longer.q_of_ids()[3:].tolist() == [[1, 0], [0, 0]]
