"""What people pass as prompts: what a tokenizer returns, with and without padding, generators, chats, template text."""

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import LlavaProcessor, SiglipImageProcessor

from multimodal import IMAGE, multimodal
from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import OptionError, PromptError
from outrider.text.tokenizer import encode
from pairs import NUM_WORDS, random_llama, word_tokenizer

TEXTS = ["w1 w2", "w3 w4 w5 w6", "w7"]
OPTIONS: dict[str, Any] = {"seed": 3, "max_new_tokens": 4}


def decoder_of(tokenizer: Any = None, *, side: str = "left", pad: str = "w50") -> Decoder:
    if tokenizer is None:
        tokenizer = word_tokenizer()
        tokenizer.pad_token, tokenizer.padding_side = pad, side
    return load(random_llama(), tokenizer=tokenizer)


def texts_of(decoder: Decoder, prompts: Any) -> list[str]:
    return [one.text for one in decoder.generate(prompts, **OPTIONS)]


@pytest.mark.parametrize(("side", "kind"), [("left", "pt"), ("right", None)])
def test_what_a_tokenizer_returns_is_prompts(side: str, kind: str | None) -> None:
    """With its mask: padding is no part of them. By every way in; a single chat or text is one prompt."""
    decoder = decoder_of(side=side)
    tokenizer: Any = decoder.tokenizer
    want, encoded = texts_of(decoder, TEXTS), tokenizer(TEXTS, padding=True, return_tensors=kind)
    assert texts_of(decoder, encoded) == texts_of(decoder, dict(encoded)) == want
    done = dict(decoder.complete(encoded, **OPTIONS))
    assert [done[i].text for i in range(3)] == want
    alone = tokenizer(TEXTS[0], return_tensors=kind)
    assert texts_of(decoder, alone) == want[:1]
    assert "".join(chunk.text for chunk in decoder.stream(alone, **OPTIONS)) == want[0]
    assert texts_of(decoder, [tokenizer(text) for text in TEXTS]) == want
    with pytest.raises(PromptError, match=r"these are 3 prompts, where one is expected: give them to generate\(\)"):
        decoder.stream(encoded)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    assert texts_of(decoder, chat) == texts_of(decoder, [chat]) == texts_of(decoder, tuple(chat)) == want[:1]
    assert [number for number, _ in decoder.complete("w1 w2", **OPTIONS)] == [0]


def test_other_mappings_are_refused() -> None:
    """Rather than to continue the words "input_ids" and "attention_mask"."""
    for mapping, message in (
        ({"text": "w1"}, "not a mapping with the keys 'text'"),
        ({"input_ids": [[1]], "pixel_values": [[0.5]]}, "takes no images: give text"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "'attention_mask' is a 0 or a 1 for each"),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 1]]}, "no 'token_type_ids' here but zeros"),
        ({"input_ids": [[1.5]]}, "lists of whole numbers"),
        (5, "prompts are one or several, each text, a list of token ids"),
    ):
        with pytest.raises(PromptError, match=message):
            decoder_of().generate(mapping)


def test_padding_without_a_mask_is_refused_or_warned_of() -> None:
    decoder = decoder_of()
    ids = decoder.tokenizer(TEXTS, padding=True).input_ids
    for form in (torch.as_tensor, np.asarray):
        with pytest.raises(PromptError, match=r"prompt 0 begins with the padding token \(50\) and has no mask"):
            decoder.generate(form(ids))
    assert len(texts_of(decoder, ids)) == 3
    ending = decoder_of(pad=f"w{NUM_WORDS - 1}")
    with pytest.warns(UserWarning, match="prompt 0 begins with the padding token"):
        ending.generate(ending.tokenizer(TEXTS, padding=True, return_tensors="pt").input_ids, **OPTIONS)


@pytest.mark.parametrize("adds", [True, False])
def test_template_text_gets_no_second_bos(adds: bool) -> None:
    """Text that begins with the token of the beginning has it as often as it says."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    if adds:
        template = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
        tokenizer.backend_tokenizer.post_processor = template
    assert encode(tokenizer, "<s>w1 w2") == [bos, 1, 2] and encode(tokenizer, "<s><s>w1") == [bos, bos, 1]
    assert encode(tokenizer, "w1 <s>") == [bos, 1, bos][1 - adds :]
    tokenizer.chat_template = "<s>{{ messages[0].content }}"
    chat = [{"role": "user", "content": "w1"}]
    assert encode(tokenizer, chat) == encode(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False)) == [bos, 1]


def test_a_placeholder_without_its_image_is_refused() -> None:
    decoder = load(multimodal("gemma3"), tokenizer=word_tokenizer())
    message = f"the prompt has the token {IMAGE}, the placeholder of an image, which is not given"
    for prompt in (f"w1 w{IMAGE} w2", [1, IMAGE, 2]):
        with pytest.raises(PromptError, match=message):
            decoder.generate([prompt])


def test_the_tokenizer_inside_is_taken() -> None:
    """Of processors and of the tokenizers package; anything else is refused."""
    want = texts_of(decoder_of(), TEXTS)
    assert texts_of(decoder_of(word_tokenizer().backend_tokenizer), TEXTS) == want
    how: dict[str, Any] = {"patch_size": 8, "vision_feature_select_strategy": "full"}
    assert texts_of(decoder_of(LlavaProcessor(SiglipImageProcessor(), word_tokenizer(), **how)), TEXTS) == want
    with pytest.raises(OptionError, match="tokenizer = 'gpt2' is invalid: a tokenizer of Transformers"):
        decoder_of("gpt2")
