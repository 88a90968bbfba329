"""OpenAI's chat completions, whole and streamed: content, thoughts and calls of tools.

Sources: OpenAI's API reference; DeepSeek's (``reasoning_content``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from outrider.records import FinishReason
from outrider.serve.completion_json import FINISH, finite
from outrider.serve.token_texts import PlacedToken, ScoredTokens, TokenTexts, WaitingTokens
from outrider.text.output_parser import OutputParser, Piece


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
        self._waiting: dict[int, WaitingTokens] = defaultdict(WaitingTokens)  # of each choice

    def whole(self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason) -> dict[str, Any]:
        pieces = self._pieces(index, text, is_last=True)
        delta = self._delta(pieces, index)
        calls = [{key: part for key, part in call.items() if key != "index"} for call in delta.pop("tool_calls", [])]
        content = delta.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **delta}
        return {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(index, text, pieces, scored),
            "finish_reason": self._finish_reason(index, reason),
        }

    def begin(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(
        self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        pieces = self._pieces(index, text, is_last=reason is not None)
        delta, logprobs = self._delta(pieces, index), self._logprobs(index, text, pieces, scored)
        if not (delta or reason):
            return None
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
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

    def _logprobs(
        self, index: int, text: str, pieces: Sequence[Piece], scored: ScoredTokens | None
    ) -> dict[str, Any] | None:
        """Those of the content: without thoughts, calls, their markers and the end."""
        if scored is None:
            return None
        waiting, content = self._waiting[index], []
        waiting.add(text, scored)
        for piece in pieces:
            if piece.kind == "content":
                tokens = waiting.take(len(piece.text), piece.num_after)
                # Special tokens may have no text.
                content += [self._scored(one) for one in tokens if one.piece or self.tokens.token(one.id).is_part]
        return {"content": content, "refusal": None}

    def _scored(self, token: PlacedToken) -> dict[str, Any]:
        assert token.logprob is not None
        top = [self._token(i, value, token.piece if i == token.id else "") for i, value in token.logprob.top]
        return self._token(token.id, token.logprob.logprob, token.piece) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float, piece: str) -> dict[str, Any]:
        found = self.tokens.token(token_id).bytes
        return {
            "token": self.tokens.of(token_id, piece),
            "logprob": finite(logprob),
            "bytes": None if found is None else list(found),
        }
