"""Pairs of all kinds behind the public door: padded vocabularies, objects in memory, chats, broken weights."""

import copy
import math
from itertools import zip_longest
from typing import Any

import pytest
import torch

import outrider
from outrider.errors import NumericsError, OptionError, PromptError, TokenizerMismatch, UnsupportedModel
from outrider.options import Sampling
from outrider.runtime.lm import LM
from pairs import NUM_WORDS, embedded, metaspace_tokenizer, random_llama, word_tokenizer
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


def test_a_draft_of_fewer_tokens_is_refused() -> None:
    with pytest.raises(TokenizerMismatch, match=f"has logits for 90 tokens, but {NUM_WORDS} are needed"):
        outrider.load(random_llama(TARGET_WIDTH), random_llama(90, eos_token_id=None), tokenizer=word_tokenizer())


def test_models_without_a_tokenizer_speak_in_ids() -> None:
    """V is then the width of the target's logits."""
    target = random_llama(NUM_WORDS)
    decoder = outrider.load(target, perturbed(target, 0.1))
    (completion,) = decoder.generate([[1, 2, 3]], seed=1, max_new_tokens=20, ignore_eos=True)
    assert completion.text == "" and len(completion.token_ids) == 20
    assert completion.stats.num_accepted_draft_tokens > 0
    with pytest.raises(PromptError, match="needs a tokenizer"):
        decoder.generate("w1 w2")
    with pytest.raises(OptionError, match="stop strings need a tokenizer"):
        decoder.generate([[1, 2, 3]], stop="w1")


def test_models_in_memory_with_a_tokenizer() -> None:
    """Text in, text out, the end token from the model's configuration; and the models stay as they were."""
    target = random_llama(NUM_WORDS).train()
    draft = perturbed(target, 0.1)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    decoder = outrider.load(target, draft, tokenizer=word_tokenizer(), num_draft_tokens=3)
    assert decoder.eos_ids == {NUM_WORDS - 1} and decoder.num_draft_tokens == 3
    assert decoder.target.model is target and not target.training  # evaluation mode, as documented
    completions = decoder.generate([PROMPT] * 8, seed=list(range(8)), max_new_tokens=24)
    for completion in completions:
        is_ended = completion.token_ids[-1] == NUM_WORDS - 1
        assert completion.finish_reason == ("eos" if is_ended else "length")
        assert NUM_WORDS - 1 not in completion.token_ids[:-1]
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_generated_text_goes_on_from_the_prompt() -> None:
    """With a tokenizer that drops the first space of a text: that of the prompt, not that of what follows."""
    tokenizer = metaspace_tokenizer()
    decoder = outrider.load(random_llama(len(tokenizer), eos_token_id=None), tokenizer=tokenizer)
    bias = {tokenizer.convert_tokens_to_ids("▁time"): 1e6}
    (completion,) = decoder.generate("Once", logit_bias=bias, max_new_tokens=2, seed=1)
    assert completion.text == " time time"


def test_a_full_context_ends_a_row() -> None:
    """Prompt and output together fill it to the last place, and no more."""
    pair = random_llama(context_len=32), random_llama(seed=1, context_len=24)
    decoder = outrider.load(*pair, tokenizer=word_tokenizer())
    options: dict[str, Any] = {"seed": 1, "ignore_eos": True, "max_new_tokens": 10**6}
    (completion,) = decoder.generate(PROMPT, **options)
    assert completion.num_prompt_tokens + len(completion.token_ids) == 32
    assert completion.finish_reason == "length"
    (one,) = decoder.generate("w1 " * 31, **options)
    assert len(one.token_ids) == 1
    with pytest.raises(PromptError, match="the prompt has 32 tokens, but .* can take 32 in all"):
        decoder.generate("w1 " * 32, **options)


def test_different_tokenizers_are_refused(tmp_path: Any) -> None:
    target = embedded().target.model
    draft = random_llama(embedded().target.vocab_size, eos_token_id=None)
    draft.save_pretrained(tmp_path)
    word_tokenizer(draft.config.vocab_size).save_pretrained(tmp_path)
    with pytest.raises(TokenizerMismatch, match=r"have different tokenizers: \d+ of \d+ tokens differ \(id 0 is"):
        outrider.load(target, tmp_path, tokenizer=embedded().tokenizer)
    with pytest.raises(TokenizerMismatch):
        outrider.load("fable", str(tmp_path))


def test_choices_of_load() -> None:
    for draft, name in ((None, "none"), ("none", "none"), ("ngram", "ngram")):
        assert outrider.load(random_llama(), draft, tokenizer=word_tokenizer()).drafter.name == name
    with pytest.raises(OptionError, match="acceptance = 'typical' is invalid: choose one of rejection, block"):
        outrider.load("fable", acceptance="typical")
    with pytest.raises(OptionError, match="num_draft_tokens = 0 is invalid"):
        outrider.load("fable", num_draft_tokens=0)


def test_a_decoder_serves_interleaved_streams() -> None:
    """It holds no state of any generation."""
    decoder = embedded("float64")
    options = [{"seed": seed, "max_new_tokens": 12} for seed in (1, 2)]
    want = [decoder.generate("Once upon a time", **o)[0].token_ids for o in options]
    streams = [decoder.stream("Once upon a time", **o) for o in options]
    rounds = zip_longest(*streams)
    got = [tuple(i for chunk in chunks if chunk for i in chunk.token_ids) for chunks in zip(*rounds, strict=True)]
    assert got == want


def test_logits_that_are_not_numbers_are_told_with_model_and_position() -> None:
    decoder = outrider.load("fable", "fable-draft")
    _damage(decoder.target)
    position = len(decoder.encode("Once upon a time"))
    message = f"the model fable gave NaN or infinite logits for position {position} of the text"
    stream = decoder.stream("Once upon a time", seed=1)
    with pytest.raises(NumericsError, match=message):
        list(stream)


def test_a_draft_whose_logits_are_not_numbers_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    decoder = outrider.load("fable", "fable-draft")
    assert decoder.drafter.lm is not None
    _damage(decoder.drafter.lm)
    (result,) = decoder.generate("Once upon a time", seed=1, max_new_tokens=16)
    assert len(result.token_ids) == result.stats.num_rounds == 16
    (line,) = caplog.messages
    assert line == "the draft fable-draft gave NaN or infinite logits: its drafts are cut there"


def _damage(lm: LM) -> None:
    with torch.no_grad():
        next(lm.model.parameters())[:] = torch.nan


def test_chats_use_the_template() -> None:
    tokenizer = copy.deepcopy(embedded().tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    chatty = outrider.load(embedded().target.model, tokenizer=tokenizer)
    options: dict[str, Any] = {"seed": 1, "max_new_tokens": 8}
    (chat,) = chatty.generate([[{"role": "user", "content": "Tell me a tale"}]], **options)
    (text,) = embedded().plain().generate("Tell me a tale:", **options)
    assert (chat.token_ids, chat.num_prompt_tokens) == (text.token_ids, text.num_prompt_tokens)
    same = chatty.chat("a tale", Sampling(seed=1, max_new_tokens=8), system="Tell me ")
    assert (same.token_ids, same.num_prompt_tokens) == (text.token_ids, text.num_prompt_tokens)
    chunks = list(chatty.stream_chat([{"role": "user", "content": "Tell me a tale"}], **options))
    assert "".join(chunk.text for chunk in chunks) == text.text
    with pytest.raises(OptionError, match="does not read 'enable_thinking'"):
        chatty.chat("Tell me a tale", chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(OptionError, match="temprature = 1 is invalid: did you mean temperature?"):
        chatty.chat("Tell me a tale", temprature=1)


def test_attention_that_takes_no_mask_is_refused_by_name() -> None:
    model = random_llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match="='flash_attention_2': load it with one of eager, sdpa"):
        outrider.load(random_llama(), model, tokenizer=word_tokenizer())
