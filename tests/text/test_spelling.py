"""Tokens of one tokenizer in those of another."""

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from outrider.text.spelling import Spelling, spelling_of
from pairs import byte_level_tokenizer, embedded_tokenizer, metaspace_tokenizer, word_tokenizer


def _with_specials(names: Sequence[str], *, begins: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, and special tokens after them: the first begins a text, the last ends it."""
    tokenizer = byte_level_tokenizer(["th"])
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    tokenizer.bos_token, tokenizer.eos_token = names[0], names[-1]
    if begins:
        from tokenizers.processors import TemplateProcessing

        template = TemplateProcessing(single=f"{names[0]} $A", special_tokens=[(names[0], tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def _spelling(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast) -> Spelling:
    found = spelling_of(target, draft, len(target), len(draft))
    assert found is not None
    return found


def test_tokens_are_equal_if_their_bytes_are() -> None:
    """However they are written; of equal ones the first, and rather one that is not written as a byte."""
    target, draft = metaspace_tokenizer(), embedded_tokenizer()
    spelling = _spelling(target, draft)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    assert spelling.equals[ours["▁a"]] == theirs["Ġa"] and spelling.equals[ours["▁"]] == theirs["Ġ"]
    assert spelling.equals[ours["<0xFF>"]] == theirs["ÿ"]
    assert spelling.equals[ours["s"]] == theirs["s"]
    assert spelling.equals[ours["<0x73>"]] == -1 and spelling.spelled[ours["<0x73>"]] == (theirs["s"],)
    back = _spelling(draft, target)
    assert back.equals[theirs["Ġa"]] == ours["▁a"] and back.equals[theirs["s"]] == ours["s"]
    assert back.equals[theirs["ÿ"]] == ours["<0xFF>"]
    used = [i for i in back.equals if i >= 0]
    assert len(used) == len(set(used)) == back.num_equal


@pytest.mark.parametrize("is_metaspace", [False, True])
def test_a_spelling_has_the_text_of_its_token(is_metaspace: bool) -> None:
    """Where it is not cut: the last tokens are kept."""
    target = embedded_tokenizer()
    draft = metaspace_tokenizer() if is_metaspace else byte_level_tokenizer(["th", "he", "in"])
    spelling = _spelling(target, draft)
    assert spelling.prefix == ()
    num_whole = 0
    for i, ids in enumerate(spelling.spelled):
        assert 1 <= len(ids) <= 8
        if spelling.equals[i] >= 0:
            assert ids == (spelling.equals[i],)
        text = target.decode([i])
        if text.isascii() and i not in target.all_special_ids:
            spelled = draft.decode([draft.convert_tokens_to_ids("s"), *ids])
            assert text.endswith(spelled[1:]) and len(spelled) > 1
            num_whole += spelled[1:] == text
    assert num_whole > 2000


def test_special_tokens() -> None:
    """Equal names, then equal roles. One without an equal is spelled by its name."""
    target, draft = _with_specials(["<s>", "<user>", "<tool>", "</s>"]), _with_specials(["<b>", "<tool>", "<e>"])
    spelling = _spelling(target, draft)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    assert spelling.equals[ours["<tool>"]] == theirs["<tool>"]
    assert spelling.equals[ours["<s>"]] == theirs["<b>"] and spelling.equals[ours["</s>"]] == theirs["<e>"]
    assert spelling.equals[ours["<user>"]] == -1
    assert draft.decode(list(spelling.spelled[ours["<user>"]])) == "<user>"
    assert spelling.num_equal == len(target) - 1
    assert spelling.share_of([ours["<user>"], ours["<s>"], ours["a"], ours["b"]]) == 0.75


def test_the_beginning() -> None:
    """The draft's own, unless the target begins with one, which is that of the draft by its role."""
    plain, own = _with_specials(["<s>", "</s>"]), _with_specials(["<b>", "<e>"], begins=True)
    begin = own.bos_token_id
    assert _spelling(plain, own).prefix == (begin,)
    assert _spelling(own, plain).prefix == ()
    both = _spelling(_with_specials(["<s>", "</s>"], begins=True), own)
    assert both.prefix == () and both.spelled[257] == (begin,)


def test_tokens_without_a_spelling() -> None:
    """A draft that knows some letters only reads its end token in place of others."""
    letters = Tokenizer(BPE({"a": 0, "Ġ": 1, "<e>": 2}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    draft = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<e>")
    target = byte_level_tokenizer()
    spelling = _spelling(target, draft)
    assert spelling.spelled[target.get_vocab()["a"]] == (0,) and spelling.spelled[target.get_vocab()["b"]] == (2,)


def test_other_kinds_are_not_read() -> None:
    words, target = word_tokenizer(), embedded_tokenizer()
    assert spelling_of(target, words, 4096, 97) is None and spelling_of(words, target, 97, 4096) is None
