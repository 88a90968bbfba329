"""Messages of chats in requests, checked.

Source: OpenAI's API reference (``messages``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from outrider.errors import PromptError
from outrider.serve.http_errors import Refusal
from outrider.text.chat import read_message

_NOT_READ = ("audio", "function_call")  # of messages: no template reads these


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages with contents of text, or in parts if there are images among them. The arguments of calls become
    objects: templates write them as JSON. Raises Refusal."""
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a list with at least one message", param="messages")
    read = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal(f"{where} must be an object with a role", param=where)
        if (name := next((one for one in _NOT_READ if message.get(one) is not None), None)) is not None:
            raise Refusal(f"{where}.{name} is not supported: leave it out", param=where)
        if (calls := message.get("tool_calls")) is not None:
            message = {**message, "tool_calls": _read_calls(calls, f"{where}.tool_calls")}
        content = message.get("content")
        try:
            has_image = isinstance(content, list) and any(map(_is_image, content))
            read.append({**message} if has_image else read_message(index, message))
        except PromptError:
            parts = "text parts and image_url parts"
            raise Refusal(f"{where}.content must be a string, or a list of {parts}", param=where) from None
    return read


def _is_image(part: Any) -> bool:
    image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    return isinstance(image, dict) and isinstance(image.get("url"), str)


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Raises Refusal."""
    found = calls if isinstance(calls, list) else [None]
    functions: list[Any] = [call.get("function") if isinstance(call, dict) else None for call in found]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions):
        raise Refusal(f"{where} must be a list of objects with a function, which has a name", param=where)
    return [
        {**call, "function": {**function, "arguments": read_arguments(function.get("arguments"))}}
        for call, function in zip(calls, functions, strict=True)
    ]


def read_arguments(value: Any) -> Any:
    """Arguments of a call as an object; unchanged if the model has written none."""
    try:
        read = from_json(value or "{}") if isinstance(value, str | None) else value
    except ValueError:
        return value
    return read if isinstance(read, Mapping) else value
