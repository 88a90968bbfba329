"""Formats of calls, found by the template; and their grammars, read by llguidance itself: no half a call."""

import itertools
from dataclasses import replace
from typing import Any

import llguidance
import pytest
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken

from outrider.errors import OptionError
from outrider.text.tool_formats import TOOL_FORMATS, ToolFormat, calls_grammar, tool_format_of
from pairs import byte_level_tokenizer, word_tokenizer

RAIN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS: Any = [("weather", RAIN), ("time", {"type": "object", "properties": {}, "additionalProperties": False})]
LIST = tool_format_of(word_tokenizer(), "mistral")
FORMATS: dict[str, tuple[ToolFormat | None, str]] = {
    "hermes": (TOOL_FORMATS["hermes"], '<tool_call>\n{"name": "weather", "arguments": {"a": 3}}\n</tool_call>'),
    "llama3_json": (TOOL_FORMATS["llama3_json"], '{"name": "weather", "parameters": {"a": 3}}'),
    "mistral": (TOOL_FORMATS["mistral"], '[TOOL_CALLS]weather[ARGS]{"a": 3}'),
    "list": (LIST, '[TOOL_CALLS][{"name": "weather", "arguments": {"a": 3}}]'),
}


def tokens_of(form: ToolFormat) -> tuple[Any, dict[str, int]]:
    """Markers are tokens: every other one is special."""
    tokenizer = byte_level_tokenizer()
    special = itertools.cycle([True, False])
    tokenizer.add_tokens([AddedToken(token, special=next(special)) for token in form.tokens])
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return tokenizer, {token: tokenizer.convert_tokens_to_ids(token) for token in form.tokens}


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_texts_that_match(name: str, is_parallel: bool) -> None:
    form, call = FORMATS[name]
    assert form is not None
    tokenizer, ids = tokens_of(form)
    tokens = from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[tokenizer.eos_token_id])

    def matches(grammar: str, given: str | list[int]) -> bool:
        matcher = llguidance.LLMatcher(tokens, llguidance.grammar_from("grammar", grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        text = tokenizer(given, add_special_tokens=False).input_ids if isinstance(given, str) else given
        return matcher.validate_tokens(text) == len(text) and matcher.consume_tokens(text) and matcher.is_accepting()

    options: Any = {"ids": ids, "is_parallel": is_parallel}
    forced = calls_grammar(TOOLS, form, is_forced=True, **options)
    free = calls_grammar(TOOLS, form, is_forced=False, **options)
    two = f"{call[:-1]}, {call[13:]}" if name == "list" else f"{call}{form.between}{call}"
    wrong = [call.replace("weather", "other"), call.replace("3", '3, "b": 1'), call.replace("3", '"x"'), call[:-3]]
    for grammar in (forced, free):
        assert matches(grammar, call)
        assert matches(grammar, two) == is_parallel
        assert not any(matches(grammar, text) for text in wrong)
    assert not matches(forced, "hello")
    assert matches(free, "hello {you} [a] <b> there\n")
    if form.has_marker:
        assert matches(free, f"Let me see.\n{call}")
        assert not matches(free, f"{form.tokens[0]}{{}}")
        answer = calls_grammar(TOOLS, form, is_forced=False, answer=RAIN, **options)
        assert matches(answer, '{"a": 1}') and matches(answer, call) and not matches(answer, "hello")
    else:
        assert not matches(free, '{"a": 1}')
    # A marker that is spelled in other tokens would be taken for one; where none is a token, spelling is all there is.
    spelled = tokenizer.convert_tokens_to_ids(list(form.tokens[0]))
    assert not matches(free, spelled)
    if name == "hermes":
        tokenizer, _ = tokens_of(replace(form, tokens=()))
        tokens = from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[tokenizer.eos_token_id])
        free = calls_grammar(TOOLS, form, {}, is_forced=False, is_parallel=True)
        assert matches(free, f"a <b {call}\n{call}") and matches(free, "hello")
        assert not matches(free, "<tool_call>{}")


TEMPLATES: list[tuple[str | None, list[str], str | None]] = [
    ("{{ tools }}<tool_call>", [], "hermes"),
    ("{{ tools }}<tool_call><function=", [], None),
    ("{{ tools }}<tool_call><arg_key>", [], None),
    ("{{ tools }}[TOOL_CALLS]", ["[ARGS]"], "mistral"),
    ("{{ tools }}" + '{"name": x, "parameters": y}', ["<|python_tag|>"], "llama3_json"),
    ("{{ tools }}" + '{"name": x, "parameters": y}', [], None),
    (None, [], None),
]


def test_the_template_tells_the_format() -> None:
    for template, special, expected in TEMPLATES:
        tokenizer = word_tokenizer()
        tokenizer.chat_template = template
        tokenizer.add_special_tokens({"extra_special_tokens": special})
        assert tool_format_of(tokenizer, "auto") is (TOOL_FORMATS[expected] if expected else None)
    assert LIST is not None and LIST.opening == "[TOOL_CALLS]["  # without the token for arguments
    assert len(LIST.new_id()) == 9 and LIST.new_id().isalnum()  # Mistral's template checks that
    with pytest.raises(OptionError, match="--tool-parser = 'pythonic' is invalid: choose auto, or one of hermes"):
        tool_format_of(word_tokenizer(), "pythonic")
