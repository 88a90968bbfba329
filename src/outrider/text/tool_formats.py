"""Formats of calls of tools (Hermes, Qwen, Llama 3, Mistral, gpt-oss), and grammars that constrain an output to them.

Sources: the chat templates of NousResearch/Hermes-2-Pro and 3, Qwen2.5 and Qwen3, meta-llama/Llama-3.1 and 3.2,
mistralai/Mistral-7B-Instruct-v0.3 and Mistral-Small-3.x, and openai/gpt-oss-20b; the names of the formats are those of
vLLM's parsers. The grammars are llguidance's Lark.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import OptionError
from outrider.text.structure import lark_json

SPACE = " \t\r\n"  # of JSON, and of the grammar's text
_ANY = r"(.|\n)*"
_NO_OBJECT = r"[ \t\r\n]*([^{ \t\r\n](.|\n)*)?"  # text that does not begin like JSON


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        tokens: markers, which may be special tokens; the first begins calls.
        opening, before, after, between, closing: a call is ``before``, with the tool's name for ``%s``, its arguments
            and ``after``; calls have ``between`` between them, and ``opening`` and ``closing`` around them.
        skipped: characters to skip after a call: models write brackets too many.
        end: the marker after a call; without one, calls may follow each other.
        may_begin_with_name: a call may be its name before its arguments, or in a list.
        is_message: a call is a message of its own, which ends the output: text cannot be constrained beside it.
        id_length: of the numbers of calls: templates may check it.
    """

    tokens: Sequence[str]
    before: str
    after: str
    between: str
    opening: str = ""
    closing: str = ""
    skipped: str = SPACE
    end: str = ""
    may_begin_with_name: bool = False
    is_message: bool = False
    id_length: int = 24

    @property
    def has_marker(self) -> bool:
        """Whether calls begin with a marker, so that no text looks like one."""
        return (self.opening + self.before).startswith(self.tokens[0])

    def new_id(self) -> str:
        letters = string.ascii_letters + string.digits
        prefix = "call_" if self.id_length > 9 else ""
        return prefix + "".join(secrets.choice(letters) for _ in range(self.id_length))


_OBJECT = '{"name": "%s", "arguments": '
# <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several in turn.
_HERMES = ToolFormat(
    ("<tool_call>", "</tool_call>"),
    before=f"<tool_call>\n{_OBJECT}",
    after="}\n</tool_call>",
    between="\n",
    skipped=SPACE + "}]",
    end="</tool_call>",
)
# {"name": ..., "parameters": {...}}, at the beginning or after <|python_tag|>; several have semicolons between them.
# Answers may be JSON too: a call has the name of a tool.
_LLAMA = ToolFormat(
    ("<|python_tag|>",), before='{"name": "%s", "parameters": ', after="}", between="; ", skipped=SPACE + ";"
)
# [TOOL_CALLS] before each call: NAME, [ARGS] and its arguments; before 2025, before a list of JSON objects.
_MISTRAL = ToolFormat(
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    before="[TOOL_CALLS]%s[ARGS]",
    after="",
    between="",
    skipped=SPACE + ",]",
    may_begin_with_name=True,
    id_length=9,
)
_MISTRAL_LIST = replace(
    _MISTRAL, tokens=("[TOOL_CALLS]",), before=_OBJECT, after="}", between=", ", opening="[TOOL_CALLS][", closing="]"
)
# A recipient in the header of a message, before its channel (as in histories) or after it.
_OPENAI = ToolFormat(
    (" to=functions.", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    before=" to=functions.%s<|channel|>commentary json<|message|>",
    after="",
    between="",
    end="<|call|>",
    may_begin_with_name=True,
    is_message=True,
)
TOOL_FORMATS = {"hermes": _HERMES, "llama3_json": _LLAMA, "mistral": _MISTRAL, "openai": _OPENAI}


def tool_format_of(tokenizer: Any, name: str) -> ToolFormat | None:
    """Format of a model's calls, by its name; by "auto" the chat template and the vocabulary tell, and it is None if
    the model has none of these. Raises OptionError: there is no such format."""
    vocabulary = tokenizer.get_vocab()
    found = _name_of(tokenizer, vocabulary) if name == "auto" else name
    if found is None:
        return None
    if found not in TOOL_FORMATS:
        raise OptionError("--tool-parser", name, f"choose auto, or one of {', '.join(TOOL_FORMATS)}")
    return _MISTRAL_LIST if found == "mistral" and "[ARGS]" not in vocabulary else TOOL_FORMATS[found]


def _name_of(tokenizer: Any, vocabulary: Collection[str]) -> str | None:
    if not tokenizer.chat_template:
        return None
    template = tokenizer.get_chat_template(None, [{}])
    if "<|channel|>commentary" in template:
        return "openai"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    # The formats of Qwen3-Coder and GLM 4.5 have the same marker, with XML after it.
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in vocabulary and '"parameters"' in template:
        return "llama3_json"
    return None


def calls_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    form: ToolFormat,
    ids: Mapping[str, int],
    *,
    is_forced: bool,
    is_parallel: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Grammar of an output with calls, or of text without half a call in it.

    Markers that are single tokens are forced as such (models have learnt them), and text may not spell them otherwise.
    ``tools`` are names, and JSON schemas of arguments. If a call ``is_forced``, there is no text; else text may come
    before calls or in place of them; only in place of them if it is JSON of a schema, the ``answer``."""

    def literal(text: str) -> str:
        parts = re.split("|".join(f"({re.escape(token)})" for token in form.tokens), text)
        return " ".join(_marker(part, ids) if part in form.tokens else json.dumps(part) for part in parts if part)

    first, _, after_name = form.before.partition("%s")
    trigger = form.tokens[0]
    has_head = not is_forced and answer is None and form.has_marker
    lines = ["%llguidance {}"]
    begin, more = (form.opening + first)[len(trigger) if has_head else 0 :], f"({literal(form.between + first)} call)*"
    calls = f"{literal(begin)} call {more if is_parallel and not form.is_message else ''} {literal(form.closing)}"
    if is_forced:
        lines.append(f"start: {calls}")
    elif answer is not None:
        lines += [f"start: answer | {calls}", f"answer: {lark_json(answer)}"]
    else:
        escaped = re.sub(r"([^\w<>])", r"\\\1", trigger)
        lines.append(f"start: TEXT | {'head ' if has_head else ''}{calls}")
        lines.append(f"TEXT: /{_ANY if form.has_marker else _NO_OBJECT}/ & ~/{_ANY}{escaped}{_ANY}/")
        if has_head and trigger in ids:
            lines.append(f"head: TEXT {_marker(trigger, ids)}")
        elif has_head:
            lines.append(f"head[lazy]: /{_ANY}/ {json.dumps(trigger)}")
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, (name, schema) in enumerate(tools):
        lines.append(f"call_{i}: {literal(name + after_name)} args_{i} {literal(form.after)}")
        lines.append(f"args_{i}: {lark_json(schema)}")
    return "\n".join(lines)


def _marker(token: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[token]}]>" if token in ids else json.dumps(token)
