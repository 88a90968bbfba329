"""Bodies of ``/v1/responses``, as those of chat completions. Nothing is stored: a request has its whole history.

Source: OpenAI's API reference (responses).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.serve.http_errors import Refusal

# Fields that both endpoints have, here and there perhaps under another name.
_SAME = {
    name: name
    for name in (
        *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "metadata", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "seed", "stop", "top_k", "min_p"),
        *("draft", "num_draft_tokens", "priority", "ignore_eos"),
    )
} | {"max_output_tokens": "max_completion_tokens"}
# Fields with a form of their own.
_OWN = {"input", "instructions", "tools", "tool_choice", "text", "reasoning"}
# Fields that are not served, with the values that ask for nothing. ``store`` has no effect: no response is kept.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "store": (False,),
    "include": ([], ["reasoning.encrypted_content"]),  # thoughts are not encrypted
    "stream_options": ({}, {"include_obfuscation": False}),
}


# Names here for fields of chats, searched in order.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "chat_template_kwargs": "reasoning.effort",  # nothing else is in them
}


@contextmanager
def named_as_sent(places: Sequence[str], others: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a chat name the fields of the request.

    Args:
        places: of the messages: see ``chat_body``.
        others: names of other fields of chats.
    """
    names = {**{f"messages[{index}]": place for index, place in enumerate(places)}, **others}
    try:
        yield
    except Refusal as refusal:
        param = refusal.param or ""
        sent = next((name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))), None)
        if sent is not None:
            refusal.param = names[sent]
            shown = next((name for name in names if str(refusal).startswith(name)), "")
            refusal.args = ((names[sent] if shown else "") + str(refusal).removeprefix(shown),)
        raise


def chat_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Body of a chat completion that asks for the same, and the place of each message in the request. Raises
    Refusal."""
    for name, value in body.items():
        if value is None or name in _SAME or name in _OWN:
            continue
        if name not in _NOT_SERVED:
            raise Refusal(f"unknown field {name!r:.60}: leave it out", param=name)
        if value not in _NOT_SERVED[name]:
            remedy = "leave it out, or set it to false: nothing is stored" if name == "store" else "leave it out"
            raise Refusal(f"{name} = {value!r:.60} is not supported: {remedy}", param=name)
    chat = {_SAME[name]: value for name, value in body.items() if name in _SAME and value is not None}
    chat["messages"], places = _messages(body.get("input"), body.get("instructions"))
    if (tools := body.get("tools")) is not None:
        chat["tools"] = [_tool(index, tool) for index, tool in enumerate(tools)] if isinstance(tools, list) else tools
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            message = "tool_choice must be none, auto, required, or {type: function, name: ...}"
            raise Refusal(message, param="tool_choice")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    chat["tool_choice"] = choice
    if (text := body.get("text")) is not None:
        chat |= _of_text(text)
    if (reasoning := body.get("reasoning")) is not None:
        if not isinstance(reasoning, Mapping):
            raise Refusal("reasoning must be an object", param="reasoning")
        # OpenAI's Agents SDK asks for a summary where there is one; the thoughts themselves are sent here.
        _check_inner("reasoning", reasoning, {"effort": None, "summary": ("auto",), "generate_summary": ("auto",)})
        chat["reasoning_effort"] = reasoning.get("effort")
    return chat, places


def _check_inner(name: str, value: Mapping[str, Any], known: Mapping[str, tuple[str, ...] | None]) -> None:
    """Refuse parts that are not served; ``known`` has the values that ask for nothing, or None. Raises Refusal."""
    for key, part in value.items():
        if part is not None and (key not in known or ((idle := known[key]) is not None and part not in idle)):
            raise Refusal(f"{name}.{key:.60} = {part!r:.60} is not supported: leave it out", param=f"{name}.{key:.60}")


def _messages(value: Any, instructions: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages, and the place of each in the request."""
    if not isinstance(instructions, str | None):
        raise Refusal("instructions must be a string", param="instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    places = ["instructions"] * len(messages)
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}], [*places, "input"]
    if not isinstance(value, list) or not value:
        raise Refusal("input must be a string, or a list of items", param="input")
    for index, item in enumerate(value):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
            places.append(where)
        elif kind == "function_call":
            if not isinstance(item.get("name"), str):
                raise Refusal(f"{where} must have a name", param=where)
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                places.append(where)
            # The text of the message is checked, so that only a call may be at fault.
            places[-1] = "input" if "tool_calls" in messages[-1] else where
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            places.append(where)
        elif kind == "reasoning":
            continue  # templates leave out the thoughts of earlier turns
        else:
            raise Refusal(f"{where}: items of the type {kind!r:.40} are not supported", param=where)
    return messages, places


def _content(value: Any, where: str) -> str:
    """Text of a message, which may be in parts."""
    parts = [{"type": "input_text", "text": value}] if isinstance(value, str) else value
    texts: list[str] = []
    for part in parts if isinstance(parts, list) else [{}]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = "refusal" if kind == "refusal" else "text"
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(part.get(key), str):
            raise Refusal(f"{where} must have text, or parts of text", param=where)
        texts.append(part[key])
    return "".join(texts)


def _tool(index: int, value: Any) -> dict[str, Any]:
    """Functions are flat here."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind != "function":
        raise Refusal(f"tools of the type {kind!r:.40} are not supported", param=f"tools[{index}]")
    if not isinstance(value.get("name"), str):
        raise Refusal(f"tools[{index}] must be {{type: function, name, ...}}", param=f"tools[{index}]")
    function = {key: part for key, part in value.items() if key != "type" and part is not None}
    return {"type": "function", "function": function}


def _of_text(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(form := value.get("format") or {"type": "text"}, Mapping):
        raise Refusal("text must be an object with a format", param="text")
    _check_inner("text", value, {"format": None, "verbosity": ("medium",)})
    if form.get("type") == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": form}}
    return {"response_format": form}
