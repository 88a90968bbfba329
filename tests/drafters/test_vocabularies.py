"""Drafts that lack a few tokens of the target, or have others at their ids."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import outrider
from outrider.errors import TokenizerMismatch
from pairs import NUM_WORDS, random_llama

PROMPT = "w1 w2 w3 w1 tool"
WORDS = [f"w{i}" for i in range(NUM_WORDS)]
TARGET_TOKENS = [*WORDS, "tool", "end"]
DRAFT_TOKENS = [*WORDS[:95], "other", WORDS[96], "end"]  # another token at 95 and at 97, none at 98
UNKNOWN = (95, 97, 98)


def _tokenizer(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="w0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w96")


def _pair(acceptance: str = "block", draft_tokens: Sequence[str] = DRAFT_TOKENS, **options: Any) -> outrider.Decoder:
    """A draft with the target's weights, so that tokens are accepted, for the tokens that it has."""
    target, draft = random_llama(len(TARGET_TOKENS), 1), random_llama(len(draft_tokens), 1)
    own = target.state_dict()
    draft.load_state_dict({name: own[name][: len(weight)] for name, weight in draft.state_dict().items()})
    tokenizers = {"tokenizer": _tokenizer(TARGET_TOKENS), "draft_tokenizer": _tokenizer(draft_tokens)}
    return outrider.load(target, draft, **tokenizers, acceptance=acceptance, **options)


def test_unknown_tokens_have_no_probability(caplog: pytest.LogCaptureFixture) -> None:
    """All others have the logits of the model. Numbers of tokens tell without tokenizers; tokens beyond the target's do
    not matter."""
    with caplog.at_level(logging.WARNING):
        (lm,) = _pair().drafter.models
    assert "does not know 3 of the 99 tokens of" in caplog.text and "id 97 is 'tool' / 'end'" in caplog.text
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        logits = lm.forward(ids, torch.arange(3)[None], lm.new_cache(1, 16), 16)
        want = lm.model(ids).logits
    assert [i for i, q in enumerate(logits.softmax(dim=-1)[0, -1].tolist()) if q == 0] == [*UNKNOWN]
    known = [i for i in range(97) if i != 95]
    torch.testing.assert_close(logits[..., known], want[..., known])
    assert outrider.load(random_llama(99), random_llama(97)).drafter.models[0].unknown_ids == (97, 98)
    tokenizers = {"tokenizer": _tokenizer(TARGET_TOKENS), "draft_tokenizer": _tokenizer([*TARGET_TOKENS, "more"])}
    assert outrider.load(random_llama(99), random_llama(100), **tokenizers).drafter.models[0].unknown_ids == ()
    with pytest.raises(TokenizerMismatch, match="5 of 99 tokens differ .id 0 is 'w0' / 'other0'"):
        _pair(draft_tokens=[token if i >= 5 else f"other{i}" for i, token in enumerate(TARGET_TOKENS)])


def test_only_unknown_tokens_are_allowed() -> None:
    """Any of them is drafted then, with equal q; also where they are masked token by token."""
    decoder = _pair("gumbel")
    bias = {i: -float("inf") for i in range(99) if i not in UNKNOWN}
    for options in ({"logit_bias": bias, "ignore_eos": True}, {"regex": "(w7|tool|end){8}"}):
        given: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_new_tokens": 20, **options}
        got, plain = (one.generate([PROMPT, "w1", "w2"], **given) for one in (decoder, decoder.plain()))
        assert [one.token_ids for one in got] == [one.token_ids for one in plain]
        assert any({*one.token_ids} & {*UNKNOWN} for one in got)
        assert sum(one.stats.num_accepted_draft_tokens for one in got) > 0
