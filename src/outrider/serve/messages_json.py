"""Answers of ``/v1/messages``, whole and as events: text, thoughts and calls, each a block.

Source: Anthropic's API reference (messages, streaming).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from outrider.records import FinishReason
from outrider.serve.http_errors import Refusal
from outrider.serve.messages import error_json
from outrider.serve.responses_json import event_of
from outrider.text.output_parser import OutputParser, Piece

_REASONS = {"eos": "end_turn", "stop": "end_turn", "length": "max_tokens"}
_KINDS = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
_KEYS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


class MessageForm:
    """One answer. See ``ResponseForm``, which has the same methods.

    Args:
        parser: of its output.
        new_call_id: a number for each call.
    """

    def __init__(self, parser: OutputParser, new_call_id: Callable[[], str]) -> None:
        self._parser, self._new_call_id = parser, new_call_id
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of each block
        self._is_open = False

    def response(
        self, head: Mapping[str, Any], reason: FinishReason | None, usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{head['id']}",
            "type": "message",
            "role": "assistant",
            "model": head["model"],
            "content": [_filled(*one) for one in zip(self._blocks, self._texts, strict=True)],
            **self._ending(head, reason),
            "usage": _usage(usage, head),
        }

    def begin(self, head: Mapping[str, Any]) -> Iterator[bytes]:
        yield event_of({"type": "message_start", "message": self.response(head, None)})

    def part(self, text: str, reason: FinishReason | None) -> Iterator[bytes]:
        for piece in self._parser.feed(text, is_end=reason is not None):
            yield from self._piece(piece)
        if reason is not None:
            yield from self._close()

    def end(self, head: Mapping[str, Any], reason: FinishReason, usage: Mapping[str, Any]) -> bytes:
        delta = {"type": "message_delta", "delta": self._ending(head, reason), "usage": _usage(usage, head)}
        return event_of(delta) + event_of({"type": "message_stop"})

    def failure(self, refusal: Refusal) -> bytes:
        return event_of(error_json(refusal))

    def _ending(self, head: Mapping[str, Any], reason: FinishReason | None) -> dict[str, Any]:
        stop = head["stop"] if reason == "stop" and isinstance(head["stop"], str) else None
        shown = None if reason is None else "stop_sequence" if stop is not None else _REASONS[reason]
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        if has_calls and reason in ("eos", "stop") and not self._parser.is_in_call:
            shown, stop = "tool_use", None
        return {"stop_reason": shown, "stop_sequence": stop}

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        kind = _KINDS[piece.kind]
        if piece.kind == "call" or not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._close()
            block: dict[str, Any] = {"type": kind, "text": "", "citations": None}
            if kind == "thinking":
                block = {"type": kind, "thinking": "", "signature": ""}
            elif kind == "tool_use":
                block = {"type": kind, "id": self._new_call_id(), "name": piece.text, "input": {}}
            self._blocks.append(block)
            self._texts.append("")
            self._is_open = True
            yield self._event("content_block_start", content_block=block)
        if piece.kind != "call":
            self._texts[-1] += piece.text
            yield self._event("content_block_delta", delta={"type": _DELTAS[kind], _KEYS[kind]: piece.text})

    def _close(self) -> Iterator[bytes]:
        """End the last block."""
        if self._is_open:
            self._is_open = False
            yield self._event("content_block_stop")

    def _event(self, kind: str, **more: Any) -> bytes:
        return event_of({"type": kind, "index": len(self._blocks) - 1, **more})


def _filled(block: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A block with its text; a call that was cut has no input."""
    if block["type"] != "tool_use":
        return {**block, block["type"]: text}
    try:
        return {**block, "input": json.loads(text or "{}")}
    except ValueError:
        return {**block}


def _usage(usage: Mapping[str, Any] | None, head: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt tokens found in the cache are counted apart, once that is known."""
    num_cached = 0 if usage is None else usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": head["num_prompt_tokens"] - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0 if usage is None else usage["completion_tokens"],
    }
