"""Thoughts and calls in text: the same parts, however it arrives; never half a marker; what is no call is content."""

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.text.output_parser import CallParser, OutputParser, Piece, ThoughtSplitter
from outrider.text.thinking import Stage, Thinking
from outrider.text.tool_formats import TOOL_FORMATS

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


def fed_to(parser: OutputParser, chunks: list[str]) -> list[tuple[Piece, str, bool]]:
    """Pieces of an output, each with the text at its place, and whether it came with the end."""
    found, text = [], ""
    for i, chunk in enumerate([*chunks, ""]):
        text += chunk
        for piece in parser.feed(chunk, is_end=i == len(chunks)):
            end = len(text) - piece.num_after
            found.append((piece, text[end - len(piece.text) : end], i == len(chunks)))
    return found


def parsed(name: str, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser(TOOL_FORMATS[name], NAMES)
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return parts([*pieces, *parser.feed("", is_end=True)])


HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
SUN, NOW, ONE = ("weather", ROME), ("time", "{}"), ("time", '{"a": 1}')
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
    ("hermes", "The tag <tool_call>", "The tag <tool_call>", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", f"<tool_call>no</tool_call>{HERMES_CALL}", "<tool_call>no</tool_call>", [SUN]),
    ("llama3_json", f'\n{{"name": "weather", "parameters": {ROME}}}', "", [SUN]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "time", "parameters": {}}; {"name": "weather", "parameters": {}}',
        "",
        [NOW, ("weather", "{}")],
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
        [SUN, NOW],
    ),
    ("mistral", f"Yes.[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{ROME}[TOOL_CALLS]time{{}}", "Yes.", [SUN, NOW]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "time", "arguments": {}, "id": "VvvODy9mT"}, {"name": "time", "arguments": {"a": 1}',
        "",
        [NOW, ONE],
    ),
    ("mistral", "[TOOL_CALLS", "[TOOL_CALLS", []),
    ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
    ("hermes", '<tool_call>{"name": "time"}\n]Now, <b>.', "Now, <b>.", [NOW]),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": }</tool_call>',
        '<tool_call>{"name": "time", "arguments": }</tool_call>',
        [],
    ),
    ("llama3_json", '\u00a0{"name": "time"}', '\u00a0{"name": "time"}', []),
    ("mistral", "[TOOL_CALLS]time[ARGS]", "", [NOW]),
    ("mistral", "[TOOL_CALLS]is a marker {of calls}.", "[TOOL_CALLS]is a marker {of calls}.", []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    ("openai", f" to=functions.weather <|constrain|>json<|message|>{ROME}", "", [SUN]),
    ("openai", f" to=functions.weather<|channel|>commentary json<|message|>{ROME}", "", [SUN]),
    ("openai", "Write to=functions.other {}", "Write to=functions.other {}", []),
]


def test_parts_of_a_text() -> None:
    """In one piece, and character by character; arguments of any depth."""
    for name, text, content, calls in CASES:
        assert parsed(name, [text]) == parsed(name, list(text)) == (content, calls)
    deep = f'{{"a": {"[" * 20_000}{"]" * 20_000}}}'
    assert parsed("hermes", [f'<tool_call>{{"name": "time", "arguments": {deep}}}</tool_call>']) == (
        "",
        [("time", deep)],
    )
    text = f'<tool_call>{{"arguments": {deep}, "name": "time"}}</tool_call>'
    is_read = sys.version_info >= (3, 14)  # whose JSON may have any depth
    assert parsed("hermes", [text]) == (("", [("time", deep)]) if is_read else (text, []))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=6))
def test_any_cuts_give_the_same_parts(case: Any, cuts: list[int]) -> None:
    name, text, content, calls = case
    at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[a:b] for a, b in zip(at, at[1:], strict=False)]
    assert parsed(name, chunks) == (content, calls)


MARKERS = Thinking("<think>", "</think>", (90,), 91)
CALL = '<tool_call>\n{"name": "time"}\n</tool_call>'


@pytest.mark.parametrize(
    ("stage", "text", "expected"),
    [
        ("in", "Hm, <b>.\n</think>\n\nYes.\n", ("Hm, <b>.", "Yes.\n", "")),
        ("in", "Hm", ("Hm", "", "")),
        ("in", "\n\n</think>\n", ("", "", "")),
        ("before", "<think>\nHm.\n\nWell.</think>Yes. </think>", ("Hm.\n\nWell.", "Yes. </think>", "")),
        ("before", "\n <think>Hm", ("Hm", "", "")),
        ("before", " Yes.", ("", " Yes.", "")),
        ("before", " <thi", ("", " <thi", "")),
        ("after", "\n\nYes <think>.", ("", "Yes <think>.", "")),
        ("in", f"Hm {CALL}</think>\n\n{CALL}", (f"Hm {CALL}", "", "time")),
        ("in", f"Hm</think>Yes \n{CALL} \nand <tool_call>no", ("Hm", "Yes \nand <tool_call>no", "time")),
    ],
)
def test_thoughts_and_what_follows(stage: Stage, text: str, expected: tuple[str, str, str]) -> None:
    for chunks in ([text], list(text), [text[:9], text[9:]]):
        parser = OutputParser(ThoughtSplitter(MARKERS, stage), CallParser(TOOL_FORMATS["hermes"], ["time"]))
        found_at = fed_to(parser, chunks)
        for piece, there, _ in found_at:
            assert piece.kind != "content" or there == piece.text
        pieces = [piece for piece, *_ in found_at]
        kinds = ("reasoning", "content", "call")
        found = tuple("".join(piece.text for piece in pieces if piece.kind == kind) for kind in kinds)
        assert found[0] == expected[0] and found[2] == expected[2] and found[1].strip() == expected[1].strip()


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
        ("<|channel|>analysis<|message|>Hm", ("Hm", "", ())),
        (f"{THOUGHT}{TURN}<|chan", ("Hm, 1 < 2.", "<|chan", ())),
        *((f"{THOUGHT}{cut}", ("Hm, 1 < 2.", "", ())) for cut in ("<|start|>", "<|start|>ass", f"{TURN}<|channel|>")),
        ("<|channel|>", ("", "", ())),
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
        parser = OutputParser(ThoughtSplitter(HARMONY, "before"), CallParser(TOOL_FORMATS["openai"], NAMES))
        found_at = fed_to(parser, chunks)
        for piece, there, is_last in found_at:
            assert piece.kind != "content" or is_last or there == piece.text
        pieces = [piece for piece, *_ in found_at]
        content, calls = parts(pieces)
        thoughts = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        assert (thoughts, content, *calls[:1]) == (*expected[:2], *filter(None, expected[2:]))
