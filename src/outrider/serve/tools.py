"""Tools in requests, in the forms of all endpoints, and what they demand of the output.

Sources: OpenAI's API reference (``tools``, ``tool_choice``, ``parallel_tool_calls`` of chats and of responses);
Anthropic's (messages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from outrider.serve.http_errors import Refusal
from outrider.text.tool_formats import ToolFormat, calls_grammar

_MOST_TOOLS = 512
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}


class Part(BaseModel):
    """A part of a body, whose further fields have no effect."""

    model_config = ConfigDict(strict=True, extra="allow")


def as_parts(value: Any) -> Any:
    """A text as the only one of its parts."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Tool(Part):
    """A function that a model may call. In chats it stands in ``function``."""

    type: Literal["function", "custom"] = "custom"
    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    parameters: dict[str, Any] | None = Field(None, validation_alias=AliasChoices("parameters", "input_schema"))
    strict: bool | None = None
    _described: Mapping[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, sent: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        function = sent.get("function") if isinstance(sent, dict) else None
        given = {"type": sent.get("type"), **function} if isinstance(function, dict) else sent
        if isinstance(given, dict) and "parameters" in given and "input_schema" in given:
            raise ValueError("parameters and input_schema are aliases of one field: give one")
        tool = read(given)
        if (tool.parameters or {}).get("type", "object") != "object":
            raise ValueError("the type of parameters must be object, since arguments have names")
        # As it was sent: the order of fields is part of the prompt.
        named = {{"input_schema": "parameters"}.get(name, name): part for name, part in given.items()}
        left = ("type", "strict", "cache_control")
        described = {name: part for name, part in named.items() if name not in left and part is not None}
        tool._described = {"type": "function", "function": described}
        return tool

    def arguments(self, *, is_forced: bool) -> Mapping[str, Any]:
        """The schema that its arguments must match."""
        if not (self.strict or is_forced):
            return _ANY_ARGUMENTS
        return _NO_ARGUMENTS if self.parameters is None else {"type": "object", **self.parameters}


def of_type(kind: str) -> AfterValidator:
    """Check of the type of an object that has several."""

    def check(given: Any) -> Any:
        if given.type != kind:
            raise ValueError(f"the type must be {kind}")
        return given

    return AfterValidator(check)


Tools = Annotated[list[Tool], Field(fail_fast=True)]  # Anthropic's, of the type custom too
Functions = Annotated[list[Annotated[Tool, of_type("function")]], Field(fail_fast=True)]  # OpenAI's


class Choice(Part):
    """``tool_choice`` as an object. In chats the name stands in ``function``."""

    type: Literal["function", "tool", "auto", "any", "none"]
    name: str | None = None
    function: dict[str, Any] | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type in ("function", "tool")) != isinstance(self.tool, str):
            raise ValueError("the types function and tool have a name, and no other has")
        return self

    @property
    def tool(self) -> Any:
        return self.name if self.function is None else self.function.get("name")


ToolChoice = Literal["none", "auto", "required"] | Choice | None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request."""

    all: Sequence[Tool]  # described to the model
    callable: Sequence[Tool]  # those that may be called
    is_forced: bool  # at least one must be called
    is_parallel: bool  # several calls are allowed

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool | None = None) -> Self | None:
        """Tools that a request asks for; None without, or if none may be called. Raises Refusal."""
        name = choice.tool if isinstance(choice, Choice) else None
        kind = choice.type if isinstance(choice, Choice) else choice
        is_single = is_parallel is False or (isinstance(choice, Choice) and choice.disable_parallel_tool_use)
        if len(tools) > _MOST_TOOLS:
            raise Refusal(f"tools has {len(tools)} items, of at most {_MOST_TOOLS}", param="tools")
        if len({tool.name for tool in tools}) < len(tools):
            raise Refusal("two tools have the same name", param="tools")
        is_forced = name is not None or kind in ("required", "any")
        chosen = [tool for tool in tools if name in (None, tool.name)]
        if is_forced and not chosen:
            message = f"tool_choice demands {name or 'a tool'!r:.100}, and there is no such tool in tools"
            raise Refusal(message, param="tool_choice")
        if not tools or kind == "none":
            return None
        # A named function is called once.
        return cls(tools, chosen, is_forced, not is_single and name is None)

    def constraint(
        self, form: ToolFormat, marker_ids: Mapping[str, int], answer: Mapping[str, Any], answer_by: str | None
    ) -> dict[str, Any] | None:
        """Constraint of the output, in the form of ``Sampling``; None if nothing is demanded of calls. The format's
        markers have ids; ``answer`` is the constraint of the text, set by the field ``answer_by``. Raises Refusal."""
        is_strict = any(tool.strict for tool in self.callable)
        if not (answer or self.is_forced or not self.is_parallel or is_strict):
            return None  # calls have the form that the model has learnt
        if form.is_message and not self.is_forced:
            if not (answer or is_strict):
                return None  # calls are never parallel
            message = "with this model calls are constrained only where they are forced: make tool_choice required"
            raise Refusal(message, param=answer_by or "tools")
        # A forced call leaves no text, which a schema would be for; other constraints are of the whole output.
        if answer and (answer.keys() != {"json_schema"} or not (form.has_marker or self.is_forced)):
            kinds = "by a JSON schema alone" if form.has_marker else "not be constrained, with this model"
            message = f"beside tools text can {kinds}: leave it out, or make tool_choice none"
            raise Refusal(message, param=answer_by)
        grammar = calls_grammar(
            [(tool.name, tool.arguments(is_forced=self.is_forced)) for tool in self.callable],
            form,
            marker_ids,
            is_forced=self.is_forced,
            is_parallel=self.is_parallel,
            answer=answer.get("json_schema"),
        )
        return {"grammar": grammar}


def descriptions_of(tools: ToolUse | None) -> list[Mapping[str, Any]]:
    return [] if tools is None else [tool._described for tool in tools.all]
