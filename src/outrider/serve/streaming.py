"""One request in flight: submits rows and scoring, gathers or streams chunks.

A client that disconnects, streaming or not, cancels its rows (``until_disconnect``).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from starlette.types import Receive

from outrider.records import Chunk, Completion, FinishReason
from outrider.requests.state import RequestState
from outrider.serve.completion_json import DONE, KEEP_ALIVE, Form, event, prompt_logprobs_json
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.pending import Ticket, arrival
from outrider.serve.protocol import ParsedRequest
from outrider.serve.token_texts import ScoredTokens
from outrider.serve.usage import metrics_of, timings_of, usage_of
from outrider.text.tokenizer import pieces_of

_Item = tuple[int, Chunk] | None  # a row's next chunk; None is a keep-alive


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, ready for the engine thread.

    Attributes:
        prompt_ids: of each prompt.
        jobs: one per choice, ``n`` per prompt in turn; none if only the prompt is requested.
        form: a ``Form``, the format of the choices; at ``/v1/responses`` a ``ResponseForm``.
        max_k: maximum tokens drafted per round, for rows without their own K.
        num_thoughts: how many of the tokens of an output are thoughts; None if they are not split off.
    """

    ask: ParsedRequest
    prompt_ids: list[list[int]]
    prompt_texts: list[str]
    jobs: list[RequestState]
    form: Any
    model: str
    fingerprint: str
    max_k: int
    num_thoughts: Callable[[Sequence[int]], int] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, *, is_chunk: bool) -> dict[str, Any]:
        """Fields that all responses have."""
        return {
            "id": self.form.id_prefix + self.id,
            "object": self.form.chunk_kind if is_chunk else self.form.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    @property
    def num_choices(self) -> int:
        return len(self.prompt_ids) * self.ask.n

    @property
    def is_of_one_text(self) -> bool:
        """Whether statistics can be reported: those of several sequences do not add up to those of one."""
        return len(self.jobs) == 1


async def ended(prepared: PreparedRequest, ticket: Ticket) -> None:
    """Gather all chunks. Raises the error of a row."""
    async for item in arrivals(prepared, ticket):
        if item is not None:
            which, chunk = item
            prepared.jobs[which].chunks.append(chunk)


def whole(prepared: PreparedRequest, ticket: Ticket) -> dict[str, Any]:
    """Response in one piece. (Slow for long log-probabilities: not for the event loop.)"""
    completions = [job.completion for job in prepared.jobs]
    choices = []
    for index in range(prepared.num_choices):
        echo, scored = _echoed(prepared, ticket, index)
        if not completions:
            choices.append(prepared.form.whole(index, echo, scored, "length"))
            continue
        one = completions[index]
        assert one.finish_reason is not None
        if one.logprobs is not None:
            own = ScoredTokens(one.token_ids, one.logprobs, prepared.jobs[index].text.pieces)
            scored = _joined(scored, own)
        choice = prepared.form.whole(index, echo + one.text, scored, one.finish_reason)
        choices.append(choice | {"seed": one.seed, "stop_reason": prepared.jobs[index].text.stop_reason})
    response = prepared.opening(is_chunk=False) | {"choices": choices} | totals(prepared, ticket, completions)
    if (num_top := prepared.ask.num_prompt_logprobs) is not None:
        pairs = zip(prepared.prompt_ids, ticket.scored, strict=True)
        found = [prompt_logprobs_json(prepared.form.tokens, *pair, num_top) for pair in pairs]
        if prepared.form.repeats_prompt:
            for index, choice in enumerate(choices):
                choice["prompt_logprobs"] = found[index // prepared.ask.n]
        else:
            (response["prompt_logprobs"],) = found
    return response


async def streamed(prepared: PreparedRequest, ticket: Ticket) -> AsyncIterator[bytes]:
    """Response as server-sent events, errors included.

    Raises:
        Exception: an error before the first event, while the status can still report it.
    """
    form: Form = prepared.form
    ask, opening = prepared.ask, prepared.opening(is_chunk=True)
    num_generated = 0
    pieces = [iter(job.text.pieces) for job in prepared.jobs]  # a row may be ahead of its chunks

    def chunk_event(choice: dict[str, Any], **more: Any) -> bytes:
        value = opening | {"choices": [choice]} | more
        if ask.has_usage_in_chunks:
            value["usage"] = usage_of(sum(map(len, prepared.prompt_ids)), num_generated, 0)
        elif ask.includes_usage:
            value["usage"] = None
        return event(value)

    events = arrivals(prepared, ticket)
    first_item = [await anext(events)] if prepared.jobs else []
    try:
        for index in range(prepared.num_choices):
            first = form.begin(index)
            if ask.echo:
                reason: FinishReason | None = None if prepared.jobs else "length"
                first = await asyncio.to_thread(form.part, index, *_echoed(prepared, ticket, index), reason)
            if first is not None:
                yield chunk_event(first)
        async for item in chained(first_item, events):
            if item is None:
                yield KEEP_ALIVE
                continue
            which, chunk = item
            prepared.jobs[which].chunks.append(chunk)
            num_generated += len(chunk.token_ids)
            scored = None
            if chunk.logprobs is not None:
                own = list(islice(pieces[which], len(chunk.token_ids)))
                scored = ScoredTokens(chunk.token_ids, chunk.logprobs, own)
            choice = form.part(which, chunk.text, scored, chunk.finish_reason)
            if choice is not None:
                # The row may be ahead of this chunk.
                stop_reason = None if chunk.finish_reason is None else prepared.jobs[which].text.stop_reason
                choice |= {"seed": chunk.seed, "stop_reason": stop_reason}
                is_last = chunk.finish_reason is not None and prepared.is_of_one_text and not ask.includes_usage
                timings = {"timings": timings_of(prepared.jobs[0].completion, ticket.rows[0])} if is_last else {}
                yield chunk_event(choice, **timings)
        if ask.includes_usage:
            completions = [job.completion for job in prepared.jobs]
            yield event(opening | {"choices": []} | totals(prepared, ticket, completions))
    except Exception as error:
        yield event(refusal_of(error).to_json())
    yield DONE


async def arrivals(prepared: PreparedRequest, ticket: Ticket) -> AsyncIterator[_Item]:
    """Yield chunks until all rows have ended; None as a keep-alive. The error of one row ends all."""
    num_open = len(ticket.rows)
    while num_open:
        event_ = await arrival(ticket.events)
        if event_ is None:
            yield None
            continue
        which, item = event_
        if isinstance(item, Exception):
            constraint = prepared.jobs[which].request.constraint
            if constraint is not None and constraint.error is not None:  # the client's grammar is at fault
                raise Refusal(str(item), param=prepared.ask.structured_by)
            raise item
        num_open -= item.finish_reason is not None
        yield which, item


async def chained(first: list[_Item], others: AsyncIterator[_Item]) -> AsyncIterator[_Item]:
    for item in first:
        yield item
    async for item in others:
        yield item


def _echoed(prepared: PreparedRequest, ticket: Ticket, index: int) -> tuple[str, ScoredTokens | None]:
    """Prompt, as the beginning of a choice."""
    ask, at = prepared.ask, index // prepared.ask.n
    if not ask.echo:
        return "", None
    text, num_top = prepared.prompt_texts[at], ask.num_logprobs
    if num_top is None:
        return text, None
    own, ids = [one.first(num_top) for one in ticket.scored[at]], prepared.prompt_ids[at]
    return text, ScoredTokens(ids, [None, *own], pieces_of(prepared.form.tokens.tokenizer, ids, text))


def _joined(first: ScoredTokens | None, second: ScoredTokens) -> ScoredTokens:
    if first is None:
        return second
    return ScoredTokens(
        [*first.token_ids, *second.token_ids],
        [*first.logprobs, *second.logprobs],
        [*first.pieces, *second.pieces],
    )


def totals(prepared: PreparedRequest, ticket: Ticket, completions: list[Completion]) -> dict[str, Any]:
    """Usage and draft statistics."""
    num_cached = sum(one.num_cached_tokens for one in completions[:: prepared.ask.n])
    num_generated = sum(len(one.token_ids) for one in completions)
    usage = usage_of(sum(map(len, prepared.prompt_ids)), num_generated, num_cached)
    if prepared.num_thoughts is not None:
        num_thoughts = sum(prepared.num_thoughts(one.token_ids) for one in completions)
        usage["completion_tokens_details"] = {"reasoning_tokens": num_thoughts}
    if not prepared.is_of_one_text:
        return {"usage": usage}
    own_k = prepared.jobs[0].request.num_draft_tokens
    metrics = metrics_of(completions[0], ticket.rows[0], prepared.max_k if own_k is None else own_k)
    return {"usage": usage, "metrics": metrics, "timings": timings_of(completions[0], ticket.rows[0])}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
