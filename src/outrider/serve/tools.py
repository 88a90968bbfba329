"""Tools in chat requests: their fields, checked, and what they demand of the output.

Source: OpenAI's API reference (``tools``, ``tool_choice``, ``parallel_tool_calls``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.serve.http_errors import Refusal
from outrider.serve.json_input import read_json
from outrider.text.tool_formats import ToolFormat, calls_grammar

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MOST_TOOLS = 512
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        schema: of its arguments.
        is_strict: the arguments must match the schema.
        described: for the chat template.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool
    described: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request.

    Attributes:
        all: described to the model.
        callable: those that may be called.
        is_forced: at least one must be called.
        is_parallel: several calls are allowed.
    """

    all: Sequence[Tool]
    callable: Sequence[Tool]
    is_forced: bool
    is_parallel: bool

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.callable]

    @property
    def demands_form(self) -> bool:
        """Whether calls must have a form, beside that which the model has learnt."""
        return self.is_forced or not self.is_parallel or any(tool.is_strict for tool in self.callable)

    def constraint(
        self, form: ToolFormat, marker_ids: Mapping[str, int], answer: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Constraint of the output, in the form of ``Sampling``; None if nothing is demanded of calls.

        Args:
            marker_ids: of the format's markers that are tokens.
            answer: the constraint of ``response_format``, if any: it is that of the text.

        Raises:
            Refusal
        """
        if not (answer or self.demands_form):
            return None
        # A forced call leaves no text, which a schema would be for; other constraints are of the whole output.
        if answer and (answer.keys() != {"json_schema"} or not (form.has_marker or self.is_forced)):
            kinds = "by a JSON schema alone" if form.has_marker else "not be constrained, with this model"
            message = f"beside tools text can {kinds}: leave it out, or make tool_choice none"
            raise Refusal(message, param="response_format")
        schemas = [
            (tool.name, tool.schema if tool.is_strict or self.is_forced else _ANY_ARGUMENTS) for tool in self.callable
        ]
        grammar = calls_grammar(
            schemas,
            form,
            marker_ids,
            is_forced=self.is_forced,
            is_parallel=self.is_parallel,
            answer=answer.get("json_schema"),
        )
        return {"grammar": grammar}


def tools_of(body: Mapping[str, Any]) -> ToolUse | None:
    """Tools of a chat request; None without, or if none may be called. Raises Refusal."""
    given, choice, is_parallel = body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls")
    if not isinstance(given, list | None) or len(given or []) > _MOST_TOOLS:
        raise Refusal(f"tools must be a list, of at most {_MOST_TOOLS}", param="tools")
    if not isinstance(is_parallel, bool | None):
        raise Refusal("parallel_tool_calls must be true or false", param="parallel_tool_calls")
    tools = [_tool(index, one) for index, one in enumerate(given or [])]
    if len({tool.name for tool in tools}) < len(tools):
        raise Refusal("two tools have the same name", param="tools")
    named = _named(choice)
    if named is None and choice not in (None, "none", "auto", "required"):
        message = "tool_choice must be none, auto, required, or {type: function, function: {name: ...}}"
        raise Refusal(message, param="tool_choice")
    chosen = [tool for tool in tools if named in (None, tool.name)]
    if (named is not None or choice == "required") and not chosen:
        raise Refusal(f"tool_choice = {choice!r:.100}: there is no such tool in tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    is_forced = named is not None or choice == "required"
    # A named function is called once.
    return ToolUse(tools, chosen, is_forced, is_parallel is not False and named is None)


def descriptions_of(tools: ToolUse | None) -> list[Mapping[str, Any]]:
    """Descriptions for the chat template."""
    return [] if tools is None else [tool.described for tool in tools.all]


def _tool(index: int, value: Any) -> Tool:
    param = f"tools[{index}]"
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise Refusal(f"{param} must be {{type: function, function: {{name, ...}}}}", param=param)
    if not _NAME.fullmatch(name):
        raise Refusal(f"the name {name!r:.60} is invalid: letters, digits and _-.:/, at most 128", param=param)
    schema, is_strict = function.get("parameters"), function.get("strict")
    if not isinstance(schema, Mapping | None) or not isinstance(is_strict, bool | None):
        raise Refusal(f"{param}: parameters must be a JSON schema, an object; strict true or false", param=param)
    if schema is not None and schema.get("type", "object") != "object":
        raise Refusal(f"{param}: the type of parameters must be object, since arguments have names", param=param)
    described = {key: part for key, part in function.items() if key != "strict"}
    own = _NO_ARGUMENTS if schema is None else {"type": "object", **schema}
    return Tool(name, own, bool(is_strict), {"type": "function", "function": described})


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def with_calls_read(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of a history, with the arguments of its calls as objects: templates write them as JSON.

    Raises:
        Refusal
    """
    calls = message.get("tool_calls")
    if calls is None:
        return message
    where = f"messages[{index}].tool_calls"
    if not isinstance(calls, list):
        raise Refusal(f"{where} must be a list", param=where)
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refusal(f"{where} must have objects with a function, which has a name and arguments", param=where)
        arguments = _read_arguments(function.get("arguments"), where)
        read.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": read}


def _read_arguments(value: Any, where: str) -> Any:
    """Arguments as an object; unchanged if the model has written none. Raises Refusal."""
    if value in (None, ""):
        return {}
    try:
        read = read_json(value, where) if isinstance(value, str) else value
    except ValueError:
        return value
    return read if isinstance(read, Mapping) else value
