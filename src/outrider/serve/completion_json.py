"""OpenAI's response objects: their choices, and text completions, whole and streamed.

Log-probabilities are of the target's raw logits. Streamed, they come with the text of their tokens.

Source: OpenAI's API reference.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from outrider.records import FinishReason
from outrider.serve.scoring import ScoredToken
from outrider.serve.token_texts import PlacedToken, ScoredTokens, TokenTexts, WaitingTokens, id_text

_LEAST_LOGPROB = -9999.0  # JSON has no -inf
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


def event(value: dict[str, Any]) -> bytes:
    """Encode a server-sent event. ASCII, since some clients take U+2028 for a line break."""
    return f"data: {json.dumps(value, ensure_ascii=True, allow_nan=False)}\n\n".encode("ascii")


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def prompt_logprobs_json(
    texts: TokenTexts, token_ids: Sequence[int], scored: Sequence[ScoredToken], num_top: int
) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt in vLLM's form: by token id, of its token first, then of the alternatives."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.of(token_id)}

    found: list[dict[str, Any] | None] = [None]
    for token_id, one in zip(token_ids[1:], scored, strict=True):
        top = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(one.first(num_top).top, 1)}
        found.append({str(token_id): entry(token_id, one.logprob.logprob, one.rank)} | top)
    return found


class Form(Protocol):
    """Format of choices.

    Attributes:
        tokens: texts of single tokens.
        repeats_prompt: each choice has the log-probabilities of its prompt; else the response has them.
    """

    tokens: TokenTexts
    repeats_prompt: bool
    kind: str
    chunk_kind: str
    id_prefix: str

    def whole(self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason) -> dict[str, Any]: ...

    def begin(self, index: int) -> dict[str, Any] | None:
        """First chunk, before any text."""
        ...

    def part(
        self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        """Chunk for more text; None if there is nothing to send yet."""
        ...


class CompletionForm:
    """Choices of text completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"
    repeats_prompt = True

    def __init__(self, tokens: TokenTexts) -> None:
        self.tokens = tokens
        self._waiting: dict[int, WaitingTokens] = defaultdict(WaitingTokens)  # of each choice

    def whole(self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason) -> dict[str, Any]:
        return self._choice(index, text, scored, reason)

    def begin(self, index: int) -> None:
        return None

    def part(
        self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        choice = self._choice(index, text, scored, reason)
        return choice if text or reason else None

    def _choice(
        self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if scored is None else self._logprobs(index, text, scored, is_end=reason is not None),
            "finish_reason": None if reason is None else FINISH[reason],
        }

    def _logprobs(self, index: int, text: str, scored: ScoredTokens, *, is_end: bool) -> dict[str, Any]:
        waiting = self._waiting[index]
        waiting.add(text, scored)
        tokens = waiting.take(len(text)) + (waiting.rest() if is_end else [])
        return {
            "tokens": [self.tokens.of(token.id, token.piece) for token in tokens],
            "token_logprobs": [None if token.logprob is None else finite(token.logprob.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.at for token in tokens],
        }

    def _top(self, token: PlacedToken) -> dict[str, float] | None:
        """The most probable tokens and the chosen one, by their texts. Of several with the same text the chosen one
        has it, else the most probable; the others are ``token_id:7``."""
        if token.logprob is None:
            return None
        chosen, top = self.tokens.of(token.id, token.piece), {}
        for token_id, value in (dict(token.logprob.top) | {token.id: token.logprob.logprob}).items():
            text = chosen if token_id == token.id else self.tokens.of(token_id)
            is_taken = text in top or (text == chosen and token_id != token.id)
            top[id_text(token_id) if is_taken else text] = finite(value)
        return top


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
