"""Responses of ``/v1/responses``, whole and as events: messages, thoughts and calls, each an item.

Source: OpenAI's API reference (responses); the events of thoughts are those of its open models.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outrider.records import FinishReason
from outrider.serve.http_errors import Refusal
from outrider.text.output_parser import OutputParser, Piece

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


def event_of(value: Mapping[str, Any]) -> bytes:
    """Encode an event with its name."""
    return f"event: {value['type']}\ndata: {json.dumps(value, ensure_ascii=True, allow_nan=False)}\n\n".encode("ascii")


class ResponseForm:
    """One response.

    Args:
        asked: fields of the request that are repeated.
        parser: of its output.
        new_call_id: a number for each call.
        shows_thoughts: whether they are sent.
    """

    def __init__(
        self, asked: Mapping[str, Any], parser: OutputParser, new_call_id: Callable[[], str], shows_thoughts: bool
    ) -> None:
        self._asked, self._parser, self._new_call_id = asked, parser, new_call_id
        self._shows_thoughts = shows_thoughts
        self._items: list[dict[str, Any]] = []
        self._num_events = 0
        self._call = -1  # number of the last call

    def response(
        self, head: Mapping[str, Any], reason: FinishReason | None, usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The response so far.

        Args:
            head: id, time, model, number of prompt tokens, and what has stopped the output.
            reason: None while it goes on.
        """
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        return {
            "id": f"resp_{head['id']}",
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": self._items,
            "usage": None if usage is None else _usage(usage),
            **self._asked,
        }

    def begin(self, head: Mapping[str, Any]) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.response(head, None))

    def part(self, text: str, reason: FinishReason | None) -> Iterator[bytes]:
        """Events of more text."""
        for piece in self._parser.feed(text, is_end=reason is not None):
            if piece.kind != "reasoning" or self._shows_thoughts:
                yield from self._piece(piece)
        if reason is not None:
            if not self._items:  # an output without text is an empty message
                yield from self._open("message")
            is_cut = reason == "length" or self._parser.is_in_call  # by a stop string
            yield from self._close("incomplete" if is_cut else "completed")

    def end(self, head: Mapping[str, Any], reason: FinishReason, usage: Mapping[str, Any]) -> bytes:
        kind = "response.incomplete" if reason == "length" else "response.completed"
        return self._event(kind, response=self.response(head, reason, usage))

    def failure(self, refusal: Refusal) -> bytes:
        """Event of an error, which has no type of its own here: that of the event is in its place."""
        error = refusal.to_json()["error"]
        code = error["code"] or error["type"]
        return self._event("error", code=code, message=error["message"], param=error["param"])

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        kinds = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}
        kind = kinds[piece.kind]
        if piece.kind == "call" or not self._items or self._items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind, piece.text)
        if piece.kind == "call":
            return
        item = self._items[-1]
        if kind == "function_call":
            item["arguments"] += piece.text
            yield self._of_item("response.function_call_arguments.delta", delta=piece.text)
            return
        item["content"][0]["text"] += piece.text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._of_item(f"response.{item['content'][0]['type']}.delta", content_index=0, delta=piece.text, **more)

    def _open(self, kind: str, name: str = "") -> Iterator[bytes]:
        item: dict[str, Any] = {"id": _PREFIXES[kind] + uuid.uuid4().hex, "type": kind, "status": "in_progress"}
        part: dict[str, Any] | None = None
        if kind == "function_call":
            item |= {"call_id": self._new_call_id(), "name": name, "arguments": ""}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item |= {"summary": [], "content": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant", "content": []}
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if part is not None:
            item["content"] = [part]
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the last item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield self._of_item("response.function_call_arguments.done", name=name, arguments=arguments)
        else:
            (part,) = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _of_item(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._num_events += 1
        return event_of({"type": kind, "sequence_number": self._num_events - 1, **more})


def asked_of(body: Mapping[str, Any], sampling_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request that its response repeats. Raises Refusal if JSON cannot have one.

    Args:
        sampling_defaults: those of the model.
    """
    defaults: Sequence[tuple[str, Any]] = (
        *(("instructions", None), ("metadata", {}), ("tools", []), ("tool_choice", "auto")),
        *((name, sampling_defaults.get(name, 1.0)) for name in ("temperature", "top_p")),
        *(("parallel_tool_calls", True), ("max_output_tokens", None), ("previous_response_id", None)),
        *(("reasoning", None), ("text", {"format": {"type": "text"}}), ("truncation", "disabled")),
        *(("user", None), ("store", False)),
    )
    asked = {name: default if body.get(name) is None else body[name] for name, default in defaults}
    for name, value in asked.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            message = "its response repeats it, and JSON has no infinite numbers and no half characters (surrogates)"
            raise Refusal(f"{name} is invalid: {message}", param=name) from None
    return asked


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
