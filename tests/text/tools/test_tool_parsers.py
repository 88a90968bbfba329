"""Calls in text: the same parts, however the text arrives; never half a marker; and text that is no call is content."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import OptionError
from outrider.text.pieces import Piece
from outrider.text.tools.formats import TOOL_FORMATS, tool_format_of
from pairs import word_tokenizer

NAMES = ["weather", "time"]
ROME = '{"city": "Rome </tool_call> \\" }{", "days": [1, {"a": null}]}'


def parts(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and calls with their arguments."""
    content = "".join(piece.text for piece in pieces if piece.kind == "content")
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            assert piece.call == len(calls)
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[piece.call][1] += piece.text
    return content, [(name, arguments) for name, arguments in calls]


def parsed(name: str, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = TOOL_FORMATS[name].parser(NAMES)
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return parts([*pieces, *parser.finish()])


HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text with <tool and a < b.\n", "Just text with <tool and a < b.\n", []),
    ("hermes", HERMES_CALL, "", [("weather", ROME)]),
    ("hermes", f"Let me see.\n\n{HERMES_CALL}\n", "Let me see.", [("weather", ROME)]),
    (
        "hermes",
        f'{HERMES_CALL}\n<tool_call>{{"arguments": {{}}, "name": "time"}}</tool_call>',
        "",
        [("weather", ROME), ("time", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "time"}</tool_call> then', " then", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}', "", [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1}\n</tool_call>x', "x", [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1}}}</tool_call>', "", [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": ]</tool_call>', "", [("time", '{"a": ]')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1', "", [("time", '{"a": 1')]),
    ("hermes", "The tag <tool_call> is one.", "The tag <tool_call> is one.", []),
    ("hermes", "The tag <tool_call>", "The tag <tool_call>", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", f"<tool_call>no</tool_call>{HERMES_CALL}", "<tool_call>no</tool_call>", [("weather", ROME)]),
    ("llama3_json", f'\n{{"name": "weather", "parameters": {ROME}}}', "", [("weather", ROME)]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "time", "parameters": {}}; {"name": "weather", "parameters": {}}',
        "",
        [("time", "{}"), ("weather", "{}")],
    ),
    ("llama3_json", '{"name": "Bob", "parameters": 3}', '{"name": "Bob", "parameters": 3}', []),
    ("llama3_json", '{"answer": 3}', '{"answer": 3}', []),
    ("llama3_json", '  {"name"', '  {"name"', []),
    ("llama3_json", 'See {"name": "time"}', 'See {"name": "time"}', []),
    ("llama3_json", '<|python_tag|>print("a")', '<|python_tag|>print("a")', []),
    ("llama3_json", "   ", "   ", []),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}, {{"name": "time", "arguments": {{}}}}]',
        "",
        [("weather", ROME), ("time", "{}")],
    ),
    (
        "mistral",
        f"Yes.[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{ROME}[TOOL_CALLS]time{{}}",
        "Yes.",
        [("weather", ROME), ("time", "{}")],
    ),
    ("mistral", "[TOOL_CALLS", "[TOOL_CALLS", []),
    ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
    ("hermes", '<tool_call>{"name": "time"}\n]Now, <b>.', "Now, <b>.", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": }</tool_call>', "", [("time", "{}")]),
    ("llama3_json", '\u00a0{"name": "time"}', '\u00a0{"name": "time"}', []),
    ("mistral", "[TOOL_CALLS]time[ARGS]", "", [("time", "{}")]),
    ("mistral", "[TOOL_CALLS]is a marker {of calls}.", "[TOOL_CALLS]is a marker {of calls}.", []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_parts_of_a_text(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """In one piece, and character by character."""
    assert parsed(name, [text]) == parsed(name, list(text)) == (content, calls)


def test_arguments_that_are_too_deep() -> None:
    text = f'<tool_call>{{"name": "time", "arguments": {"[" * 20_000}{"]" * 20_000}}}</tool_call>'
    assert parsed("hermes", [text])[1][0][0] == "time"


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=6))
def test_any_cuts_give_the_same_parts(case: Any, cuts: list[int]) -> None:
    name, text, content, calls = case
    at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[a:b] for a, b in zip(at, at[1:], strict=False)]
    assert parsed(name, chunks) == (content, calls)


def test_arguments_are_passed_on_while_they_are_written() -> None:
    """All of them that can be known."""
    for name, text, *_ in CASES[1:2] + CASES[15:16] + CASES[24:25]:
        parser, fed, arguments = TOOL_FORMATS[name].parser(NAMES), "", ""
        for character in text:
            fed += character
            arguments += "".join(piece.text for piece in parser.feed(character) if piece.kind == "arguments")
            begun = fed.partition(ROME[:8])
            if begun[1] and ROME not in fed:
                assert arguments == ROME[:8] + begun[2]


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        ("{{ tools }}<tool_call>", [], "hermes"),
        ("{{ tools }}<tool_call><function=", [], None),
        ("{{ tools }}<tool_call><arg_key>", [], None),
        ("{{ tools }}[TOOL_CALLS]", ["[ARGS]"], "mistral"),
        ("{{ tools }}" + '{"name": x, "parameters": y}', ["<|python_tag|>"], "llama3_json"),
        ("{{ tools }}" + '{"name": x, "parameters": y}', [], None),
        ("{{ messages }}", [], None),
        (None, [], None),
    ],
)
def test_the_template_tells_the_format(template: str | None, special: list[str], expected: str | None) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    assert tool_format_of(tokenizer, "auto") is (TOOL_FORMATS[expected] if expected else None)


def test_mistral_writes_lists_without_the_token_for_arguments() -> None:
    form = tool_format_of(word_tokenizer(), "mistral")
    assert form is not None and form.opening == "[TOOL_CALLS]["
    assert len(form.new_id()) == 9 and form.new_id().isalnum()  # its template checks that
    with pytest.raises(OptionError, match="--tool-parser = 'pythonic' is invalid: choose auto, or one of hermes"):
        tool_format_of(word_tokenizer(), "pythonic")
    assert json.loads(ROME)
