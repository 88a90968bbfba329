"""``/v1/messages``: bodies, and answers whole and as events. Text, thoughts and calls are blocks. Nothing is stored: a
request has its whole history.

Source: Anthropic's API reference (messages, streaming), and the types of its Python client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from outrider.records import FinishReason
from outrider.serve.answers import ItemsAnswer, event_of
from outrider.serve.body import Strict
from outrider.serve.generation_body import Format, GenerationBody, Integer, ParsedRequest, Stops
from outrider.serve.http_errors import Refusal
from outrider.serve.tools import Choice, Part, Tools, ToolUse, as_parts, descriptions_of, of_type
from outrider.text.chat import ChatOptions

PATH = "/v1/messages"
_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
_OVERLOADED = 503
_REASONS = {"eos": "end_turn", "stop": "end_turn", "length": "max_tokens"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def error_json(refusal: Refusal) -> dict[str, Any]:
    """An error in the form of this endpoint, which is OpenAI's with a type around it and other names of errors."""
    kind = "overloaded_error" if refusal.status == _OVERLOADED else _ERRORS.get(refusal.status, refusal.type)
    return {"type": "error", "error": {**refusal.to_json()["error"], "type": kind}}


class _Source(Part):
    type: Literal["url", "base64"]
    url: str | None = None
    media_type: str | None = None
    data: str | None = None


class _Block(Part):
    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    source: _Source | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: _Blocks | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        needed = {"text": "text", "image": "source", "tool_use": "name"}.get(self.type)
        if needed is not None and getattr(self, needed) is None:
            raise ValueError(f"a block of the type {self.type} needs {needed}")
        return self


_Blocks = Annotated[list[_Block], Field(fail_fast=True), BeforeValidator(as_parts)]
_READ = {  # by role; thoughts of earlier turns are left out, as templates do
    "system": ("text",),
    "user": ("text", "image", "tool_result", "thinking", "redacted_thinking"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


def _text_of(blocks: Sequence[_Block] | None) -> str:
    return "".join(block.text or "" for block in blocks or () if block.type == "text")


def _checked(blocks: list[_Block], role: str = "system") -> list[_Block]:
    """Blocks of a message, as far as they are read there. Raises ValueError."""
    for block in blocks:
        if block.type not in _READ[role]:
            raise ValueError(f"a block of the type {block.type} is not supported there")
        _checked(block.content or [])
    return blocks


class _Message(Part):
    role: Literal["user", "assistant", "system"]
    content: _Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        _checked(self.content, self.role)
        kinds = [block.type for block in self.content if block.type in ("text", "image", "tool_result")]
        if kinds != sorted(kinds, key="tool_result".__ne__):
            raise ValueError("results of tools stand before text and images")
        return self

    def messages(self) -> list[dict[str, Any]]:
        """Messages of chats; results of calls are messages of their own."""
        results, calls, parts = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
        for block in self.content:
            if block.type == "text":
                parts.append({"type": "text", "text": block.text})
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif block.type == "tool_result":
                result = {"tool_call_id": block.tool_use_id, "content": _text_of(block.content)}
                results.append({"role": "tool", **result})
            elif block.source is not None:
                source = block.source
                url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
                parts.append({"type": "image_url", "image_url": {"url": url}})
        if self.role != "user":
            message = {"role": self.role, "content": _text_of(self.content) or (None if calls else "")}
            return [message | ({"tool_calls": calls} if calls else {})]
        return [*results, *([{"role": "user", "content": parts}] if parts or not results else [])]


class _Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Integer, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("the type enabled has budget_tokens, no other has them")
        return self


class _OutputConfig(Strict):
    effort: str | None = None
    format: Annotated[Format, of_type("json_schema")] | None = None


class MessageBody(GenerationBody):
    """Body of ``/v1/messages``."""

    PROMPT: ClassVar[str] = "messages"
    NAMES: ClassVar[Mapping[str, str]] = {
        "max_new_tokens": "max_tokens",
        "stop": "stop_sequences",
        "chat_template_kwargs": "output_config.effort",
        "thinking_budget": "thinking.budget_tokens",
        "reasoning_effort": "thinking.budget_tokens",  # which switches thinking on
    }
    NOT_SERVED: ClassVar[frozenset[str]] = frozenset(
        "n echo stream_options prompt_logprobs return_tokens_as_token_ids thinking_token_budget "
        "thinking_budget thinking_budget_tokens reasoning_budget_tokens".split()
    )
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        "cache_control diagnostics metadata service_tier user_profile_id workspace_id".split()
    )

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    system: Annotated[_Blocks, AfterValidator(_checked)] | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    stop_sequences: Stops = []
    tools: Tools = []
    tool_choice: Choice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig = _OutputConfig()

    def ask(self) -> ParsedRequest:
        tools = ToolUse.of(self.tools, self.tool_choice)
        given = [*([] if self.system is None else [_Message(role="system", content=self.system)]), *self.messages]
        messages = [message for one in given for message in one.messages()]
        budget = None if self.thinking is None else self.thinking.budget_tokens
        effort = "none" if self._is_off else self.output_config.effort or ("on" if budget else None)
        if self.output_config.effort not in (None, effort):
            raise Refusal("thinking is disabled: leave output_config.effort out", param="output_config.effort")
        options = ChatOptions(
            tools=descriptions_of(tools),
            chat_template_kwargs={} if effort is None else {"reasoning_effort": effort},
            continue_final_message=messages[-1]["role"] == "assistant",
        )
        return self._ask(
            [self.chat_prompt(messages, options)],
            self.max_tokens,
            self.stop_sequences,
            ("output_config.format", self.output_config.format),
            tools=tools,
            thinking_budget=budget,
        )

    def name_of(self, option: str) -> str:
        return "thinking" if option == "chat_template_kwargs" and self._is_off else super().name_of(option)

    @property
    def _is_off(self) -> bool:
        return self.thinking is not None and self.thinking.type == "disabled"


@dataclass(eq=False)
class MessageAnswer(ItemsAnswer):
    """One message."""

    types = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}
    _texts: list[str] = field(init=False, default_factory=list)  # of each block

    def begin(self) -> Iterator[bytes]:
        yield self._event("message_start", message=self.so_far(None))

    def end(self) -> Iterator[bytes]:
        reason, usage = self.jobs[0].completion.finish_reason, self.totals()["usage"]
        yield self._event("message_delta", delta=self._stop(reason), usage=self._usage(usage))
        yield self._event("message_stop")

    def failure(self, refusal: Refusal) -> bytes:
        return event_of(error_json(refusal), "error")

    def so_far(self, reason: FinishReason | None, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": [_filled(*one) for one in zip(self.items, self._texts, strict=True)],
            **self._stop(reason),
            "usage": self._usage(usage),
        }

    def _stop(self, reason: FinishReason | None) -> dict[str, Any]:
        found = self.jobs[0].text.stop_reason
        stop = found if reason == "stop" and isinstance(found, str) else None
        shown = None if reason is None else "stop_sequence" if stop is not None else _REASONS[reason]
        has_calls = any(block["type"] == "tool_use" for block in self.items)
        if has_calls and reason in ("eos", "stop") and not self.parser.is_in_call:
            shown, stop = "tool_use", None
        return {"stop_reason": shown, "stop_sequence": stop}

    def begin_item(self, kind: str, name: str) -> Iterator[bytes]:
        block: dict[str, Any] = {"type": kind, "text": "", "citations": None}
        if kind == "thinking":
            block = {"type": kind, "thinking": "", "signature": ""}
        elif kind == "tool_use":
            block = {"type": kind, "id": self.call_id(), "name": name, "input": {}}
        self.items.append(block)
        self._texts.append("")
        yield self._event("content_block_start", content_block=block)

    def add(self, text: str) -> bytes:
        self._texts[-1] += text
        kind, key = _DELTAS[self.items[-1]["type"]]
        return self._event("content_block_delta", delta={"type": kind, key: text})

    def end_item(self, *, is_cut: bool) -> Iterator[bytes]:
        yield self._event("content_block_stop")

    def _event(self, kind: str, **more: Any) -> bytes:
        index = {"index": len(self.items) - 1} if kind.startswith("content_block") else {}
        return event_of({"type": kind, **index, **more}, kind)

    def _usage(self, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Prompt tokens found in the cache are counted apart, once that is known."""
        num_cached = 0 if usage is None else usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": self.num_prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0 if usage is None else usage["completion_tokens"],
        }


def _filled(block: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A block with its text; a call that was cut has no input."""
    if block["type"] != "tool_use":
        return {**block, block["type"]: text}
    try:
        return {**block, "input": json.loads(text or "{}")}
    except ValueError:
        return {**block}
