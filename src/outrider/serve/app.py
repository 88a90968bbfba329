"""Routes, authentication, and errors in OpenAI's format.

Source: OpenAI's API reference; ``/tokenize``, ``/detokenize``, ``/version`` and ``max_model_len`` as vLLM has them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.race.page import HEADERS, PAGE, read_file
from outrider.serve import messages
from outrider.serve.fair_threads import FairThreads
from outrider.serve.http_errors import Refusal, internal_error, refusal_of, unavailable
from outrider.serve.image_fetch import ImageFetcher
from outrider.serve.model_names import check_name, model_card
from outrider.serve.pending import Ticket
from outrider.serve.prepare import Parsed, Preparer
from outrider.serve.protocol import parse_body
from outrider.serve.race import Race, choices, parse_race, streamed_race
from outrider.serve.responses_answer import streamed_response, whole_response
from outrider.serve.served_model import ServedModel
from outrider.serve.streaming import PreparedRequest, ended, streamed, until_disconnect, whole

_MOST_BODY_BYTES = 4 * 2**20
_NUM_TOKENIZING, _NUM_CONSTRAINING, _NUM_FETCHING = 2, 2, 8  # threads
_MOST_RACES, _RACE_RETRY_S = 16, 10  # running or waiting; more are refused
_OWN_HOSTS = ["localhost", "127.0.0.1", "[::1]"]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
Parse = Callable[[Preparer, Mapping[str, Any]], Parsed]
_OPEN_PATHS = {"/health", "/ping", "/metrics", "/version", *PAGE}


class App:
    """ASGI application."""

    _preparer: Preparer

    def __init__(self, model: ServedModel, api_keys: tuple[str, ...], image_hosts: tuple[str, ...] = ()) -> None:
        self._model, self._num_keys = model, len(api_keys)
        self._created = int(time.time())
        self._num_races = 0
        self._tokenizing = FairThreads(_NUM_TOKENIZING, "outrider-tokenizer")
        self._constraining = FairThreads(_NUM_CONSTRAINING, "outrider-constraints")
        self._fetching = FairThreads(_NUM_FETCHING, "outrider-images")
        self._images = ImageFetcher(image_hosts)
        self._registry = CollectorRegistry()
        self._registry.register(model.metrics)
        generation = [
            ("/v1/completions", Generation(self, Preparer.completions, self.answer)),
            ("/v1/chat/completions", Generation(self, Preparer.chat, self.answer)),
            ("/v1/responses", Generation(self, Preparer.responses, self.answer_response)),
            (messages.PATH, Generation(self, Preparer.messages, self.answer_response)),
            ("/v1/race", Generation(self, parse_race, self.answer_race)),
        ]
        others = [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._card),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/health", self._health),
            Route("/ping", self._health),
            Route("/metrics", self._metrics),
            Route("/version", self._version),
            Route("/v1/race/choices", self._race_choices),
            *(Route(path, _static(name)) for path, name in PAGE.items()),
        ]
        self.asgi: ASGIApp = Starlette(
            routes=[Route(path, endpoint, methods=["POST"]) for path, endpoint in generation] + others,
            # Without a key: another site's domain may resolve to this machine (DNS rebinding), and its page could then
            # read responses.
            middleware=[
                Middleware(KeyGuard, api_keys=api_keys)
                if api_keys
                else Middleware(TrustedHostMiddleware, allowed_hosts=_OWN_HOSTS, www_redirect=False)
            ],
            exception_handlers={
                Refusal: _refuse,
                OutriderError: _refuse,
                HTTPException: _refuse_http,
                ClientDisconnect: _leave,
                Exception: _fail,
            },
        )

    def open(self, preparer: Preparer) -> None:
        """Take what prepares requests, once the model is loaded."""
        self._preparer = preparer

    def close(self) -> None:
        self._tokenizing.close()
        self._constraining.close()
        self._fetching.close()

    async def prepare(self, parse: Parse, body: bytes, client: str) -> Any:
        """Prepare a request off the event loop, while it counts as queued. Constraints, which may take seconds to
        parse, and images, whose hosts may be slow, have threads of their own. Raises Refusal."""

        def parse_it() -> Parsed:
            value = parse_body(body)
            return parse(self._preparer_of(value.get("model")), value)

        with self._model.reserve(client):
            parsed = await self._tokenizing.run(parse_it, client)
            if urls := self._images.urls_of(parsed.ask.prompts):
                parsed.ask.fetched.update(await self._fetching.run(lambda: self._images.fetch(urls), client))
            pool = self._tokenizing if parsed.ask.structured_by is None else self._constraining
            return await pool.run(parsed.prepare, client)

    def client_of(self, scope: Scope) -> str:
        """Identify a client: by its API key if the server has several, else by its address and the key it sent, if
        any."""
        digest = hashlib.sha256(_key_of(scope) or b"").hexdigest()
        if self._num_keys > 1:
            return digest
        host, _ = scope.get("client") or ("", 0)
        return f"{network_of(host)} {digest}"

    async def answer(self, prepared: PreparedRequest, client: str, send: Send) -> None:
        await self._answer(prepared, client, send, whole, streamed)

    async def answer_response(self, prepared: PreparedRequest, client: str, send: Send) -> None:
        await self._answer(prepared, client, send, whole_response, streamed_response)

    async def _answer(
        self,
        prepared: PreparedRequest,
        client: str,
        send: Send,
        in_one_piece: Callable[[PreparedRequest, Ticket], dict[str, Any]],
        as_events: Callable[[PreparedRequest, Ticket], AsyncIterator[bytes]],
    ) -> None:
        ask = prepared.ask
        ticket = self._model.submit(prepared.jobs, client, ask.priority)
        try:
            if ask.scores:
                ticket.scored = await self._model.score(prepared.prompt_ids, max(ask.scores.values()), client)
            if not ask.is_stream:
                await ended(prepared, ticket)
                await _send(await asyncio.to_thread(lambda: JSONResponse(in_one_piece(prepared, ticket))), send)
                return
            await _send_stream(as_events(prepared, ticket), send)
        finally:
            self._model.close(ticket)

    async def answer_race(self, race: Race, client: str, send: Send) -> None:
        if self._num_races >= _MOST_RACES:
            raise unavailable(f"{self._num_races} races are running or waiting: try again later", _RACE_RETRY_S)
        self._num_races += 1
        try:
            async with aclosing(self._model.between_rounds(race.events(), client, is_alone=True)) as events:
                await _send_stream(streamed_race(events), send)
        finally:
            self._num_races -= 1

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._model.admission.state == "ready" else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": version("outrider")})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list_models(self, request: Request) -> Response:
        self._model.admission.check_ready()
        cards = [model_card(self._model, name, self._created) for name in self._model.names]
        return JSONResponse({"object": "list", "data": cards})

    async def _card(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(model_card(self._preparer_of(name).model, name, self._created))

    async def _race_choices(self, request: Request) -> Response:
        return JSONResponse(choices(self._preparer_of(request.query_params.get("model"))))

    async def _tokenize(self, request: Request) -> Response:
        return await self._json_response(Preparer.tokenize, request)

    async def _tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(self._preparer_of(request.query_params.get("model")).tokenizer_info())

    async def _detokenize(self, request: Request) -> Response:
        return await self._json_response(Preparer.detokenize, request)

    def _preparer_of(self, name: Any) -> Preparer:
        """Find what prepares a request. May be called from any thread.

        Args:
            name: the model that the request asks for; None for any.

        Raises:
            Refusal: not ready, or the model has another name.
        """
        self._model.admission.check_ready()
        check_name(name, self._model.names)
        return self._preparer

    async def _json_response(
        self, make: Callable[[Preparer, Mapping[str, Any]], dict[str, Any]], request: Request
    ) -> Response:
        body, client = await _body(request), self.client_of(request.scope)

        def make_it() -> dict[str, Any]:
            value = parse_body(body)
            return make(self._preparer_of(value.get("model")), value)

        with self._model.reserve(client):
            return JSONResponse(await self._tokenizing.run(make_it, client))


class Generation:
    """An endpoint that generates. (An object, not a function: it must see disconnects.)"""

    def __init__(
        self,
        app: App,
        parse: Parse,
        answer: Callable[[Any, str, Send], Coroutine[Any, Any, None]],
    ) -> None:
        """
        Args:
            answer: takes what ``parse`` has prepared, and the client.
        """
        self._app, self._parse, self._answer = app, parse, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(Request(scope, receive))
        await until_disconnect(receive, self._respond(body, self._app.client_of(scope), send))

    async def _respond(self, body: bytes, client: str, send: Send) -> None:
        prepared = await self._app.prepare(self._parse, body, client)
        await self._answer(prepared, client, send)


class KeyGuard:
    """Accept only requests with one of the keys."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app, self._digests = app, [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            digest = hashlib.sha256(_key_of(scope) or b"").digest()
            # Digests have equal length, so the comparison takes the same time for all keys.
            if not any([hmac.compare_digest(digest, one) for one in self._digests]):
                message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
                refusal = Refusal(message, status=401, type_="authentication_error", code="invalid_api_key")
                await _send(_response(refusal, scope["path"], {"www-authenticate": "Bearer"}), send)
                return
        await self._app(scope, receive, send)


def _key_of(scope: Scope) -> bytes | None:
    """Key sent with a request."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")  # Anthropic's


def is_loopback(host: str) -> bool:
    """Whether a name or an address is loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def network_of(address: str) -> str:
    """Network prefix that belongs to one client: the first 64 bits of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


async def _body(request: Request) -> bytes:
    """Read a JSON body. Raises Refusal if it is too long or not declared as JSON: browsers send other types across
    sites without asking."""
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
    piece = await anext(pieces)  # before the status is sent, since it may be an error
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    await send({"type": "http.response.body", "body": piece, "more_body": True})
    async for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(response: Response, send: Send) -> None:
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def _static(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Endpoint that serves a file of the page."""
    kind, content = read_file(name)

    async def respond(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return respond


def _response(refusal: Refusal, path: str, headers: Mapping[str, str] | None = None) -> Response:
    when = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
    body = messages.error_json(refusal) if path == messages.PATH else refusal.to_json()
    return JSONResponse(body, refusal.status, {**(headers or {}), **when})


async def _refuse(request: Request, error: Exception) -> Response:
    return _response(refusal_of(error), request.url.path)


async def _fail(request: Request, error: Exception) -> Response:
    """Answer an error of ours. Starlette raises it again, so that uvicorn logs it."""
    return _response(internal_error(), request.url.path)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path:.100}"
    type_ = "NotFoundError" if error.status_code == 404 else "invalid_request_error"
    return _response(Refusal(message, status=error.status_code, type_=type_), request.url.path, error.headers)


async def _leave(request: Request, error: Exception) -> Response:
    """Handle a client that disconnected while sending its request; nobody reads this response."""
    return Response(status_code=400)
