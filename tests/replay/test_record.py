"""Recording: plain decoding, and the probabilities of what it wrote, against one plain forward."""

import pytest
import torch

from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER
from outrider.options import Sampling
from outrider.replay.record import record_outputs, top_probs
from reference import hf_probs
from toys import llama_pair

# Numbers that float32 holds exactly.
OPTIONS = {
    "temperature": 0.75,
    "top_k": 9,
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "min_tokens": 4,
    "max_new_tokens": 12,
}
PROMPTS = [[1, 2, 3], [9] * 5, [4]]
SEED = {"seed": 7}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(llama_pair()[0], None, frozenset([5]), NO_DRAFTER)


@pytest.mark.parametrize("num_probs", [1, 9, 100])
def test_probabilities_are_those_of_hugging_faces_processors(decoder: Decoder, num_probs: int) -> None:
    """Probabilities of the sequence's token and of the N most probable, and the remaining mass: 0 beyond top-k."""
    records = record_outputs(decoder, PROMPTS, OPTIONS | SEED, num_probs=num_probs)
    n, law = min(num_probs, 60), Sampling(**OPTIONS, stop_token_ids=tuple(decoder.eos_ids))
    for record, ids in zip(records, PROMPTS, strict=True):
        (completion,) = decoder.generate([ids], **OPTIONS, seed=record.seed)
        assert (record.token_ids, record.finish_reason) == (completion.token_ids, completion.finish_reason)
        text = (*record.prompt_ids, *record.token_ids)
        logits = decoder.target.model(torch.tensor([text])).logits[0]
        assert record.probs is not None
        for i, token in enumerate(record.token_ids):
            before = text[: len(ids) + i]
            p = hf_probs(logits[len(before) - 1], before, law, len(ids))
            assert float(record.probs.token_probs[i]) == pytest.approx(float(p[token]), abs=1e-9)
            torch.testing.assert_close(record.probs.top_probs[i], p.sort(descending=True).values[:n], rtol=0, atol=1e-9)
            torch.testing.assert_close(p[record.probs.top_ids[i]], record.probs.top_probs[i], rtol=0, atol=1e-9)
            assert float(record.probs.tail[i]) == pytest.approx(1 - float(record.probs.top_probs[i].sum()), abs=1e-9)
        assert bool((record.probs.tail == 0).all()) == (num_probs >= 9)


def test_a_text_that_fills_the_context(decoder: Decoder) -> None:
    """Its last token is judged though it is never fed."""
    target = llama_pair(context_len=8)[0]
    (probs,) = top_probs(target, [([1, 2], [3, 4, 6, 7, 8, 9])], Sampling(), 2)
    assert len(probs.token_probs) == 6
