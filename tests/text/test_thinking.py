"""Where thoughts begin and end; their budget, and constraints after them, under any drafts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from outrider.errors import OptionError
from outrider.text.row_text import RowText
from outrider.text.thinking import Stage, Thinking, Thoughts, thinking_of
from outrider.text.thought_splitter import ThoughtSplitter
from outrider.text.tokenizer import Detokenizer
from pairs import byte_level_tokenizer

MARKERS = Thinking("<think>", "</think>", (90,), 91)


def test_the_prompt_tells_where_the_output_begins() -> None:
    tokenizer = byte_level_tokenizer()
    assert thinking_of(tokenizer, "auto") is None
    with pytest.raises(OptionError, match="the tokenizer has no tokens <think> and </think>"):
        thinking_of(tokenizer, "think")
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    thinking: Any = thinking_of(tokenizer, "auto")
    assert thinking_of(tokenizer, "none") is None
    for text, stage in [("<think>\n", "in"), ("<think>\n\n</think>\n\n", "after"), ("a <think> b\n", "before")]:
        assert thinking.stage_of(tokenizer, tokenizer(text).input_ids) == stage
    for text, stage in [("a <think> b" * 20, "in"), ("<think> a </think> b", "before"), ("a", "before")]:  # no chats
        assert thinking.stage_of(tokenizer, tokenizer(text).input_ids, None) == stage
    # As in Gemma 4, a marker may have a label, and the template writes an empty thought if it is not to think.
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<|channel>", special=False), AddedToken("<channel|>", special=False)])
    thinking = thinking_of(tokenizer, "auto")
    assert (thinking.begin, thinking.label) == ("<|channel>", "thought")
    thought = "<|channel>thought\n"
    for text, stage in [(thought, "in"), (f"{thought}<channel|>", "after"), ("<|channel>final\n", "before"),
                        (f"{thought}Hm", "before")]:  # fmt: skip
        assert thinking.stage_of(tokenizer, tokenizer(text).input_ids) == stage


class Once:
    error = None

    def __init__(self, size: int = 100) -> None:
        self.past: list[int] = []
        self._size = size

    def effect(self) -> Any:
        return np.arange(self._size) == len(self.past) + 1

    def push(self, token_id: int) -> bool:
        is_next = token_id == len(self.past) + 1
        self.past += [token_id] if is_next else []
        return is_next

    def pop(self, num_tokens: int) -> None:
        del self.past[len(self.past) - num_tokens :]


def allowed(constraint: Any) -> list[int]:
    found: list[int] = np.flatnonzero(constraint.effect()).tolist()
    return found


@pytest.mark.parametrize("stage", ["before", "in", "after"])
def test_constraints_begin_after_thoughts(stage: Stage) -> None:
    text = {"before": [90, 7, 3, 91], "in": [7, 90, 91], "after": []}[stage] + [1, 2, 3]
    for num_back in range(1, 5):
        inner = Once()
        constraint, at = Thoughts(inner, MARKERS, stage, 100, frozenset([99])), 0
        while at < len(text):  # as drafts go: forward, back, and forward again
            ahead = text[at : at + num_back]
            for token_id in ahead:
                mask: Any = constraint.effect()
                assert (mask is None or mask[token_id]) and constraint.push(token_id)
            constraint.pop(len(ahead))
            assert constraint.push(text[at])
            at += 1
        assert inner.past == [1, 2, 3]
    other = Thoughts(Once(), MARKERS, "before", 100, frozenset([99]))
    assert allowed(other) == [1, 90]
    assert not other.push(2) and other.push(1) and not other.push(90)
    thoughts = Thoughts(Once(), MARKERS, "in", 100, frozenset([99]))
    assert allowed(thoughts) == [*range(99)] and not thoughts.push(99) and all(map(thoughts.push, [98, 91, 1]))


@pytest.mark.parametrize("stage", ["before", "in"])
@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("has_inner", [False, True])
def test_thoughts_end_at_their_budget(stage: Stage, budget: int, has_inner: bool) -> None:
    """8 is white space, and comes before the marker alone."""
    text = ([90] if has_inner else [8, 8, 90])[: 9 if stage == "before" else 0] + [7, 8, 6, 5, 91][:budget] + [91, 1]
    for num_back in range(1, 6):
        inner = Once() if has_inner else None
        constraint = Thoughts(inner, MARKERS, stage, 100, frozenset([99]), budget, lambda token_id: token_id == 8)
        for at, token_id in enumerate(text):
            num_ahead = sum(map(constraint.push, text[at : at + num_back]))
            constraint.pop(num_ahead)
            if text[at:] == [91, 1]:
                assert allowed(constraint) == [91] and not constraint.push(7)
            elif not has_inner:
                assert constraint.effect() is None
            assert constraint.push(token_id)
        if not has_inner:  # later thoughts are text
            assert all(map(constraint.push, [90, 7, 7, 7, 7])) and constraint.effect() is None


def harmony() -> tuple[Any, Any]:
    tokenizer = byte_level_tokenizer()
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "assistant", "analysis", "final")
    tokenizer.add_tokens([AddedToken(name, special=name.startswith("<")) for name in names])
    return tokenizer, thinking_of(tokenizer, "auto")


def test_channels_may_be_thoughts() -> None:
    tokenizer, thinking = harmony()
    turn, thought = "<|start|>assistant", "<|channel|>analysis<|message|>"
    answer = "<|channel|>final<|message|>"
    for text, stage in [(turn, "before"), (f"{turn}{thought}", "in"), (f"<|end|>{turn}{answer}", "after")]:
        assert thinking.stage_of(tokenizer, tokenizer(text).input_ids) == stage
    for text, stage in [(f"{thought}Hm", "in"), (f"{thought}Hm<|end|>{turn}{answer}", "after")]:
        assert thinking.stage_of(tokenizer, tokenizer(text).input_ids, None) == stage
    text = f"{thought}Hm<|end|>{turn}{answer}Yes<|end|>{turn}{thought}Hm, no"
    ids = tokenizer(text).input_ids
    expected = len(tokenizer("HmHm, no").input_ids)
    for stage in ("before", "after"):
        shown = Detokenizer(tokenizer, ids[:1], [*thinking.ids, *thinking.answer_ids])
        row = RowText(shown, (), (), thoughts=ThoughtSplitter(thinking, stage))
        assert {row.push(token_id) for token_id in ids} == {None} and row.num_thoughts == expected


@pytest.mark.parametrize("has_inner", [False, True])
def test_channels_have_one_budget(has_inner: bool) -> None:
    """Of all messages with thoughts; when it is spent none can begin. A constraint begins after the answer's header."""
    tokenizer, thinking = harmony()
    begin, turn, answer, size = thinking.begin_ids, thinking.turn_ids, thinking.answer_ids, len(tokenizer)
    constraint = Thoughts(Once(size) if has_inner else None, thinking, "before", size, frozenset([2]), 4, head=turn)
    end = thinking.end_id
    text = [*begin, 7, 8, end, *turn, *begin, 9, 10, end, *turn, *answer, 1]
    for num_back in range(1, 9):
        for at, token_id in enumerate(text):
            num_ahead = sum(map(constraint.push, text[at : at + num_back]))
            assert num_ahead == len(text[at : at + num_back])
            constraint.pop(num_ahead)
            mask: Any = constraint.effect()
            assert mask is None or mask[token_id]
            if text[at:] == [end, *turn, *answer, 1]:  # spent
                assert allowed(constraint) == [end]
            if text[at:] == [*answer[1:], 1]:
                assert not constraint.push(begin[1]) and not mask[begin[1]]
            if has_inner and text[at:] in ([*turn, *answer, 1], [*answer, 1], [*answer[1:], 1]):
                assert allowed(constraint) == [token_id]
            assert constraint.push(token_id)
        assert not (has_inner and constraint.push(5))
        constraint.pop(len(text))
    if has_inner:  # at the beginning
        assert allowed(constraint) == [begin[0]] and constraint.push(begin[0])
        assert allowed(constraint) == sorted([begin[1], answer[1]])
    # Calls of tools have headers of their own.
    calls = Thoughts(Once(size), replace(thinking, answer_ids=()), "before", size, frozenset([2]), 0, head=turn)
    assert allowed(calls) == [1] and not calls.push(begin[0]) and calls.push(1)
