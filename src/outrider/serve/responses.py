"""``/v1/responses``: bodies, and answers whole and as events. Messages, thoughts and calls are items. Nothing is
stored: a request has its whole history.

Source: OpenAI's API reference (responses); the events of thoughts are those of its open models.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outrider.records import FinishReason
from outrider.serve.answers import ItemsAnswer, event_of
from outrider.serve.bodies import read_arguments
from outrider.serve.body import Strict
from outrider.serve.generation_body import Format, GenerationBody, Integer, ParsedRequest, Stops
from outrider.serve.http_errors import Refusal
from outrider.serve.tools import Functions, Part, ToolChoice, ToolUse, as_parts, descriptions_of
from outrider.text.chat import Chat, ChatOptions

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # types of parts
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
# Fields of a request that its response repeats, and what it has without them; also the model's temperature and top_p.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "metadata": {},
    "tools": [],
    "tool_choice": "auto",
    "temperature": 1.0,
    "top_p": 1.0,
    "parallel_tool_calls": True,
    "max_output_tokens": None,
    "previous_response_id": None,
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "user": None,
    "store": False,
}


class _Part(Part):
    type: str
    text: str | None = None
    refusal: str | None = None


_Parts = Annotated[list[_Part], Field(fail_fast=True), BeforeValidator(as_parts)]


class _Item(Part):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: _Parts | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: _Parts | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        needed = {"message": ("role", "content"), "function_call": ("name",), "function_call_output": ("output",)}
        if any(getattr(self, name) is None for name in needed.get(self.type, ())):
            raise ValueError(f"an item of the type {self.type} needs {' and '.join(needed[self.type])}")
        for part in [*(self.content or ()), *(self.output or ())] if self.type != "reasoning" else ():
            if part.type not in _TEXTS or getattr(part, _TEXTS[part.type]) is None:
                raise ValueError(f"a part of the type {part.type} is not supported: give text")
        return self


class _Text(Strict):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class _Reasoning(Strict):
    """OpenAI's Agents SDK asks for a summary where there is one; the thoughts themselves are sent here."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseBody(GenerationBody):
    """Body of ``/v1/responses``."""

    PROMPT: ClassVar[str] = "input"
    NAMES: ClassVar[Mapping[str, str]] = {
        "max_new_tokens": "max_output_tokens",
        "chat_template_kwargs": "reasoning.effort",  # nothing else is in them
        "thinking_budget": "thinking_token_budget",
    }
    NOT_SERVED: ClassVar[frozenset[str]] = frozenset(  # nothing is stored
        "previous_response_id conversation background prompt max_tool_calls truncation top_logprobs store include "
        "stream_options n echo prompt_logprobs return_tokens_as_token_ids".split()
    )
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention".split()
    )

    input: str | Annotated[list[_Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    stop: Stops = []
    tools: Functions = []
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()

    def ask(self) -> ParsedRequest:
        for name in _REPEATED:
            try:
                json.dumps(self.sent.get(name), allow_nan=False)
            except ValueError:
                message = f"{name} has an infinite number, which JSON cannot repeat in the response: leave it out"
                raise Refusal(message, param=name) from None
        tools = ToolUse.of(self.tools, self.tool_choice, self.parallel_tool_calls)
        effort = {} if self.reasoning.effort is None else {"reasoning_effort": self.reasoning.effort}
        chat = Chat(self._messages(), ChatOptions(tools=descriptions_of(tools), chat_template_kwargs=effort))
        return self._ask([chat], self.max_output_tokens, self.stop, ("text.format", self.text.format), tools=tools)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if item.type == "message":
                messages.append({"role": item.role, "content": _text_of(item.content)})
            elif item.type == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text_of(item.output)})
            elif item.type == "function_call":
                function = {"name": item.name, "arguments": read_arguments(item.arguments)}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages  # templates leave out the thoughts of earlier turns


def _text_of(parts: Sequence[_Part] | None) -> str:
    return "".join(getattr(part, _TEXTS[part.type]) for part in parts or ())


@dataclass(eq=False)
class ResponseAnswer(ItemsAnswer):
    """One response."""

    types = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}
    _num_events: int = field(init=False, default=0)

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.so_far(None))

    def end(self) -> Iterator[bytes]:
        reason = self.jobs[0].completion.finish_reason
        kind = "response.incomplete" if reason == "length" else "response.completed"
        yield self._event(kind, response=self.so_far(reason, self.totals()["usage"]))

    def failure(self, refusal: Refusal) -> bytes:
        """Event of an error, which has no type of its own here: that of the event is in its place."""
        error = refusal.to_json()["error"]
        code = error["code"] or error["type"]
        return self._event("error", code=code, message=error["message"], param=error["param"])

    def so_far(self, reason: FinishReason | None, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        sent, defaults = self.ask.body.sent, _REPEATED | dict(self.served.decoder.sampling_defaults)
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.name,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": self.items,
            "usage": None if usage is None else _usage(usage),
            **{name: defaults[name] if sent.get(name) is None else sent[name] for name in _REPEATED},
        }

    def add(self, text: str) -> bytes:
        item = self.items[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            return self._of_item("response.function_call_arguments.delta", delta=text)
        item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return self._of_item(f"response.{item['content'][0]['type']}.delta", content_index=0, delta=text, **more)

    def begin_item(self, kind: str, name: str) -> Iterator[bytes]:
        item: dict[str, Any] = {"id": _PREFIXES[kind] + uuid.uuid4().hex, "type": kind, "status": "in_progress"}
        part: dict[str, Any] | None = None
        if kind == "function_call":
            item |= {"call_id": self.call_id(), "name": name, "arguments": ""}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item |= {"summary": [], "content": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant", "content": []}
        self.items.append(item)
        yield self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if part is not None:
            item["content"] = [part]
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def end_item(self, *, is_cut: bool) -> Iterator[bytes]:
        item = self.items[-1]
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield self._of_item("response.function_call_arguments.done", name=name, arguments=arguments)
        else:
            (part,) = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _of_item(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._num_events += 1
        return event_of({"type": kind, "sequence_number": self._num_events - 1, **more}, kind)


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
