"""A draft with a tokenizer of another family."""

import json
import logging
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from contract import check_state
from hybrids import V as HYBRID_V
from hybrids import hybrid, hybrid_lm
from outrider.api import load
from outrider.decoder import Decoder
from outrider.drafters.base import Drafter
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import suffix_drafter
from outrider.drafters.model import ModelSession
from outrider.drafters.translated import translated_drafter
from outrider.errors import OptionError, TokenizerMismatch
from outrider.measure.log import Header
from outrider.measure.replay import replay
from outrider.runtime.lm import LM
from outrider.sampling.rules import GUMBEL, REJECTION, RULES
from outrider.text.spelling import Spelling
from pairs import byte_level_tokenizer, embedded, random_llama, zoo
from toys import InTurn, as_lm, request, run, tiny_llama, tokens

ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
PROMPTS = ["Once upon a time", "The old king, who was very tired,", "12 * 3 = ", "A"]


@cache
def _pair(num_merges: int = 1500, acceptance: str = "block") -> Decoder:
    """The embedded target and draft, with the first merges of the draft's tokenizer only, and shuffled ids."""
    state = json.loads((zoo("fable-draft") / "tokenizer.json").read_text())
    model = state["model"]
    model["merges"] = model["merges"][:num_merges]
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
    return load(target, draft, tokenizer=own, draft_tokenizer=tokenizer, device="cpu", acceptance=acceptance)


def _spelling() -> Spelling:
    """Of 60 tokens the draft has the even ones up to 40, and spells the others in one to three of its 30."""
    generator = random.Random(0)
    equals = [i // 2 if i % 2 == 0 and i <= 40 else -1 for i in range(60)]
    spelled = [
        (equal,) if equal >= 0 else tuple(generator.randrange(30) for _ in range(generator.randint(1, 3)))
        for equal in equals
    ]
    return Spelling(tuple(equals), tuple(spelled))


SPELLING = _spelling()


def _toy(options: DraftOptions = NO_OPTIONS, context_len: int = 256) -> tuple[LM, Drafter]:
    draft = as_lm(tiny_llama(1, vocab_size=30), "draft", context_len)
    return as_lm(tiny_llama()), translated_drafter(draft, SPELLING, options)


def test_the_output_is_the_targets() -> None:
    """Under ``gumbel`` with a seed; with joins, prefix hits, and rounds of other K. Drafts are accepted."""
    decoder = _pair(acceptance="gumbel")
    drafter = decoder.drafter
    prompts = [decoder.encode(prompt) for prompt in (*PROMPTS, *PROMPTS[:2])]
    requests = [request(ids, seed=i, max_new_tokens=30) for i, ids in enumerate(prompts)]
    outputs = run(decoder.target, drafter, requests, GUMBEL, InTurn(4, 0, 0, 2))
    assert [one.token_ids for one in outputs] == tokens(decoder.target, drafter, requests, GUMBEL, 0)
    assert sum(one.stats.num_accepted_draft_tokens for one in outputs) > 20


def test_logits_are_those_of_equal_tokens() -> None:
    """Fed with the target's tokens or its own, as it spells them."""
    _, drafter = _toy()
    lm, own = drafter.models[0], as_lm(tiny_llama(1, vocab_size=30))
    with torch.inference_mode():
        got = lm.forward(torch.tensor([[6, 60 + 7, 40]]), torch.arange(3)[None], lm.new_cache(1, 16), 16)
        want = own.forward(torch.tensor([[3, 7, 20]]), torch.arange(3)[None], own.new_cache(1, 16), 16)
    for token, i in enumerate(SPELLING.equals):
        assert torch.equal(got[..., token], want[..., i]) if i >= 0 else bool((got[..., token] == -1e4).all())


def test_only_other_tokens_are_allowed() -> None:
    """Any of them is drafted then. What was fed for one is not its spelling."""
    target, drafter = _toy()
    bias = {i: -float("inf") for i, equal in enumerate(SPELLING.equals) if equal >= 0}
    prompts = [[1, 2, 3], [43], [2] * 5]
    requests = [request(prompt, seed=i, logit_bias=bias, max_new_tokens=20) for i, prompt in enumerate(prompts)]
    outputs = run(target, drafter, requests, GUMBEL, 3)
    assert [one.token_ids for one in outputs] == tokens(target, drafter, requests, GUMBEL, 0)
    assert sum(one.stats.num_accepted_draft_tokens for one in outputs) > 0


def test_constraints() -> None:
    """Drafts are masked by the target's ids."""
    decoder = _pair(acceptance="gumbel")
    options: dict[str, Any] = {"regex": "( (a|the) (king|queen|unicorn)){8}", "seed": 4, "max_new_tokens": 40}
    got, want = decoder.generate(PROMPTS, **options), decoder.plain().generate(PROMPTS, **options)
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    assert sum(one.stats.num_accepted_draft_tokens for one in got) > 20


def test_nothing_is_drafted_beyond_the_drafts_context() -> None:
    """Which is in its own tokens."""
    target, drafter = _toy(context_len=24)
    prompt = [2, 43, 4, 51]
    requests = [request(prompt, temperature=0.0, max_new_tokens=40)]
    [output] = run(target, drafter, requests, REJECTION, 3)
    assert [output.token_ids] == tokens(target, drafter, requests, REJECTION, 0)
    sequence, length, num = (*prompt, *output.token_ids), len(prompt), 0
    for row in output.rounds[:-2]:
        own = sum(len(SPELLING.spelled[i]) for i in sequence[:length])
        assert row.num_drafted == max(0, min(3, 25 - own))
        num += own > 24
        length += len(row.token_ids)
    assert num > 5


def test_a_long_spelling_ends_drafting() -> None:
    """From its place on, and not in a sequence that shares the tokens before it."""
    spelled = tuple((1, 2, 3, 4, 5, 6, 7, 8) if i == 9 else (i % 5,) for i in range(10))
    drafter = translated_drafter(
        as_lm(tiny_llama(1, vocab_size=10), "draft"), Spelling((*(i if i < 5 else -1 for i in range(10)),), spelled)
    )
    target = as_lm(tiny_llama(vocab_size=10))
    long = [1, 2, 3, 4, *[9] * 20, 1]
    outputs = run(
        target, drafter, [request(prompt, max_new_tokens=12) for prompt in (long, [1, 2, 3, 4, 5])], REJECTION, 2
    )
    assert outputs[0].stats.num_draft_tokens == 0 < outputs[1].stats.num_draft_tokens
    rest = [1, 2, 3, 4, 1, 0, 2, 1]
    check_state(target, drafter, [(long, rest), (long[:4], rest), (rest, [9] * 20 + rest)], 2)


def test_stale_and_missing_tokens_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the contract, which the drafter keeps otherwise (test_contract.py)."""
    target, drafter = _toy()
    generator = random.Random(1)
    ids = [generator.randrange(60) for _ in range(37)]
    monkeypatch.setattr(ModelSession, "forget", lambda *_: None)
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, drafter, [(ids[:3], ids[3:17]), (ids[17:23], ids[23:])], 3)


def test_a_draft_with_states() -> None:
    """Its recurrences compute in float32."""
    target, draft = as_lm(tiny_llama(vocab_size=40)), hybrid_lm(hybrid("qwen3_5_text"), "draft")
    equals = tuple(i if i % 3 else -1 for i in range(40))
    spelled = tuple((i,) if i % 3 else (i % HYBRID_V, 1, 2)[: 1 + i % 2 * 2] for i in range(40))
    rest = [6, 7, 9, 10, 11, 3, 1, 2, 6, 12, 1, 1, 15, 2]
    sequences = [([1, 2, 3, 4], rest), ([1, 2, 3, 5, 8], rest[::-1])]
    check_state(target, translated_drafter(draft, Spelling(equals, spelled)), sequences, 3, atol=1e-4)


@pytest.mark.each_execution
def test_greedy_and_after_a_suffix() -> None:
    target, drafter = _toy()
    _, greedy = _toy(DraftOptions(is_greedy=True))
    assert greedy.is_one_hot and greedy.name == "draft:greedy"
    after_suffix = hybrid_drafter(suffix_drafter(), drafter, 60, 0.4)
    requests = [request(ids, temperature=0.0, max_new_tokens=24) for ids in ([1, 2, 3, 4] * 4, [5, 44])]
    for other in (greedy, after_suffix):
        assert tokens(target, other, requests, REJECTION, 3) == tokens(target, drafter, requests, REJECTION, 0)
    repeated = [1, 2, 43] * 4
    check_state(target, after_suffix, [([1, 2, 43], repeated), ([7, 43, 2], [1, *repeated])], 3)


def test_the_share_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    _pair.cache_clear()
    with caplog.at_level(logging.WARNING):
        decoder = _pair(1000)
    [message] = caplog.messages
    assert "has another tokenizer, with 1257 of the 4096 tokens of " in message and "% of those of a text" in message
    assert decoder.drafter.lm is None and not decoder.drafter.is_one_hot
    header = Header.of(decoder, {}, has_probs=False)
    with pytest.raises(OptionError, match="its q is known in rounds with the target only"):
        next(replay([], header, decoder.drafter, "block", [2]))


def test_too_few_tokens_in_common_are_refused(tmp_path: Path) -> None:
    draft = random_llama(256)
    with pytest.raises(TokenizerMismatch, match=r"4096 of 4096 tokens differ \(id 0 .* it has 256 of the 4096 tokens"):
        load(
            embedded().target.model,
            draft,
            tokenizer=embedded().tokenizer,
            draft_tokenizer=byte_level_tokenizer(),
        )


def test_models_without_a_tokenizer_are_taken_as_they_are() -> None:
    assert load(random_llama(), random_llama(seed=1)).drafter.lm is not None
