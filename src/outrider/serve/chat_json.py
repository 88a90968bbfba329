"""OpenAI's chat completions, whole and streamed: content, thoughts and calls of tools.

Sources: OpenAI's API reference; DeepSeek's (``reasoning_content``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.records import FinishReason
from outrider.serve.completion_json import FINISH, ScoredTokens, TokenTexts, finite
from outrider.text.output_parser import OutputParser
from outrider.text.pieces import Piece


class ChatForm:
    """Choices of chat completions.

    Args:
        new_parser: a parser for each choice.
        new_call_id: a number for each call.
        shows_thoughts: whether they are sent.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    repeats_prompt = False

    def __init__(
        self,
        tokens: TokenTexts,
        new_parser: Callable[[], OutputParser],
        new_call_id: Callable[[], str],
        shows_thoughts: bool,
    ) -> None:
        self.tokens, self._new_parser, self._new_call_id = tokens, new_parser, new_call_id
        self._shows_thoughts = shows_thoughts
        self._parsers: dict[int, OutputParser] = {}
        self._callers: set[int] = set()  # choices with calls

    def whole(self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason) -> dict[str, Any]:
        delta = self._delta(self._pieces(index, text, is_last=True), index)
        calls = [{key: part for key, part in call.items() if key != "index"} for call in delta.pop("tool_calls", [])]
        content = delta.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **delta}
        return {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(scored),
            "finish_reason": self._finish_reason(index, reason),
        }

    def begin(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(
        self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        delta = self._delta(self._pieces(index, text, is_last=reason is not None), index)
        if not (delta or scored or reason):
            return None
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(scored),
            "finish_reason": None if reason is None else self._finish_reason(index, reason),
        }

    def _pieces(self, index: int, text: str, *, is_last: bool) -> list[Piece]:
        if index not in self._parsers:
            self._parsers[index] = self._new_parser()
        return self._parsers[index].feed(text, is_end=is_last)

    def _delta(self, pieces: Sequence[Piece], index: int) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.kind == "content":
                delta["content"] = delta.get("content", "") + piece.text
            elif piece.kind == "reasoning":
                if self._shows_thoughts:
                    delta["reasoning_content"] = piece.text
            elif piece.kind == "call":
                self._callers.add(index)
                function = {"name": piece.text, "arguments": ""}
                calls[piece.call] = {"id": self._new_call_id(), "type": "function", "function": function}
            else:
                call = calls.setdefault(piece.call, {"function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls.items()]
        return delta

    def _finish_reason(self, index: int, reason: FinishReason) -> str:
        has_calls = index in self._callers and not self._parsers[index].is_in_call  # stop strings may cut a call
        return "tool_calls" if has_calls and reason != "length" else FINISH[reason]

    def _logprobs(self, scored: ScoredTokens | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        content = []
        for token_id, logprob in zip(scored.token_ids, scored.logprobs, strict=True):
            assert logprob is not None
            top = [self._token(*pair) for pair in logprob.top]
            content.append({**self._token(token_id, logprob.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.tokens.of(token_id)
        # A partial character has bytes that its text does not show.
        bytes_ = None if "\ufffd" in text else list(text.encode("utf-8"))
        return {"token": text, "logprob": finite(logprob), "bytes": bytes_}
