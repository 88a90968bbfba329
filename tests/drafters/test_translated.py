"""A draft with a tokenizer of another family."""

import json
import logging
import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import TokenizerMismatch
from pairs import byte_level_tokenizer, embedded, random_llama, zoo

PROMPTS = ["Once upon a time", "The old king, who was very tired,", "12 * 3 = ", "A"]


def _pair() -> Decoder:
    """The embedded target and draft, with the first merges of the draft's tokenizer only, and shuffled ids."""
    state = json.loads((zoo("fable-draft") / "tokenizer.json").read_text())
    model = state["model"]
    model["merges"] = model["merges"][:1000]
    letters = [token for token in model["vocab"] if len(token) == 1]
    kept = ["<|endoftext|>", *letters, *("".join(pair) for pair in model["merges"])]
    random.Random(0).shuffle(kept)
    old = [model["vocab"][token] for token in kept]
    model["vocab"] = {token: i for i, token in enumerate(kept)}
    state["added_tokens"][0]["id"] = end = kept.index("<|endoftext|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<|endoftext|>"
    )
    draft = LlamaForCausalLM.from_pretrained(zoo("fable-draft"), dtype=torch.float32)
    rows = draft.model.embed_tokens.weight.data[old].clone()
    draft.resize_token_embeddings(len(kept))
    draft.model.embed_tokens.weight.data.copy_(rows)
    draft.config.eos_token_id = draft.generation_config.eos_token_id = end
    target = LlamaForCausalLM.from_pretrained(zoo("fable"), dtype=torch.float32)
    own = embedded().tokenizer
    return load(target, draft, tokenizer=own, draft_tokenizer=tokenizer, device="cpu", acceptance="gumbel")


def test_the_text_is_that_of_plain_decoding(caplog: pytest.LogCaptureFixture) -> None:
    """Drafts are masked by the target's ids. The share of tokens in common is reported."""
    with caplog.at_level(logging.WARNING):
        decoder = _pair()
    [message] = caplog.messages
    assert "has another tokenizer, with 1257 of the 4096 tokens of " in message and "% of those of a text" in message
    assert decoder.drafter.lm is None and not decoder.drafter.is_one_hot
    for constraint in ({}, {"regex": "( (a|the) (king|queen|unicorn)){8}"}):
        options: dict[str, Any] = {"seed": 4, "max_new_tokens": 40, **constraint}
        got, want = decoder.generate(PROMPTS, **options), decoder.plain().generate(PROMPTS, **options)
        assert [one.token_ids for one in got] == [one.token_ids for one in want]
        assert sum(one.stats.num_accepted_draft_tokens for one in got) > 20


def test_too_few_tokens_in_common_are_refused() -> None:
    own = {"tokenizer": embedded().tokenizer, "draft_tokenizer": byte_level_tokenizer()}
    with pytest.raises(TokenizerMismatch, match=r"4096 of 4096 tokens differ \(id 0 .* it has 256 of the 4096 tokens"):
        load(embedded().target.model, random_llama(256), **own)
    assert load(random_llama(), random_llama(seed=1)).drafter.lm is not None  # without tokenizers, as they are
