"""Answers of ``/v1/responses`` and ``/v1/messages``, in one piece and as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

from outrider.records import FinishReason
from outrider.serve.completion_json import KEEP_ALIVE
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.pending import Ticket
from outrider.serve.streaming import PreparedRequest, arrivals, chained, totals


class ItemForm(Protocol):
    """Writes one answer: see ``ResponseForm``."""

    def response(
        self, head: Mapping[str, Any], reason: FinishReason | None, usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]: ...

    def begin(self, head: Mapping[str, Any]) -> Iterator[bytes]: ...

    def part(self, text: str, reason: FinishReason | None) -> Iterator[bytes]: ...

    def end(self, head: Mapping[str, Any], reason: FinishReason, usage: Mapping[str, Any]) -> bytes: ...

    def failure(self, refusal: Refusal) -> bytes: ...


def whole_response(prepared: PreparedRequest, ticket: Ticket) -> dict[str, Any]:
    """Response in one piece."""
    form, completion = _form(prepared), prepared.jobs[0].completion
    assert completion.finish_reason is not None
    for _ in form.part(completion.text, completion.finish_reason):
        pass
    found = totals(prepared, ticket, [completion])
    return form.response(_head(prepared), completion.finish_reason, found["usage"]) | {"metrics": found["metrics"]}


async def streamed_response(prepared: PreparedRequest, ticket: Ticket) -> AsyncIterator[bytes]:
    """Response as server-sent events, errors included.

    Raises:
        Exception: an error before the first event, while the status can still report it.
    """
    form, job = _form(prepared), prepared.jobs[0]
    events = arrivals(prepared, ticket)
    first = [await anext(events)]
    for event in form.begin(_head(prepared)):
        yield event
    try:
        async for item in chained(first, events):
            if item is None:
                yield KEEP_ALIVE
                continue
            job.chunks.append(item[1])
            for event in form.part(item[1].text, item[1].finish_reason):
                yield event
        completion = job.completion
        assert completion.finish_reason is not None
        yield form.end(_head(prepared), completion.finish_reason, totals(prepared, ticket, [completion])["usage"])
    except Exception as error:
        yield form.failure(refusal_of(error))


def _form(prepared: PreparedRequest) -> ItemForm:
    form: ItemForm = prepared.form
    return form


def _head(prepared: PreparedRequest) -> dict[str, Any]:
    return {
        "id": prepared.id,
        "created": prepared.created,
        "model": prepared.model,
        "num_prompt_tokens": len(prepared.prompt_ids[0]),
        "stop": prepared.jobs[0].text.stop_reason,
    }
