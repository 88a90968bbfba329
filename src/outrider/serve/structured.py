"""Structured output in request bodies: the fields that constrain the output.

Sources: OpenAI's API reference (``response_format``); llama.cpp's server (a ``schema`` beside ``json_object``); vLLM's
"structured outputs" (``structured_outputs``, and the older ``guided_*``, which many clients still send); SGLang's and
llama.cpp's own fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.serve.http_errors import Refusal
from outrider.serve.json_input import read_json

_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
# SGLang's names (whose EBNF is the GBNF of xgrammar), and llama.cpp's.
_GUIDED |= {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar"}
_MOST_CHOICES = 5000

STRUCTURED = ("response_format", "structured_outputs", *_GUIDED)


def structure_of(body: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Constraint in the form of ``Sampling``, and the field that sets it. Raises Refusal."""
    found: dict[str, dict[str, Any]] = {}  # field -> options
    if (form := body.get("response_format")) is not None:
        found["response_format"] = _response_format(form)
    if (parts := body.get("structured_outputs")) is not None:
        if not isinstance(parts, Mapping):
            raise Refusal("structured_outputs must be an object", param="structured_outputs")
        for name, value in parts.items():
            if value not in (None, False):
                found[f"structured_outputs.{name}"] = _part(name, value, f"structured_outputs.{name}")
    for field_name, name in _GUIDED.items():
        if body.get(field_name) is not None:
            found[field_name] = _part(name, body[field_name], field_name)
    given = {name: options for name, options in found.items() if options}
    if len(given) > 1:
        raise Refusal(f"{' and '.join(given)} all constrain the output: give one of them", param=list(given)[1])
    for name, options in given.items():
        return options, name
    return {}, None


def _response_format(form: Any) -> dict[str, Any]:
    param = "response_format"
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = form.get("schema")
        if not isinstance(schema, Mapping | None):
            raise Refusal("response_format.schema must be a JSON schema, an object", param=param)
        return {"json_schema": {"type": "object"} if schema is None else schema}
    if kind == "json_schema":
        outer = form.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else None
        if not isinstance(schema, Mapping):
            raise Refusal("response_format.json_schema.schema must be a JSON schema, an object", param=param)
        return {"json_schema": schema}
    raise Refusal("response_format.type must be text, json_object or json_schema", param=param)


def _part(name: str, value: Any, param: str) -> dict[str, Any]:
    """Constraint from one part of ``structured_outputs``."""
    if name == "json_object":
        return {"json_schema": {"type": "object"}}
    if name == "json":
        try:
            schema = read_json(value, param) if isinstance(value, str) else value
        except ValueError:
            schema = None
        if not isinstance(schema, Mapping):
            raise Refusal(f"{param} must be a JSON schema, an object", param=param)
        return {"json_schema": schema}
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise Refusal(f"{param} must be a list of non-empty strings", param=param)
        if len(value) > _MOST_CHOICES:
            raise Refusal(f"{param} has {len(value)} strings, of at most {_MOST_CHOICES}", param=param)
        # One terminal is one automaton; thousands of rules would exceed the parser's limit on a row.
        return {"grammar": "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one) for one in value)}
    if name in ("regex", "grammar"):
        if not isinstance(value, str) or not value:
            raise Refusal(f"{param} must be a non-empty string", param=param)
        return {name: value}
    raise Refusal(f"{param} is not supported: leave it out", param=param)
