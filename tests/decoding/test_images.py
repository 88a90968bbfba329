"""Prompts with images: greedy text is that of the model's own ``generate``, whatever shares the batch or the cache."""

from typing import Any

import pytest
import torch

import outrider
from hybrids import hybrid
from multimodal import IMAGE, KINDS, multimodal, with_image
from outrider.decoder import Decoder
from outrider.errors import PromptError
from outrider.runtime.cache import SlotCache
from pairs import random_llama

BEFORE, AFTER = list(range(1, 25)), [5, 6, 7]  # long enough for a prefix to be reused
TEXT = {"input_ids": torch.tensor([[3, 1, 4, 1, 5]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
NUM_TOKENS = 10


def generated(model: Any, prompt: dict[str, Any]) -> list[int]:
    text = model.generate(**prompt, do_sample=False, max_new_tokens=NUM_TOKENS)
    ids: list[int] = text[0, prompt["input_ids"].shape[1] :].tolist()
    return ids


def texts(decoder: Decoder, prompts: list[dict[str, Any]], **options: Any) -> list[list[int]]:
    options = {"temperature": 0.0} | options
    done = decoder.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True, **options)
    return [list(one.token_ids) for one in done]


@pytest.mark.parametrize("name", KINDS)
def test_text_is_that_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft, all at once; plain, one after the other in a used slot; resumed. The control has no offset."""
    model = multimodal(name)
    # Two have the same tokens and different images.
    prompts = [with_image(name, BEFORE, AFTER, seed=1), TEXT, with_image(name, BEFORE, AFTER, seed=2)]
    want = [generated(model, prompt) for prompt in prompts]
    assert want[0] != want[2]  # the image tells
    decoder = outrider.load(model, random_llama(), num_draft_tokens=3)
    assert texts(decoder, prompts) == want
    again = [prompts[0], *prompts]  # a prefix of tokens is shared, its image is not
    assert texts(decoder.plain(), again, num_slots=1) == [want[0], *want]
    resumed = decoder.stream(
        prompts[0], resume_ids=want[0][:5], temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True
    )
    assert [i for chunk in resumed for i in chunk.token_ids] == want[0][5:]
    if name == "qwen2_5_vl":
        monkeypatch.setattr(SlotCache, "shift", lambda *_: None)
        assert texts(decoder, prompts[:1]) != want[:1]


def test_images_that_do_not_fit_are_refused() -> None:
    """Before anything is generated."""
    decoder = outrider.load(multimodal("llava"))
    prompt = with_image("llava", BEFORE, AFTER, seed=1)
    fewer = prompt | {"input_ids": prompt["input_ids"][:, 25:], "attention_mask": prompt["attention_mask"][:, 25:]}
    ending = prompt | {name: prompt[name][:, :28] for name in ("input_ids", "attention_mask")}
    for wrong, message in (
        (fewer, "Llava.* cannot read this prompt with its images: .*do not match"),
        (ending, f"ends with an image .token {IMAGE}."),
        ([1, IMAGE, 2], "which is not given: pass it too"),
        ({**prompt, "martian": 1}, "passes 'martian' to its decoder"),
    ):
        with pytest.raises(PromptError, match=message):
            decoder.generate([wrong])
    for model in (random_llama(), hybrid("qwen3_5_text")):
        with pytest.raises(PromptError, match="takes no images: give text|keeps states"):
            outrider.load(model).generate([prompt | TEXT])
