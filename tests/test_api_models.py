"""Pairs of all kinds behind the public door: padded vocabularies, objects in memory, chats, broken weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.errors import NumericsError, OptionError, PromptError, TokenizerMismatch, UnsupportedModel
from pairs import NUM_WORDS, embedded, random_llama, word_tokenizer
from toys import perturbed

PROMPT = "w1 w2 w3 w1 w2"
TARGET_WIDTH, DRAFT_WIDTH = 100, 128  # logits of both models are wider than the tokenizer, by different amounts


def lively(model: Any) -> Any:
    """Make the padding likely: without a mask most tokens would come from it."""
    with torch.no_grad():
        model.get_output_embeddings().weight[NUM_WORDS:] *= 10
    return model


@pytest.mark.parametrize(("acceptance", "temperature"), [("block", 0.0), ("rejection", 1.5), ("gumbel", 1.5)])
def test_padding_of_the_vocabulary_is_never_said(acceptance: str, temperature: float) -> None:
    """Nor drafted, nor counted: the log-probabilities are of the real tokens alone, which add up to one."""
    target = lively(random_llama(TARGET_WIDTH, 1, tie_word_embeddings=False))
    draft = lively(random_llama(DRAFT_WIDTH, 2, tie_word_embeddings=False))
    with torch.inference_mode():
        logits = target(torch.tensor([[1, 2, 3, 1, 2]])).logits
    assert (logits.argmax(dim=-1) >= NUM_WORDS).any()  # or nothing is tested
    decoder = outrider.load(target, draft, tokenizer=word_tokenizer(), acceptance=acceptance)
    options: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "logprobs": NUM_WORDS}
    for completion in decoder.generate([PROMPT] * 4, seed=[1, 2, 3, 4], max_new_tokens=25, **options):
        assert len(completion.token_ids) == 25
        assert max(completion.token_ids) < NUM_WORDS
        assert completion.text.split() == [f"w{i}" for i in completion.token_ids if i != NUM_WORDS - 1]
        assert completion.logprobs is not None
        for item in completion.logprobs:
            assert sorted(i for i, _ in item.top) == list(range(NUM_WORDS))
            assert math.fsum(math.exp(value) for _, value in item.top) == pytest.approx(1.0, abs=1e-5)


def test_models_in_memory_with_a_tokenizer() -> None:
    target = random_llama(NUM_WORDS).train()
    draft = perturbed(target, 0.1)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    decoder = outrider.load(target, draft, tokenizer=word_tokenizer(), num_draft_tokens=3)
    assert decoder.eos_ids == {NUM_WORDS - 1} and decoder.num_draft_tokens == 3
    assert decoder.target.model is target and not target.training  # evaluation mode, as documented
    completions = decoder.generate([PROMPT] * 8, seed=list(range(8)), max_new_tokens=24)
    for one in completions:
        assert one.finish_reason == ("eos" if one.token_ids[-1] == NUM_WORDS - 1 else "length")
        assert NUM_WORDS - 1 not in one.token_ids[:-1]
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    silent = outrider.load(target, draft)  # speaks in ids
    assert silent.generate([[1, 2, 3]], max_new_tokens=20, ignore_eos=True)[0].text == ""
    with pytest.raises(PromptError, match="needs a tokenizer"):
        silent.generate("w1 w2")
    with pytest.raises(OptionError, match="stop strings need a tokenizer"):
        silent.generate([[1, 2, 3]], stop="w1")


def test_pairs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    draft = random_llama(embedded().target.vocab_size, eos_token_id=None)
    draft.save_pretrained(tmp_path)
    word_tokenizer(draft.config.vocab_size).save_pretrained(tmp_path)
    flash, words = random_llama(), word_tokenizer()
    flash.config._attn_implementation = "flash_attention_2"
    fewer = random_llama(90, eos_token_id=None)
    for pair, options, error, message in (
        (("fable", tmp_path), {}, TokenizerMismatch, r"have different tokenizers: \d+ of \d+ tokens differ \(id 0 is"),
        (("fable",), {"tokenizer": words}, OptionError, "has its own"),
        ((random_llama(TARGET_WIDTH), fewer), {"tokenizer": words}, TokenizerMismatch, "has logits for 90 tokens, but"),
        ((random_llama(), flash), {"tokenizer": words}, UnsupportedModel, "load it with one of eager, sdpa"),
        ((None,), {}, OptionError, "a name, a folder, a hub id, or a Hugging Face model in memory"),
        (("fable",), {"acceptance": "typical"}, OptionError, "choose one of rejection, block"),
    ):
        given: dict[str, Any] = options
        with pytest.raises(error, match=message):
            outrider.load(*pair, **given)


def test_logits_that_are_not_numbers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    decoder = outrider.load("fable", "fable-draft")
    for lm, is_target in ((decoder.drafter.models[0], False), (decoder.target, True)):
        with torch.no_grad():
            next(lm.model.parameters())[:] = torch.nan
        if is_target:
            position = len(decoder.encode("Once upon a time"))
            message = f"the model fable gave NaN or infinite logits for position {position} of the text"
            with pytest.raises(NumericsError, match=message):
                list(decoder.stream("Once upon a time", seed=1))
        else:
            (result,) = decoder.generate("Once upon a time", seed=1, max_new_tokens=16)
            assert len(result.token_ids) == result.stats.num_rounds == 16
            line = "the draft fable-draft gave NaN or infinite logits: its drafts are cut there"
            assert caplog.messages == [line]
