"""Constrains the output to calls of tools, or to text without half a call in it. The grammar is llguidance's Lark.

Markers that are single tokens are forced as such (models have learnt them), and text may not spell them otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.text.structure import lark_json
from outrider.text.tools.formats import ToolFormat

_ANY = r"(.|\n)*"
_NO_OBJECT = r"[ \t\r\n]*([^{ \t\r\n](.|\n)*)?"  # text that does not begin like JSON


def calls_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    form: ToolFormat,
    ids: Mapping[str, int],
    *,
    is_forced: bool,
    is_parallel: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Grammar of an output with calls.

    Args:
        tools: names, and JSON schemas of their arguments.
        ids: of the markers that are tokens.
        is_forced: there is at least one call, and no text; else text may come before calls or in place of them.
        is_parallel: there may be several calls.
        answer: JSON schema of the text, which then comes in place of calls.
    """

    def literal(text: str) -> str:
        """A fixed text, with its markers."""
        parts = re.split("|".join(f"({re.escape(token)})" for token in form.tokens), text)
        return " ".join(_marker(part, ids) if part in form.tokens else json.dumps(part) for part in parts if part)

    first, _, after_name = form.before.partition("%s")
    trigger = form.tokens[0]
    has_head = not is_forced and answer is None and form.has_marker
    lines = ["%llguidance {}"]
    begin, more = (form.opening + first)[len(trigger) if has_head else 0 :], f"({literal(form.between + first)} call)*"
    calls = f"{literal(begin)} call {more if is_parallel else ''} {literal(form.closing)}"
    if is_forced:
        lines.append(f"start: {calls}")
    elif answer is not None:
        lines += [f"start: answer | {calls}", f"answer: {lark_json(answer)}"]
    else:
        lines.append(f"start: TEXT | {'head ' if has_head else ''}{calls}")
        lines.append(f"TEXT: /{_ANY if form.has_marker else _NO_OBJECT}/ & ~/{_ANY}{_escaped(trigger)}{_ANY}/")
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


def _escaped(text: str) -> str:
    return re.sub(r"([^\w<>])", r"\\\1", text)
