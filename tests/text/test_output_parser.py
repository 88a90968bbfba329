"""Thoughts and calls in text: the same parts, however it arrives; never half a marker; what is no call is content."""

import sys
from collections import deque
from typing import Any

import pytest

from outrider.text.output_parser import CallParser, OutputParser
from outrider.text.thinking import Stage, Thinking
from outrider.text.thought_splitter import Piece, ThoughtSplitter
from outrider.text.tool_formats import TOOL_FORMATS

NAMES = ["weather", "time"]
ROME = '{"city": "Rome </tool_call> \\" }{", "folder": "C:\\\\", "days": [1, {"a": null}]}'


def parts(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
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
    parser = CallParser(TOOL_FORMATS[name], NAMES)
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return parts([*pieces, *parser.feed("", is_end=True)])


def split(
    thinking: Thinking, stage: Stage, calls: CallParser, chunks: list[str]
) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, content and calls; each piece of content is at its place."""
    splitter, read, found, text = ThoughtSplitter(thinking, stage), deque[list[Piece]](), list[Piece](), ""
    parser = OutputParser(read, calls)
    for i, chunk in enumerate([*chunks, ""]):
        text, is_end = text + chunk, i == len(chunks)
        read.append(splitter.feed(chunk, is_end=is_end))
        for piece in parser.next_pieces(is_end=is_end):
            begin = piece.end - len(piece.text)
            assert piece.kind != "content" or is_end or text[begin : piece.end] == piece.text
            found.append(piece)
    return "".join(piece.text for piece in found if piece.kind == "reasoning"), *parts(found)


HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
SUN, NOW, ONE = ("weather", ROME), ("time", "{}"), ("time", '{"a": 1}')
LLAMA = '<|python_tag|>{"type": "function", "name": "time", "parameters": {}}; {"name": "weather", "parameters": {}}'
MISTRAL = '[TOOL_CALLS][{"name": "time", "arguments": {}, "id": "VvvODy9mT"}, {"name": "time", "arguments": {"a": 1}'
LIST = f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}, {{"name": "time", "arguments": {{}}}}]'
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text with <tool and a < b.\n", "Just text with <tool and a < b.\n", []),
    ("hermes", HERMES_CALL, "", [SUN]),
    ("hermes", f"Let me see.\n\n{HERMES_CALL}\n", "Let me see.", [SUN]),
    ("hermes", f'{HERMES_CALL}\n<tool_call>{{"arguments": {{}}, "name": "time"}}</tool_call>', "", [SUN, NOW]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call> then', " then", [NOW]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}', "", [NOW]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}', "", [ONE]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1}\n</tool_call>x', "x", [ONE]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1}}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": ]</tool_call>', "", [("time", '{"a": ]')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1', "", [("time", '{"a": 1')]),
    ("hermes", "The tag <tool_call> is one.", "The tag <tool_call> is one.", []),
    ("hermes", f"<tool_call>no</tool_call>{HERMES_CALL}", "<tool_call>no</tool_call>", [SUN]),
    ("llama3_json", f'\n{{"name": "weather", "parameters": {ROME}}}', "", [SUN]),
    ("llama3_json", LLAMA, "", [NOW, ("weather", "{}")]),
    ("llama3_json", '{"name": "Bob", "parameters": 3}', '{"name": "Bob", "parameters": 3}', []),
    ("llama3_json", '<|python_tag|>print("a")', '<|python_tag|>print("a")', []),
    ("mistral", LIST, "", [SUN, NOW]),
    ("mistral", f"Yes.[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{ROME}[TOOL_CALLS]time{{}}", "Yes.", [SUN, NOW]),
    ("mistral", MISTRAL, "", [NOW, ONE]),
    ("mistral", "[TOOL_CALLS", "[TOOL_CALLS", []),
    ("hermes", '<tool_call>{"name": "time"}\n]Now, <b>.', "Now, <b>.", [NOW]),
    ("mistral", "[TOOL_CALLS]time[ARGS]", "", [NOW]),
    ("mistral", "[TOOL_CALLS]is a marker {of calls}.", "[TOOL_CALLS]is a marker {of calls}.", []),
    ("openai", f" to=functions.weather <|constrain|>json<|message|>{ROME}", "", [SUN]),
    ("openai", f" to=functions.weather<|channel|>commentary json<|message|>{ROME}", "", [SUN]),
    ("openai", "Write to=functions.other {}", "Write to=functions.other {}", []),
]


def test_parts_of_a_text() -> None:
    for name, text, content, calls in CASES:
        for size in (1, 2, 5, 13, 50, len(text)):
            assert parsed(name, [text[at : at + size] for at in range(0, len(text), size)]) == (content, calls)
    deep = f'{{"a": {"[" * 20_000}{"]" * 20_000}}}'
    text = f'<tool_call>{{"name": "time", "arguments": {deep}}}</tool_call>'
    assert parsed("hermes", [text]) == ("", [("time", deep)])
    text = f'<tool_call>{{"arguments": {deep}, "name": "time"}}</tool_call>'
    is_read = sys.version_info >= (3, 14)  # whose JSON may have any depth
    assert parsed("hermes", [text]) == (("", [("time", deep)]) if is_read else (text, []))


MARKERS = Thinking("<think>", "</think>", (90,), 91)
CALL = '<tool_call>\n{"name": "time"}\n</tool_call>'


@pytest.mark.parametrize(
    ("stage", "text", "expected"),
    [
        ("in", "Hm, <b>.\n</think>\n\nYes.\n", ("Hm, <b>.", "Yes.\n", [])),
        ("in", "Hm", ("Hm", "", [])),
        ("before", "<think>\nHm.\n\nWell.</think>Yes. </think>", ("Hm.\n\nWell.", "Yes. </think>", [])),
        ("before", " Yes.", ("", " Yes.", [])),
        ("in", f"Hm {CALL}</think>\n\n{CALL}", (f"Hm {CALL}", "", [NOW])),
        ("in", f"Hm</think>Yes \n{CALL} \nand <tool_call>no", ("Hm", "Yes \nand <tool_call>no", [NOW])),
    ],
)
def test_thoughts_and_what_follows(stage: Stage, text: str, expected: tuple[str, str, Any]) -> None:
    for chunks in ([text], list(text), [text[:9], text[9:]]):
        thoughts, content, calls = split(MARKERS, stage, CallParser(TOOL_FORMATS["hermes"], ["time"]), chunks)
        assert (thoughts, content.strip(), calls) == (expected[0], expected[1].strip(), expected[2])


HARMONY = Thinking(
    "<|channel|>analysis<|message|>", "<|end|>", (5, 6, 8), 7, "", "<|start|>assistant", "<|channel|>final"
)
THOUGHT, TURN = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|>", "<|start|>assistant"
ARGUMENTS = '{"city": "Rome"}'
CALLED = ("weather", ARGUMENTS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}{TURN}<|channel|>final<|message|>Yes.\n", ("Hm, 1 < 2.", "Yes.\n", ())),
        ("<|channel|>final<|message|>A <b>.", ("", "A <b>.", ())),
        (f"{THOUGHT}<|start|>ass", ("Hm, 1 < 2.", "", ())),
        ("<|channel|>final<|message|>Yes.<|end|><|start|>", ("", "Yes.", ())),
        (
            f"{THOUGHT}{TURN}<|channel|>commentary<|message|>Let me see.<|end|>{TURN}{THOUGHT}{TURN}<|channel|>final"
            "<|message|>Yes.",
            ("Hm, 1 < 2.\nHm, 1 < 2.", "Let me see.Yes.", ()),
        ),
        *(
            (f"{THOUGHT}{TURN}{header}{ARGUMENTS}", ("Hm, 1 < 2.", "", CALLED))
            for header in (
                "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
                "<|channel|>commentary to=functions.weather<|message|>",
                "<|channel|>analysis to=functions.weather<|constrain|>json<|message|>",
                " to=functions.weather<|channel|>commentary json<|message|>",
            )
        ),
        (
            f"<|channel|>commentary<|message|>I look.<|end|>{TURN} to=functions.weather<|channel|>commentary"
            f"<|message|>{ARGUMENTS}",
            ("", "I look.", CALLED),
        ),
        ("<|channel|>commentary to=python code<|message|>print(1)", ("", " to=python codeprint(1)", ())),
    ],
)
def test_channels_are_thoughts_content_and_calls(text: str, expected: tuple[str, str, tuple[str, ...]]) -> None:
    """The layouts of openai/harmony's ``docs/format.md`` and of llama.cpp's ``tests/test-chat.cpp`` (GPT-OSS)."""
    for chunks in ([text], list(text), [text[:9], text[9:31], text[31:]]):
        thoughts, content, calls = split(HARMONY, "before", CallParser(TOOL_FORMATS["openai"], NAMES), chunks)
        assert (thoughts, content, *calls[:1]) == (*expected[:2], *filter(None, expected[2:]))
