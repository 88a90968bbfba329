"""Tokens of one tokenizer in those of another."""

from collections.abc import Sequence

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from outrider.text.spelling import Spelling, spelling_of
from pairs import byte_level_tokenizer, embedded_tokenizer, metaspace_tokenizer, word_tokenizer


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
