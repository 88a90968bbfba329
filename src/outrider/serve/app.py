"""Routes, and errors in OpenAI's format.

Source: OpenAI's API reference; ``/tokenize``, ``/detokenize``, ``/version`` and ``max_model_len`` as vLLM has them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.race.page import HEADERS, PAGE, read_file
from outrider.serve import messages
from outrider.serve.about import same_bytes_of
from outrider.serve.admission import FairThreads
from outrider.serve.answers import Answer, answer_events, json_text, whole_answer
from outrider.serve.bodies import ChatBody, CompletionBody, RaceBody
from outrider.serve.body import parse_json
from outrider.serve.choices import ChatAnswer, CompletionAnswer
from outrider.serve.generation_body import GenerationBody, ParsedRequest
from outrider.serve.guards import in_pieces, key_of, response_of, send_whole, with_keys, with_local_hosts
from outrider.serve.http_errors import Refusal, internal_error, refusal_of, unavailable
from outrider.serve.messages import MessageAnswer, MessageBody
from outrider.serve.prepare import Preparer
from outrider.serve.race import Race, choices, prepare_race, race_stream
from outrider.serve.responses import ResponseAnswer, ResponseBody
from outrider.serve.served_model import ServedModel

_MOST_BODY_BYTES = 4 * 2**20
_NUM_TOKENIZING, _NUM_CONSTRAINING = 2, 2  # threads
_RACE_RETRY_S = 10
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
Prepare = Callable[..., Any]  # of a preparer, ``ask``
_OTHER_KINDS = {"embeddings", "images", "moderations"}  # OpenAI's endpoints for other models


class App:
    """ASGI application. The preparer is set once the model is loaded."""

    preparer: Preparer

    def __init__(self, model: ServedModel, api_keys: tuple[str, ...]) -> None:
        self._model, self._num_keys = model, len(api_keys)
        self._created = int(time.time())
        self._is_racing = False  # a race has caches of its own, so there is one at a time
        self._tokenizing = FairThreads(_NUM_TOKENIZING, "outrider-tokenizer")
        self._constraining = FairThreads(_NUM_CONSTRAINING, "outrider-constraints")
        answers: Sequence[tuple[str, type[GenerationBody], type[Answer]]] = (
            ("/v1/completions", CompletionBody, CompletionAnswer),
            ("/v1/chat/completions", ChatBody, ChatAnswer),
            ("/v1/responses", ResponseBody, ResponseAnswer),
            (messages.PATH, MessageBody, MessageAnswer),
        )
        posts: dict[str, Any] = {
            path: Generation(self, body, partial(Preparer.prepare, answer=answer), self.answer)
            for path, body, answer in answers
        }
        posts["/v1/race"] = Generation(self, RaceBody, prepare_race, self.answer_race)
        posts["/tokenize"] = partial(self._json_response, Preparer.tokenize)
        posts["/detokenize"] = partial(self._json_response, Preparer.detokenize)
        posts[f"{messages.PATH}/count_tokens"] = partial(self._json_response, Preparer.count_tokens)
        gets = [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._card),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/health", self._health),
            Route("/ping", self._health),
            Route("/metrics", self._metrics),
            Route("/version", self._version),
            Route("/v1/race/choices", self._race_choices),
            *(Route(path, _static(name)) for path, name in PAGE.items()),
        ]
        self.asgi: ASGIApp = Starlette(
            routes=[*(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()), *gets],
            middleware=[
                Middleware(with_keys, api_keys=api_keys) if api_keys else Middleware(with_local_hosts),
                Middleware(in_pieces, unsent=lambda: model.admission.unsent, client_of=self.client_of),
            ],
            exception_handlers={
                Refusal: _refuse,
                OutriderError: _refuse,
                HTTPException: _refuse_http,
                ClientDisconnect: _leave,
                Exception: _fail,
            },
        )

    def close(self) -> None:
        self._tokenizing.close()
        self._constraining.close()

    async def prepare(self, body: type[GenerationBody], prepare: Prepare, sent: bytes, client: str) -> Any:
        """Prepare a request off the event loop. Constraints, which may take seconds to parse, have threads of their
        own. Raises Refusal."""

        def parse() -> tuple[Preparer, ParsedRequest]:
            value = parse_json(sent)
            preparer = self._preparer_of(value.get("model"))
            return preparer, preparer.parse(body, value)

        preparer, ask = await self._tokenizing.run(parse, client)
        pool = self._tokenizing if ask.structured_by is None else self._constraining
        try:
            return await pool.run(lambda: prepare(preparer, ask=ask), client)
        except asyncio.CancelledError:
            ask.is_left.set()
            raise

    def client_of(self, scope: Scope) -> str:
        """A client is an API key, if the server has several; else all are one."""
        return hashlib.sha256(key_of(scope) or b"").hexdigest() if self._num_keys > 1 else ""

    async def answer(self, answer: Answer, client: str, send: Send) -> None:
        ask = answer.ask
        answer.ticket = self._model.submit(answer.jobs, client, ask.body.priority)
        try:
            if ask.scores:
                most = max(ask.scores.values())
                answer.scored = await self._model.score(answer.prompt_ids, most, client)
            if ask.body.stream:
                await _send_stream(answer_events(answer), send)
            else:
                written = partial(json_text, await whole_answer(answer), ensure_ascii=False, separators=(",", ":"))
                await send_whole(Response(await asyncio.to_thread(written), media_type="application/json"), send)
        finally:
            self._model.close(answer.ticket)

    async def answer_race(self, race: Race, client: str, send: Send) -> None:
        if self._is_racing:
            raise unavailable("another race is running: try again later", _RACE_RETRY_S)
        self._is_racing = True
        try:
            async with aclosing(self._model.between_rounds(race.events(), client)) as events:
                await _send_stream(race_stream(events), send)
        finally:
            self._is_racing = False

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._model.admission.state == "ready" else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": version("outrider")})

    async def _metrics(self, request: Request) -> Response:
        content = generate_latest(self._model.metrics.registry)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list_models(self, request: Request) -> Response:
        self._model.admission.check_ready()
        return JSONResponse({"object": "list", "data": [self._card_of(name) for name in self._model.names]})

    async def _card(self, request: Request) -> Response:
        self._preparer_of(name := request.path_params["name"])
        return JSONResponse(self._card_of(name))

    def _card_of(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            "root": self._model.decoder.target.name,
            "parent": None,
            "max_model_len": self._model.capacity,
            "same_bytes": same_bytes_of(self._model.decoder),
        }

    async def _race_choices(self, request: Request) -> Response:
        return JSONResponse(choices(self._preparer_of(request.query_params.get("model"))))

    async def _tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(self._preparer_of(request.query_params.get("model")).tokenizer_info())

    def _preparer_of(self, name: Any) -> Preparer:
        """Find what prepares a request for a model of this name, None for any. Raises Refusal: not ready, or the model
        has another name. May be called from any thread."""
        self._model.admission.check_ready()
        if not isinstance(name, str | None):
            raise Refusal("model must be a string", param="model")
        if name not in (None, *self._model.names):
            message = f"unknown model {name!r:.100}: this server has {', '.join(self._model.names)}"
            raise Refusal(message, status=404, type_="NotFoundError", param="model", code="model_not_found")
        return self.preparer

    async def _json_response(
        self, make: Callable[[Preparer, Mapping[str, Any]], dict[str, Any]], request: Request
    ) -> Response:
        client = self.client_of(request.scope)

        def make_it() -> Response:
            value = parse_json(body)
            return JSONResponse(make(self._preparer_of(value.get("model")), value))

        with self._model.admission.reserve(client):
            body = await _body(request)
            return await self._tokenizing.run(make_it, client)


@dataclass(frozen=True)
class Generation:
    """An endpoint that generates: ``answer`` takes what ``prepare`` returns, and the client. (An object, not a
    function: it must see disconnects.)"""

    app: App
    body: type[GenerationBody]
    prepare: Prepare
    answer: Callable[[Any, str, Send], Coroutine[Any, Any, None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = self.app.client_of(scope)

        async def respond(sent: bytes, reserved: ExitStack) -> None:
            prepared = await self.app.prepare(self.body, self.prepare, sent, client)
            reserved.close()  # its rows are queued next, without a pause
            await self.answer(prepared, client, send)

        with ExitStack() as reserved:
            reserved.enter_context(self.app._model.admission.reserve(client))  # before the body takes memory
            sent = await _body(Request(scope, receive))
            await _until_disconnect(receive, respond(sent, reserved))


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it if the client disconnects."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _body(request: Request) -> bytes:
    """Raises Refusal: too long, or not declared as JSON, since browsers send other types across sites unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal("send the body with 'Content-Type: application/json'", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY_BYTES:
            raise Refusal(f"the body is longer than {_MOST_BODY_BYTES} bytes", status=413)
    return bytes(body)


async def _send_stream(pieces: AsyncIterator[bytes], send: Send) -> None:
    piece: bytes | None = await anext(pieces)  # before the status is sent, since it may be an error
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    while piece is not None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        piece = await anext(pieces, None)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _static(name: str) -> Callable[[Request], Awaitable[Response]]:
    kind, content = read_file(name)

    async def respond(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return respond


async def _refuse(request: Request, error: Exception) -> Response:
    return response_of(refusal_of(error), request.url.path)


async def _fail(request: Request, error: Exception) -> Response:
    """Answer an error of ours. Starlette raises it again, so that uvicorn logs it."""
    return response_of(internal_error(), request.url.path)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path:.100}"
    kind = request.url.path.removeprefix("/v1/").partition("/")[0]
    if error.status_code == 404 and kind in _OTHER_KINDS:
        message = f"{kind} are not served: this server writes text; name another server for {kind} in the client"
    type_ = "NotFoundError" if error.status_code == 404 else "invalid_request_error"
    return response_of(Refusal(message, status=error.status_code, type_=type_), request.url.path, error.headers)


async def _leave(request: Request, error: Exception) -> Response:
    """Handle a client that disconnected while sending its request; nobody reads this response."""
    return Response(status_code=400)
