"""Text to ids and back: nothing is lost, nothing is shown half."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from outrider.errors import PromptError, TokenizerMismatch
from outrider.text.spelling import Spelling, spelling_of
from outrider.text.tokenizer import Detokenizer, check_same_tokens, encode
from pairs import byte_level_tokenizer, embedded_tokenizer, metaspace_tokenizer, word_tokenizer

MANY_BYTES = "Grüße aus Köln: 世界 🙂 naïve 👩‍👩‍👧 Ω."


def pieces_of(tokenizer: Any, ids: list[int], prompt_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def random_ids(min_size: int) -> st.SearchStrategy[list[int]]:
    return st.deferred(lambda: st.lists(st.integers(0, len(embedded_tokenizer()) - 1), min_size=min_size, max_size=24))


@given(prompt_ids=random_ids(1), ids=random_ids(0))
def test_pieces_join_to_the_full_text(prompt_ids: list[int], ids: list[int]) -> None:
    """For any ids, many of which are not UTF-8: what the whole decodes to, less what the prompt decodes to."""
    tokenizer = embedded_tokenizer()
    full, before = decoded(tokenizer, prompt_ids + ids), decoded(tokenizer, prompt_ids)
    assert "".join(pieces_of(tokenizer, ids, prompt_ids)) == full[len(before) :]


@pytest.mark.parametrize("make", [embedded_tokenizer, metaspace_tokenizer])
def test_every_single_byte_of_a_character_is_awaited(make: Any) -> None:
    """The end brings half a one. A leading space that a decoder drops is dropped from the prompt alone."""
    tokenizer = make()
    ids, once = tokenizer(MANY_BYTES, add_special_tokens=False).input_ids, tokenizer("Once").input_ids
    pieces = pieces_of(tokenizer, ids, once)
    assert "".join(pieces).strip() == MANY_BYTES and pieces[-1] == ""
    assert not any("\ufffd" in piece for piece in pieces)
    first, second, *_ = tokenizer("🙂", add_special_tokens=False).input_ids[-4:]
    detokenizer = Detokenizer(tokenizer, once)
    assert detokenizer.push(first) == detokenizer.push(second) == ""
    assert set(detokenizer.flush()) == {"\ufffd"} and detokenizer.flush() == ""
    if make is metaspace_tokenizer:
        once, upon, s = tokenizer.convert_tokens_to_ids(["▁Once", "▁upon", "s"])
        assert pieces_of(tokenizer, [upon, s], [once]) == [" upon", "s", ""]
        assert pieces_of(tokenizer, [once, s, once], [])[0] == "Once"


@pytest.mark.parametrize("kind", ["special", "half in bytes"])
def test_no_token_makes_decoding_quadratic(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tokens without text nor bytes that are no character: each token costs the decoding of a few."""
    tokenizer, num_ids = (embedded_tokenizer() if kind == "special" else metaspace_tokenizer()), list[int]()
    ids = [tokenizer.eos_token_id if kind == "special" else tokenizer.convert_tokens_to_ids("<0x80>")] * 600
    decode = type(tokenizer).decode
    counted = lambda self, ids, **more: num_ids.append(len(ids)) or decode(self, ids, **more)  # noqa: E731
    monkeypatch.setattr(type(tokenizer), "decode", counted)
    pieces_of(tokenizer, ids, tokenizer("Once", add_special_tokens=False).input_ids)
    assert 0 < sum(num_ids) < 25 * len(ids)


def test_different_tokens_are_named() -> None:
    target, draft = word_tokenizer(), word_tokenizer()
    check_same_tokens(target, draft, "large", "small")
    target.add_tokens(["<tool>", "<end>"])
    with pytest.raises(TokenizerMismatch, match="2 of .* tokens differ .id 97 is '<tool>' / 'nothing'.*'ngram'"):
        check_same_tokens(target, draft, "large", "small")
    draft.add_tokens(["<end>", "<tool>"])
    with pytest.raises(TokenizerMismatch, match="large and small have.*2 of 99 tokens.*id 98 is '<end>' / '<tool>'"):
        check_same_tokens(target, draft, "large", "small")


def test_ids_may_be_any_whole_numbers_and_other_prompts_are_refused() -> None:
    for ids in ((3, 1, 2), np.array([3, 1, 2]), torch.tensor([3, 1, 2])):
        assert encode(None, ids) == [3, 1, 2] and all(type(i) is int for i in encode(None, ids))
    for tokenizer, prompt, message in (
        (None, 5, "a prompt is text, a list of token ids or a list of chat messages"),
        (word_tokenizer(), "", "the prompt is empty"),
        # JSON can spell it, and the shell makes it of bytes that are not UTF-8; tokenizers do not take it.
        (word_tokenizer(), "Once \ud83d", "the prompt has a lone surrogate at 5"),
        (None, "Once", "a prompt of text needs a tokenizer"),
        (None, [{"role": "user", "content": "hello"}], "no chat template"),
    ):
        with pytest.raises(PromptError, match=message):
            encode(tokenizer, prompt)


def _with_specials(names: Sequence[str], *, begins: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, and special tokens after them: the first begins a text, the last ends it."""
    tokenizer = byte_level_tokenizer(["th"])
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    tokenizer.bos_token, tokenizer.eos_token = names[0], names[-1]
    if begins:
        template = TemplateProcessing(single=f"{names[0]} $A", special_tokens=[(names[0], tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def _spelling(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast) -> Spelling:
    return spelling_of(target, draft, len(target), len(draft))


def test_tokens_are_equal_if_their_bytes_are() -> None:
    """However they are written; of equal ones the first, and rather one that is not written as a byte."""
    target, draft = metaspace_tokenizer(), embedded_tokenizer()
    spelling, back = _spelling(target, draft), _spelling(draft, target)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    for one, other in (("▁a", "Ġa"), ("▁", "Ġ"), ("<0xFF>", "ÿ"), ("s", "s")):
        assert spelling.equals[ours[one]] == theirs[other] and back.equals[theirs[other]] == ours[one]
    assert spelling.equals[ours["<0x73>"]] == -1 and spelling.spelled[ours["<0x73>"]] == (theirs["s"],)
    used = [i for i in back.equals if i >= 0]
    assert len(used) == len(set(used)) == back.num_equal
    words = word_tokenizer()
    assert spelling_of(draft, words, 4096, 97) is None and spelling_of(words, draft, 97, 4096) is None


@pytest.mark.parametrize("is_metaspace", [False, True])
def test_a_spelling_has_the_text_of_its_token(is_metaspace: bool) -> None:
    target = embedded_tokenizer()
    draft = metaspace_tokenizer() if is_metaspace else byte_level_tokenizer(["th", "he", "in"])
    spelling, num_whole = _spelling(target, draft), 0
    for i, ids in enumerate(spelling.spelled):
        assert 1 <= len(ids) <= 8 and (spelling.equals[i] < 0 or ids == (spelling.equals[i],))
        text = target.decode([i])
        if text.isascii() and i not in target.all_special_ids:
            spelled = draft.decode([draft.convert_tokens_to_ids("s"), *ids])
            assert text.endswith(spelled[1:]) and len(spelled) > 1
            num_whole += spelled[1:] == text
    assert num_whole > 2000 and spelling.prefix == ()


def test_special_tokens_are_equal_by_name_then_by_role() -> None:
    """One without an equal is spelled by its name. A draft's own beginning is put before texts that have none."""
    target, draft = _with_specials(["<s>", "<user>", "<tool>", "</s>"]), _with_specials(["<b>", "<tool>", "<e>"])
    spelling, ours, theirs = _spelling(target, draft), target.get_vocab(), draft.get_vocab()
    for one, other in (("<tool>", "<tool>"), ("<s>", "<b>"), ("</s>", "<e>")):
        assert spelling.equals[ours[one]] == theirs[other]
    assert spelling.equals[ours["<user>"]] == -1
    assert draft.decode(list(spelling.spelled[ours["<user>"]])) == "<user>"
    assert spelling.share_of([ours["<user>"], ours["<s>"], ours["a"], ours["b"]]) == 0.75
    own = _with_specials(["<b>", "<e>"], begins=True)
    assert _spelling(target, own).prefix == (own.bos_token_id,) and _spelling(own, target).prefix == ()
    assert _spelling(_with_specials(["<s>", "</s>"], begins=True), own).prefix == ()
