"""Bodies of ``/v1/messages``, as those of chat completions. Nothing is stored: a request has its whole history.

Source: Anthropic's API reference (messages), and the types of its Python client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.serve.http_errors import Refusal

PATH = "/v1/messages"
# Fields that chats have, too, and their names there.
_SAME = {
    name: name
    for name in (
        *("model", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier"),
        *("seed", "min_p", "draft", "num_draft_tokens", "priority", "ignore_eos"),
    )
} | {"max_tokens": "max_completion_tokens", "stop_sequences": "stop"}
# Fields with a form of their own.
_OWN = {"messages", "system", "tools", "tool_choice", "thinking", "output_config"}
# Fields without effect on the output.
_IDLE = {"cache_control", "diagnostics", "user_profile_id", "workspace_id"}
# Names here for fields of chats, searched in order.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice",
}
_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
_OVERLOADED = 503


def error_json(refusal: Refusal) -> dict[str, Any]:
    """An error in the form of this endpoint, which is OpenAI's with a type around it and other names of errors."""
    kind = "overloaded_error" if refusal.status == _OVERLOADED else _ERRORS.get(refusal.status, refusal.type)
    return {"type": "error", "error": {**refusal.to_json()["error"], "type": kind}}


def chat_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Body of a chat completion that asks for the same, and the place of each message in the request. Raises
    Refusal."""
    for name, value in body.items():
        if value is not None and name not in _SAME and name not in _OWN and name not in _IDLE:
            raise Refusal(f"{name:.60} is not supported: leave it out", param=name)
    chat: dict[str, Any] = {_SAME[name]: value for name, value in body.items() if name in _SAME and value is not None}
    chat["messages"], places = _messages(body)
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    if (tools := body.get("tools")) is not None:
        chat["tools"] = [_tool(index, tool) for index, tool in enumerate(tools)] if isinstance(tools, list) else tools
    chat |= _choice(body.get("tool_choice")) | _thinking(body.get("thinking")) | _output(body.get("output_config"))
    return chat, places


def _messages(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages, and the place of each in the request."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Refusal("messages must be a list with at least one message", param="messages")
    found: list[tuple[dict[str, Any], str]] = []
    if body.get("system") is not None:
        found.append(({"role": "system", "content": _texts(body["system"], "system")}, "system"))
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise Refusal(f"{where} must have the role user, assistant or system", param=where)
        found += ((one, where) for one in _message(role, message.get("content"), where))
    return [message for message, _ in found], [place for _, place in found]


def _message(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """A message with its calls, or the results of calls and a message after them."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in _blocks(content, where):
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and role == "user":
            parts.append({"type": "image_url", "image_url": {"url": _image(block.get("source"), where)}})
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user" and not parts:
            text = _texts(block.get("content") or "", where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind not in ("thinking", "redacted_thinking"):  # templates leave out the thoughts of earlier turns
            raise Refusal(f"{where}: a block of the type {kind!r:.40} is not supported there", param=where)
    if calls:
        text = "".join(part["text"] for part in parts)
        return [{"role": role, "content": text or None, "tool_calls": calls}]
    return [*results, *([{"role": role, "content": parts}] if parts or not results else [])]


def _blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise Refusal(f"{where} must have text, or a list of blocks", param=where)
    return blocks


def _texts(content: Any, where: str) -> str:
    texts = [block.get("text") if block.get("type") == "text" else None for block in _blocks(content, where)]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal(f"{where} must have text, or blocks of text", param=where)
    return "".join(map(str, texts))


def _image(source: Any, where: str) -> str:
    """Its address."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "url":
        return str(source.get("url"))
    if kind != "base64":
        raise Refusal(f"{where}: the source of an image must be base64 or url", param=where)
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def _tool(index: int, value: Any) -> dict[str, Any]:
    where = f"tools[{index}]"
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise Refusal(f"{where} must have a name and an input_schema", param=where)
    if value.get("type") not in (None, "custom"):
        raise Refusal(f"tools of the type {value['type']!r:.40} are not supported", param=where)
    function = {"name": value["name"], "parameters": value.get("input_schema")}
    function |= {key: value[key] for key in ("description", "strict") if value.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    choices: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    choices["tool"] = {"type": "function", "function": {"name": value.get("name")}} if kind == "tool" else None
    if kind not in choices:
        raise Refusal("tool_choice must have the type auto, any, none, or tool with a name", param="tool_choice")
    is_single = value.get("disable_parallel_tool_use")
    return {"tool_choice": choices[kind]} | ({} if is_single is None else {"parallel_tool_calls": not is_single})


def _thinking(value: Any) -> dict[str, Any]:
    kind = "adaptive" if value is None else value.get("type") if isinstance(value, Mapping) else None
    if kind == "disabled":
        return {"reasoning_effort": "none"}
    if kind != "adaptive":
        raise Refusal("thinking is adaptive or disabled here: budgets are not supported", param="thinking")
    return {}


def _output(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not value.keys() <= {"effort", "format"}:
        raise Refusal("output_config must have effort or format, and nothing else", param="output_config")
    found = {"reasoning_effort": value["effort"]} if value.get("effort") is not None else {}
    form = value.get("format")
    if form is None:
        return found
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise Refusal("output_config.format must have the type json_schema", param="output_config.format")
    schema = {"name": "output", "schema": form.get("schema"), "strict": True}
    return found | {"response_format": {"type": "json_schema", "json_schema": schema}}
