"""OpenAI's response objects: their choices, and text completions, whole and streamed.

Log-probabilities are of the target's raw logits. Each token is decoded alone, so the token strings need not add up to
the response's text (partial characters).

Source: OpenAI's API reference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.records import FinishReason, TokenLogprob
from outrider.serve.scoring import ScoredToken

_LEAST_LOGPROB = -9999.0  # JSON has no -inf
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


def event(value: dict[str, Any]) -> bytes:
    """Encode a server-sent event. ASCII, since some clients take U+2028 for a line break."""
    return f"data: {json.dumps(value, ensure_ascii=True, allow_nan=False)}\n\n".encode("ascii")


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens with their log-probabilities; the first token of a prompt has none."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None]


class TokenTexts:
    """Decodes single tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
        as_ids: return ``token_id:7`` instead.
    """

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._texts: dict[int, str] = {}

    def of(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text


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
        self._offsets: dict[int, int] = {}

    def whole(self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason) -> dict[str, Any]:
        return self._choice(index, text, scored, reason)

    def begin(self, index: int) -> None:
        return None

    def part(
        self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        return self._choice(index, text, scored, reason) if text or scored or reason else None

    def _choice(
        self, index: int, text: str, scored: ScoredTokens | None, reason: FinishReason | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if scored is None else self._logprobs(index, scored),
            "finish_reason": None if reason is None else FINISH[reason],
        }

    def _logprobs(self, index: int, scored: ScoredTokens) -> dict[str, Any]:
        texts, values, tops, offsets = [], [], [], []
        offset = self._offsets.get(index, 0)
        for token_id, logprob in zip(scored.token_ids, scored.logprobs, strict=True):
            text = self.tokens.of(token_id)
            texts.append(text)
            offsets.append(offset)
            offset += len(text)
            values.append(None if logprob is None else finite(logprob.logprob))
            tops.append(None if logprob is None else self._top(text, logprob))
        self._offsets[index] = offset
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, text: str, logprob: TokenLogprob) -> dict[str, float]:
        """The most probable tokens and the chosen one; of tokens with equal text, the most probable."""
        top: dict[str, float] = {}
        for token_id, value in logprob.top:
            top.setdefault(self.tokens.of(token_id), finite(value))
        top.setdefault(text, finite(logprob.logprob))
        return top


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
