"""Answers, whole and streamed: one driver for all endpoints, each of which has a class that writes its answers.

Sources: OpenAI's API reference (``usage``); vLLM, docs/features/per_request_metrics and
docs/features/speculative_decoding/acceptance_metrics (``metrics``).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outrider.records import Chunk, Completion, FinishReason
from outrider.requests.async_session import Ticket
from outrider.requests.engine_loop import RequestState
from outrider.serve.admission import arrival
from outrider.serve.generation_body import ParsedRequest
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.logprobs import ScoredToken, TokenTexts
from outrider.serve.metrics import num_spec_steps
from outrider.serve.served_model import ServedModel
from outrider.text.output_parser import OutputParser
from outrider.text.tool_formats import ToolFormat

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"  # after the last event of OpenAI's completions
_NUM_AT_ONCE = 100  # items of a list; with 20 alternatives the log-probabilities of a token are 2 KB
_DEEPEST_SPLIT = 4  # the logprobs of a choice in the list of choices, and their lists


@dataclass(eq=False)
class Answer(ABC):
    """A request, ready for the engine thread, and then its answer."""

    ask: ParsedRequest
    prompt_ids: list[list[int]]  # of each prompt
    prompt_texts: list[str]  # of each prompt, with ``echo`` alone
    jobs: list[RequestState]  # one per choice, ``n`` per prompt in turn; none if only the prompt is requested
    tokens: TokenTexts
    new_parser: Callable[[RequestState], OutputParser]
    tool_format: ToolFormat | None
    served: ServedModel
    splits_thoughts: bool
    ticket: Ticket = field(init=False)
    scored: list[list[ScoredToken]] = field(init=False)  # tokens of each prompt but the first, if requested
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one piece, after all chunks. (Slow for long log-probabilities: not for the event loop.)"""

    @abstractmethod
    def begin(self) -> Iterable[bytes]:
        """Events before any text."""

    @abstractmethod
    def part(self, which: int, chunk: Chunk) -> Iterable[bytes]:
        """Events of a row's next chunk."""

    @abstractmethod
    def end(self) -> Iterable[bytes]:
        """Events after all text."""

    @abstractmethod
    def failure(self, refusal: Refusal) -> bytes:
        """Last event of an answer that cannot go on."""

    def call_id(self) -> str:
        assert self.tool_format is not None
        return self.tool_format.new_id()

    def totals(self) -> dict[str, Any]:
        """Usage; with one sequence also its metrics: those of several do not add up."""
        completions = [job.completion for job in self.jobs]
        num_cached = sum(one.num_cached_tokens for one in completions[:: self.ask.body.n])
        usage = usage_of(self.num_prompt_tokens, sum(len(one.token_ids) for one in completions), num_cached)
        if self.splits_thoughts:
            num_thoughts = sum(job.text.num_thoughts for job in self.jobs)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_thoughts}
        return {"usage": usage} | self.metrics()

    def metrics(self) -> dict[str, Any]:
        """Times in milliseconds and draft statistics of the only sequence, in vLLM's form; none of several."""
        if len(self.jobs) != 1:
            return {}
        (job,) = self.jobs
        own_k, completion = job.request.num_draft_tokens, job.completion
        num_tokens, decode_s, whole_s = len(completion.token_ids), job.last_s - job.first_s, job.last_s - job.begun_s
        found = {
            "time_to_first_token_ms": 1e3 * (job.first_s - job.begun_s),
            "generation_time_ms": 1e3 * decode_s,
            "queue_time_ms": 1e3 * (job.begun_s - self.ticket.submitted_s),
            "mean_itl_ms": 1e3 * decode_s / (num_tokens - 1) if num_tokens > 1 else None,
            "tokens_per_second": num_tokens / whole_s,
            "speculative_decoding": _drafts(completion, self.served.schedule.max_k if own_k is None else own_k),
        }
        return {"metrics": found}

    @property
    def name(self) -> str:
        """The model's, as it was asked for."""
        return self.ask.body.model or self.served.names[0]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompt_ids))


@dataclass(eq=False)
class ItemsAnswer(Answer):
    """One output in items, one after another: messages, thoughts and calls. ``types`` has the type of an item by the
    kind of a piece."""

    types: ClassVar[Mapping[str, str]]
    parser: OutputParser = field(init=False)
    items: list[dict[str, Any]] = field(init=False, default_factory=list)
    is_open: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.parser = self.new_parser(self.jobs[0])

    @abstractmethod
    def begin_item(self, kind: str, name: str) -> Iterator[bytes]:
        """Add an item, of a call with the tool's name."""

    @abstractmethod
    def add(self, text: str) -> bytes:
        """Add text to the last item."""

    @abstractmethod
    def end_item(self, *, is_cut: bool) -> Iterator[bytes]:
        """End the last item."""

    @abstractmethod
    def so_far(self, reason: FinishReason | None, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer so far, without a reason while it goes on."""

    def whole(self) -> dict[str, Any]:
        completion, totals = self.jobs[0].completion, self.totals()
        for _ in self._parts(completion.finish_reason):
            pass
        return self.so_far(completion.finish_reason, totals["usage"]) | {"metrics": totals["metrics"]}

    def part(self, which: int, chunk: Chunk) -> Iterator[bytes]:
        return self._parts(chunk.finish_reason)

    def _parts(self, reason: FinishReason | None) -> Iterator[bytes]:
        for piece in self.parser.next_pieces(is_end=reason is not None):
            if piece.kind == "reasoning" and not self.ask.body.include_reasoning:
                continue
            kind = self.types[piece.kind]
            if piece.kind == "call" or not self.is_open or self.items[-1]["type"] != kind:
                yield from self._close(is_cut=False)
                yield from self._open(kind, piece.text)
            if piece.kind != "call":
                yield self.add(piece.text)
        if reason is not None:
            if not self.items and self.types["content"] == "message":  # a response is never empty
                yield from self._open("message", "")
            yield from self._close(is_cut=reason == "length" or self.parser.is_in_call)  # by a stop string

    def _open(self, kind: str, name: str) -> Iterator[bytes]:
        self.is_open = True
        return self.begin_item(kind, name)

    def _close(self, *, is_cut: bool) -> Iterator[bytes]:
        was_open, self.is_open = self.is_open, False
        return self.end_item(is_cut=is_cut) if was_open else iter(())


async def whole_answer(answer: Answer) -> dict[str, Any]:
    """The answer in one piece. Raises the error of a row."""
    async for _ in _arrivals(answer):
        pass
    return await asyncio.to_thread(answer.whole)


async def answer_events(answer: Answer) -> AsyncIterator[bytes]:
    """The answer as server-sent events, errors included. An error before the first event is raised, since the
    status can still report it."""
    arrivals = _arrivals(answer)
    item: Any = await anext(arrivals, DONE)
    try:
        # With echo these may be long log-probabilities.
        begun = await asyncio.to_thread(lambda: list(answer.begin())) if answer.ask.body.echo else answer.begin()
        for event in begun:
            yield event
        while item is not DONE:
            for event in [KEEP_ALIVE] if item is None else answer.part(*item):
                yield event
            item = await anext(arrivals, DONE)
        for event in answer.end():
            yield event
    except Exception as error:
        yield answer.failure(refusal_of(error))


async def _arrivals(answer: Answer) -> AsyncIterator[tuple[int, Chunk] | None]:
    """Chunks of rows until all have ended; None as a keep-alive. The error of one row ends all."""
    num_open = len(answer.jobs)
    while num_open:
        event = await arrival(answer.ticket)
        if event is None:
            yield None
            continue
        which, chunk = event
        if isinstance(chunk, Exception):
            constraint = answer.jobs[which].request.constraint
            if constraint is not None and constraint.error is not None:  # the client's grammar is at fault
                raise Refusal(str(chunk), param=answer.ask.structured_by)
            raise answer.served.error_of(chunk)
        num_open -= chunk.finish_reason is not None
        yield which, chunk


def json_text(value: Any, **options: Any) -> str:
    """Encode JSON as ``json.dumps`` does with these options, which stops all other threads: in pieces of a few
    milliseconds."""
    return "".join(_pieces(value, json.JSONEncoder(allow_nan=False, **options), _DEEPEST_SPLIT))


def _pieces(value: Any, encoder: json.JSONEncoder, depth: int) -> Iterator[str]:
    comma = encoder.item_separator
    if isinstance(value, list) and len(value) > _NUM_AT_ONCE and not (depth and isinstance(value[0], dict | list)):
        for begin in range(0, len(value), _NUM_AT_ONCE):
            yield (comma if begin else "[") + encoder.encode(value[begin : begin + _NUM_AT_ONCE])[1:-1]
        yield "]"
    elif depth and value and isinstance(value, dict | list):
        (opening, closing), is_dict = "{}" if isinstance(value, dict) else "[]", isinstance(value, dict)
        for index, key in enumerate(value):
            assert not is_dict or isinstance(key, str)
            yield (comma if index else opening) + (encoder.encode(key) + encoder.key_separator if is_dict else "")
            yield from _pieces(value[key] if is_dict else key, encoder, depth - 1)
        yield closing
    else:
        yield encoder.encode(value)


def event_of(value: Mapping[str, Any], name: str | None = None, *, is_long: bool = False) -> bytes:
    """Encode a server-sent event. ASCII, since some clients take U+2028 for a line break."""
    line = "" if name is None else f"event: {name}\n"
    text = json_text(value) if is_long else json.dumps(value, ensure_ascii=True, allow_nan=False)
    return f"{line}data: {text}\n\n".encode("ascii")


def usage_of(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def _drafts(completion: Completion, max_k: int) -> dict[str, Any] | None:
    """Draft statistics, with at most ``max_k`` drafted tokens per round; None without drafts. Leaves out the last round
    if tokens after the end were dropped."""
    stats = completion.stats
    num_steps = num_spec_steps(stats)
    if num_steps == 0:
        return None
    histogram = [*stats.acceptance_histogram, *[0] * (max_k + 1 - len(stats.acceptance_histogram))]
    histogram[0] -= stats.num_rounds - num_steps
    return {
        "mean_acceptance_length": 1 + stats.num_accepted_draft_tokens / num_steps,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": max_k,
    }
