"""What people pass as prompts: what a tokenizer returns, with and without padding, generators, chats, template text."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import LlavaProcessor, PreTrainedTokenizerFast, SiglipImageProcessor

from multimodal import IMAGE, multimodal
from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import OptionError, PromptError
from outrider.text.prompts import prompts_of, rows_of
from outrider.text.tokenizer import encode
from pairs import NUM_WORDS, random_llama, word_tokenizer

TEXTS = ["w1 w2", "w3 w4 w5 w6", "w7"]
OPTIONS: dict[str, Any] = {"seed": 3, "max_new_tokens": 4}


def padded(side: str = "left", pad: str = "w50") -> Any:
    tokenizer = word_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = pad, side
    return tokenizer


def decoder_of(tokenizer: Any) -> Decoder:
    return load(random_llama(), tokenizer=tokenizer)


def texts_of(decoder: Decoder, prompts: Any) -> list[str]:
    return [one.text for one in decoder.generate(prompts, **OPTIONS)]


@pytest.mark.parametrize(("side", "kind"), [("left", "pt"), ("left", None), ("right", "np")])
def test_what_a_tokenizer_returns_is_prompts(side: str, kind: str | None) -> None:
    """With its mask: padding is no part of them. By every way in."""
    decoder = decoder_of(padded(side))
    want = texts_of(decoder, TEXTS)
    encoded: Any = decoder.tokenizer(TEXTS, padding=True, return_tensors=kind)  # type: ignore[misc]
    assert texts_of(decoder, encoded) == want
    assert texts_of(decoder, dict(encoded)) == want
    chunks = list(decoder.stream_many(encoded, **OPTIONS))
    assert ["".join(c.text for c in chunks if c.row == row) for row in range(3)] == want
    done = dict(decoder.complete(encoded, **OPTIONS))
    assert [done[i].text for i in range(3)] == want  # type: ignore[union-attr]
    alone: Any = decoder.tokenizer(TEXTS[0], return_tensors=kind)  # type: ignore[misc]
    assert texts_of(decoder, alone) == want[:1]
    assert "".join(chunk.text for chunk in decoder.stream(alone, **OPTIONS)) == want[0]
    apart = [decoder.tokenizer(text) for text in TEXTS]  # type: ignore[misc]
    assert texts_of(decoder, apart) == want
    assert rows_of({"input_ids": [1, 2, 3], "token_type_ids": [0, 0, 0]}) == [[1, 2, 3]]


MAPPINGS: list[tuple[dict[str, Any], str]] = [
    ({"text": "w1"}, "not a mapping with the keys 'text'"),
    ({"input_ids": [[1]], "pixel_values": [[0.5]]}, "takes no images: give text"),
    ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "'attention_mask' is a 0 or a 1 for each"),
    ({"input_ids": [[1, 2]], "token_type_ids": [[0, 1]]}, "no 'token_type_ids' here but zeros"),
    ({"input_ids": [[1.5]]}, "lists of whole numbers"),
    ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "the prompt is empty"),
]


@pytest.mark.parametrize(("mapping", "message"), MAPPINGS, ids=[message for _, message in MAPPINGS])
def test_other_mappings_are_refused(mapping: dict[str, Any], message: str) -> None:
    """Rather than to continue the words "input_ids" and "attention_mask"."""
    decoder = decoder_of(word_tokenizer())
    for refused in (decoder.generate, decoder.stream_many, decoder.stream):
        with pytest.raises(PromptError, match=message) as error:
            refused(mapping)  # type: ignore[operator]
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", [torch.as_tensor, np.asarray])
def test_padding_without_a_mask_is_refused(form: Callable[[Any], Any]) -> None:
    """In an array of ids. In a list each token is meant."""
    decoder = decoder_of(padded())
    rows = [decoder.tokenizer(text).input_ids for text in TEXTS]  # type: ignore[misc]
    ids = decoder.tokenizer(TEXTS, padding=True).input_ids  # type: ignore[misc]
    for refused in (decoder.generate, decoder.stream_many):
        with pytest.raises(PromptError, match=r"prompt 0 begins with the padding token \(50\) and has no mask"):
            refused(form(ids))
    with pytest.raises(PromptError, match="has no mask"):
        decoder.stream(form(ids)[2])
    assert isinstance(dict(decoder.complete(form(ids), **OPTIONS))[2], PromptError)
    assert texts_of(decoder, [form(row) for row in rows]) == texts_of(decoder, TEXTS)
    assert len(texts_of(decoder, ids)) == 3


def test_padding_that_may_be_meant_is_warned_of() -> None:
    """Where the token of the padding is an end token, or the beginning of a text."""
    decoder = decoder_of(padded(pad=f"w{NUM_WORDS - 1}"))
    ids = decoder.tokenizer(TEXTS, padding=True, return_tensors="pt").input_ids  # type: ignore[misc]
    with pytest.warns(UserWarning, match="prompt 0 begins with the padding token"):
        decoder.generate(ids, **OPTIONS)
    decoder.generate([[NUM_WORDS - 1]], **OPTIONS)
    decoder.generate(torch.tensor([[NUM_WORDS - 1]]), **OPTIONS)  # nothing but it: no padding
    tokenizer = padded(pad="w40")
    tokenizer.bos_token = "w40"
    decoder = decoder_of(tokenizer)
    decoder.generate(torch.tensor([[40, 1, 2], [40, 3, 4]]), **OPTIONS)  # each has its own
    with pytest.warns(UserWarning, match="prompt 0 begins with the padding token"):
        decoder.generate(torch.tensor([[40, 1, 2], [3, 4, 5]]), **OPTIONS)


def test_what_is_not_as_many_prompts_as_it_seems() -> None:
    decoder = decoder_of(padded())
    with pytest.raises(PromptError, match=r"these are 3 prompts, where one is expected: give them to generate\(\)"):
        decoder.stream(decoder.tokenizer(TEXTS, padding=True))  # type: ignore[misc]
    for nothing in (5, torch.tensor(5)):
        with pytest.raises(PromptError, match="prompts are one or several, each text, a list of token ids"):
            prompts_of(nothing)
    # A text is one prompt, not one for each of its characters.
    assert [number for number, _ in decoder.complete("w1 w2", **OPTIONS)] == [0]


def test_a_single_chat_is_one_prompt() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}w9"
    decoder = decoder_of(tokenizer)
    chat = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    want = texts_of(decoder, ["w1 w2 w3 w9"])
    assert texts_of(decoder, chat) == texts_of(decoder, [chat]) == texts_of(decoder, tuple(chat)) == want
    assert [done.text for _, done in decoder.complete([tuple(chat)], **OPTIONS)] == want  # type: ignore[union-attr]


def with_bos(*, adds: bool) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    if adds:
        bos = ("<s>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[bos]
        )
    return tokenizer


@pytest.mark.parametrize("adds", [True, False])
def test_template_text_gets_no_second_bos(adds: bool) -> None:
    """Text that begins with the token of the beginning has it as often as it says."""
    tokenizer = with_bos(adds=adds)
    bos = tokenizer.bos_token_id
    assert encode(tokenizer, "<s>w1 w2") == [bos, 1, 2]
    assert encode(tokenizer, "<s><s>w1") == [bos, bos, 1]
    assert encode(tokenizer, "w1 <s>") == [bos, 1, bos][1 - adds :]
    tokenizer.chat_template = "<s>{{ messages[0].content }}"
    chat = [{"role": "user", "content": "w1"}]
    assert encode(tokenizer, chat) == encode(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False)) == [bos, 1]


def test_an_image_that_is_not_there_is_refused() -> None:
    """By its token in the prompt, with a model that reads images."""
    decoder = load(multimodal("gemma3"), tokenizer=word_tokenizer())
    message = f"the prompt has the token {IMAGE}, the placeholder of an image, which is not given"
    for prompt in (f"w1 w{IMAGE} w2", [1, IMAGE, 2]):
        with pytest.raises(PromptError, match=message):
            decoder.generate([prompt])
    assert len(decoder.generate("w1 w2", max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3
    named = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer().backend_tokenizer, extra_special_tokens={"audio_token": "w60"}
    )
    with pytest.raises(PromptError, match="the token 60, the placeholder of a sound"):
        decoder_of(named).generate("w60 w1")


def test_the_tokenizer_inside_is_taken() -> None:
    """Unwrap processors and tokenizers of the tokenizers package; refuse anything else in one line."""
    want = texts_of(decoder_of(word_tokenizer()), TEXTS)
    assert texts_of(decoder_of(word_tokenizer().backend_tokenizer), TEXTS) == want
    how: dict[str, Any] = {"patch_size": 8, "vision_feature_select_strategy": "full"}
    processor: Any = LlavaProcessor(SiglipImageProcessor(), word_tokenizer(), **how)
    assert texts_of(decoder_of(processor), TEXTS) == want
    processor.chat_template = "{{ messages[0].content }}"
    assert encode(decoder_of(processor).tokenizer, [{"role": "user", "content": "w1 w2"}]) == [1, 2]
    assert processor.tokenizer.chat_template is None
    for wrong, name in ((str, "type"), ("gpt2", "gpt2"), (object(), "object")):
        with pytest.raises(OptionError, match=f"tokenizer = '{name}' is invalid: a tokenizer of Transformers") as error:
            decoder_of(wrong)
        assert "\n" not in str(error.value)
