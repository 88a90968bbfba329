"""Drafts with a tokenizer of another family, or without a few tokens of the target, or with others at their ids."""

import json
import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import TokenizerMismatch
from pairs import NUM_WORDS, byte_level_tokenizer, embedded, random_llama, zoo

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


WORDS = [f"w{i}" for i in range(NUM_WORDS)]
TARGET_TOKENS = [*WORDS, "tool", "end"]
DRAFT_TOKENS = [*WORDS[:95], "other", WORDS[96], "end"]  # another token at 95 and at 97, none at 98
UNKNOWN = (95, 97, 98)


def _words(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="w0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w96")


def _like_pair(acceptance: str = "block", draft_tokens: Sequence[str] = DRAFT_TOKENS, **options: Any) -> Decoder:
    """A draft with the target's weights, so that tokens are accepted, for the tokens that it has."""
    target, draft = random_llama(len(TARGET_TOKENS), 1), random_llama(len(draft_tokens), 1)
    own = target.state_dict()
    draft.load_state_dict({name: own[name][: len(weight)] for name, weight in draft.state_dict().items()})
    tokenizers = {"tokenizer": _words(TARGET_TOKENS), "draft_tokenizer": _words(draft_tokens)}
    return load(target, draft, **tokenizers, acceptance=acceptance, **options)


def test_unknown_tokens_have_no_probability(caplog: pytest.LogCaptureFixture) -> None:
    """All others have the logits of the model. Tokens beyond the target's do not matter."""
    with caplog.at_level(logging.WARNING):
        (lm,) = _like_pair().drafter.models
    assert "does not know 3 of the 99 tokens of" in caplog.text and "id 97 is 'tool' / 'end'" in caplog.text
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        logits = lm.forward(ids, torch.arange(3)[None], lm.new_cache(1, 16), 16)
        want = lm.model(ids).logits
    assert [i for i, q in enumerate(logits.softmax(dim=-1)[0, -1].tolist()) if q == 0] == [*UNKNOWN]
    known = [i for i in range(97) if i != 95]
    torch.testing.assert_close(logits[..., known], want[..., known])
    assert load(random_llama(99), random_llama(97)).drafter.models[0].unknown_ids == (97, 98)
    tokenizers = {"tokenizer": _words(TARGET_TOKENS), "draft_tokenizer": _words([*TARGET_TOKENS, "more"])}
    assert load(random_llama(99), random_llama(100), **tokenizers).drafter.models[0].unknown_ids == ()
    with pytest.raises(TokenizerMismatch, match="5 of 99 tokens differ .id 0 is 'w0' / 'other0'"):
        _like_pair(draft_tokens=[token if i >= 5 else f"other{i}" for i, token in enumerate(TARGET_TOKENS)])


def test_only_unknown_tokens_are_allowed() -> None:
    """Any of them is drafted then, with equal q; also where they are masked token by token."""
    decoder = _like_pair("gumbel")
    bias = {i: -float("inf") for i in range(99) if i not in UNKNOWN}
    for options in ({"logit_bias": bias, "ignore_eos": True}, {"regex": "(w7|tool|end){8}"}):
        given: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_new_tokens": 20, **options}
        got, plain = (one.generate(["w1 w2 w3 w1 tool", "w1", "w2"], **given) for one in (decoder, decoder.plain()))
        assert [one.token_ids for one in got] == [one.token_ids for one in plain]
        assert any({*one.token_ids} & {*UNKNOWN} for one in got)
        assert sum(one.stats.num_accepted_draft_tokens for one in got) > 0
