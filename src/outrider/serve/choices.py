"""OpenAI's completions and chat completions, whole and streamed.

Log-probabilities are of the target's raw logits. Streamed, they come with the text of their tokens.

Sources: OpenAI's API reference; DeepSeek's (``reasoning_content``); vLLM's (``prompt_logprobs``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from outrider.records import Chunk, FinishReason, TokenLogprob
from outrider.serve.answers import DONE, Answer, event_of, usage_of
from outrider.serve.http_errors import Refusal
from outrider.serve.logprobs import PlacedToken, Scored, WaitingTokens, finite_logprob, id_text, prompt_logprobs_json
from outrider.text.thought_splitter import Piece
from outrider.text.tokenizer import pieces_of

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(eq=False)
class ChoicesAnswer(Answer):
    """Choices, the outputs of a request. The log-probabilities of a prompt are in each choice (``repeats_prompt``), or
    in the response."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    repeats_prompt: ClassVar[bool]
    _waiting: dict[int, WaitingTokens] = field(init=False, default_factory=lambda: defaultdict(WaitingTokens))
    _num_generated: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._num_choices = len(self.prompt_ids) * self.ask.body.n
        self._pieces = [iter(job.text.pieces) for job in self.jobs]  # a row may be ahead of its chunks

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Chunk before any text."""
        return None

    @abstractmethod
    def next_choice(
        self, index: int, text: str, scored: Scored | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        """More text; None if there is nothing to send yet."""

    def whole_choice(self, index: int, text: str, scored: Scored | None, reason: FinishReason) -> dict[str, Any]:
        return self.next_choice(index, text, scored, reason) or {}

    def whole(self) -> dict[str, Any]:
        choices = []
        for index in range(self._num_choices):
            text, scored = self._echoed(index)
            if not self.jobs:
                choices.append(self.whole_choice(index, text, scored, "length"))
                continue
            job = self.jobs[index]
            one = job.completion
            assert one.finish_reason is not None
            if one.logprobs is not None:
                scored = [*(scored or ()), *zip(one.token_ids, one.logprobs, job.text.pieces, strict=True)]
            choice = self.whole_choice(index, text + one.text, scored, one.finish_reason)
            choices.append(choice | {"seed": one.seed, "stop_reason": job.text.stop_reason})
        response = self._opening(self.kind) | {"choices": choices} | self.totals()
        if (num_top := self.ask.body.prompt_logprobs) is not None:
            pairs = zip(self.prompt_ids, self.scored, strict=True)
            found = [prompt_logprobs_json(self.tokens, *pair, num_top) for pair in pairs]
            if self.repeats_prompt:
                for index, choice in enumerate(choices):
                    choice["prompt_logprobs"] = found[index // self.ask.body.n]
            else:
                (response["prompt_logprobs"],) = found
        return response

    def begin(self) -> Iterator[bytes]:
        for index in range(self._num_choices):
            first = self.first_choice(index)
            if self.ask.body.echo:
                first = self.next_choice(index, *self._echoed(index), None if self.jobs else "length")
            if first is not None:
                yield self._chunk(first)

    def part(self, which: int, chunk: Chunk) -> Iterator[bytes]:
        self._num_generated += len(chunk.token_ids)
        reason, scored = chunk.finish_reason, None
        if chunk.logprobs is not None:
            own = islice(self._pieces[which], len(chunk.token_ids))
            scored = Scored(zip(chunk.token_ids, chunk.logprobs, own, strict=True))
        choice = self.next_choice(which, chunk.text, scored, reason)
        if choice is None:
            return
        # The row may be ahead of this chunk.
        choice |= {"seed": chunk.seed, "stop_reason": None if reason is None else self.jobs[which].text.stop_reason}
        is_last = reason is not None and len(self.jobs) == 1 and not self.ask.body.stream_options.include_usage
        yield self._chunk(choice, **(self.metrics() if is_last else {}))

    def end(self) -> Iterator[bytes]:
        if self.ask.body.stream_options.include_usage:
            yield event_of(self._opening(self.chunk_kind) | {"choices": []} | self.totals())
        yield DONE

    def failure(self, refusal: Refusal) -> bytes:
        return event_of(refusal.to_json()) + DONE

    def _opening(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id_prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.name,
            "system_fingerprint": self.served.fingerprint,
        }

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        value = self._opening(self.chunk_kind) | {"choices": [choice]} | more
        if self.ask.body.stream_options.continuous_usage_stats:
            value["usage"] = usage_of(self.num_prompt_tokens, self._num_generated, 0)
        elif self.ask.body.stream_options.include_usage:
            value["usage"] = None
        return event_of(value, is_long=self.ask.body.echo)

    def _echoed(self, index: int) -> tuple[str, Scored | None]:
        at, num_top = index // self.ask.body.n, self.ask.options["logprobs"]
        if not self.ask.body.echo:
            return "", None
        text, ids = self.prompt_texts[at], self.prompt_ids[at]
        if num_top is None:
            return text, None
        own = [None, *(TokenLogprob(one.logprob, one.top[:num_top]) for one, _ in self.scored[at])]
        return text, list(zip(ids, own, pieces_of(self.tokens.tokenizer, ids, text), strict=True))


class CompletionAnswer(ChoicesAnswer):
    """Choices of text completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"
    repeats_prompt = True

    def next_choice(
        self, index: int, text: str, scored: Scored | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        # Scored tokens are kept until their text comes.
        logprobs = None if scored is None else self._logprobs(index, text, scored, is_end=reason is not None)
        finish_reason = None if reason is None else _FINISH[reason]
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return choice if text or reason else None

    def _logprobs(self, index: int, text: str, scored: Scored, *, is_end: bool) -> dict[str, Any]:
        waiting = self._waiting[index]
        waiting.add(text, scored)
        tokens = waiting.take(len(text)) + (waiting.rest() if is_end else [])
        return {
            "tokens": [self.tokens.of(token.id, token.piece) for token in tokens],
            "token_logprobs": [
                None if token.logprob is None else finite_logprob(token.logprob.logprob) for token in tokens
            ],
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
            top[id_text(token_id) if is_taken else text] = finite_logprob(value)
        return top


@dataclass(eq=False)
class ChatAnswer(ChoicesAnswer):
    """Choices of chat completions: content, thoughts and calls of tools."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    repeats_prompt = False
    _callers: set[int] = field(init=False, default_factory=set)  # choices with calls

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers = list(map(self.new_parser, self.jobs))

    def whole_choice(self, index: int, text: str, scored: Scored | None, reason: FinishReason) -> dict[str, Any]:
        choice = super().whole_choice(index, text, scored, reason)
        delta = choice.pop("delta")
        calls = [{key: part for key, part in call.items() if key != "index"} for call in delta.pop("tool_calls", [])]
        content = delta.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **delta}
        return choice | {"message": message | ({"tool_calls": calls} if calls else {})}

    def first_choice(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def next_choice(
        self, index: int, text: str, scored: Scored | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        pieces = self._parsers[index].next_pieces(is_end=reason is not None)
        delta, logprobs = self._delta(pieces, index), self._logprobs(index, text, pieces, scored)
        if not (delta or reason):
            return None
        has_calls = index in self._callers and not self._parsers[index].is_in_call  # stop strings may cut a call
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if has_calls and reason in ("eos", "stop") else reason and _FINISH[reason],
        }

    def _delta(self, pieces: Sequence[Piece], index: int) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.kind == "content":
                delta["content"] = delta.get("content", "") + piece.text
            elif piece.kind == "reasoning":
                if self.ask.body.include_reasoning:
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
            elif piece.kind == "call":
                self._callers.add(index)
                function = {"name": piece.text, "arguments": ""}
                calls[piece.call] = {"id": self.call_id(), "type": "function", "function": function}
            else:
                call = calls.setdefault(piece.call, {"function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls.items()]
        return delta

    def _logprobs(self, index: int, text: str, pieces: Sequence[Piece], scored: Scored | None) -> dict[str, Any] | None:
        """Those of the content: without thoughts, calls, their markers and the end."""
        if scored is None:
            return None
        waiting, content = self._waiting[index], []
        waiting.add(text, scored)
        for piece in pieces:
            if piece.kind == "content":
                tokens = waiting.take(len(piece.text), piece.end)
                # Special tokens may have no text.
                content += [self._scored(one) for one in tokens if one.piece or self.tokens.token(one.id)[2]]
        return {"content": content, "refusal": None}

    def _scored(self, token: PlacedToken) -> dict[str, Any]:
        assert token.logprob is not None
        top = [self._token(i, value, token.piece if i == token.id else "") for i, value in token.logprob.top]
        return self._token(token.id, token.logprob.logprob, token.piece) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float, piece: str) -> dict[str, Any]:
        _, found, _ = self.tokens.token(token_id)
        return {
            "token": self.tokens.of(token_id, piece),
            "logprob": finite_logprob(logprob),
            "bytes": None if found is None else list(found),
        }
