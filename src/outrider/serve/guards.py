"""Guards before the routes: keys, hosts, and bodies that are sent in pieces."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections import Counter
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.race.page import PAGE
from outrider.serve import messages
from outrider.serve.http_errors import Refusal

_PIECE_BYTES = 2**16  # of a body, as many as asyncio buffers before it asks to wait
_OPEN_PATHS = {"/health", "/ping", "/metrics", "/version", *PAGE}


def in_pieces(app: ASGIApp, unsent: Callable[[], Counter[str]], client_of: Callable[[Scope], str]) -> ASGIApp:
    """Send bodies piece by piece, each when the client has read almost all before it; long ones count until then."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= _PIECE_BYTES:
                return await send(message)
            unsent()[client_of(scope)] += len(body)
            try:
                for begin in range(0, len(body), _PIECE_BYTES):
                    await send({**message, "body": body[begin : begin + _PIECE_BYTES], "more_body": True})
            finally:
                unsent()[client_of(scope)] -= len(body)
            await send({**message, "body": b""})

        await app(scope, receive, send_in_pieces)

    return respond


def with_local_hosts(app: ASGIApp) -> ASGIApp:
    """Accept only requests whose Host is a loopback name. Another site's domain may resolve to this machine (DNS
    rebinding), and its page could then read responses."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            name = ""
        if is_loopback(name):
            return await app(scope, receive, send)
        message = f"{host!r:.100} is not a name of this machine: use localhost, or an API key (--api-key)"
        await send_whole(response_of(Refusal(message, status=403, type_="permission_error"), scope["path"]), send)

    return respond


def with_keys(app: ASGIApp, api_keys: tuple[str, ...]) -> ASGIApp:
    """Accept only requests with one of the keys."""
    digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        digest = hashlib.sha256(key_of(scope) or b"").digest()
        is_open = scope["type"] != "http" or scope["path"] in _OPEN_PATHS
        # Digests have equal length, so the comparison takes the same time for all keys.
        if any([hmac.compare_digest(digest, one) for one in digests]) or is_open:
            return await app(scope, receive, send)
        message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        refusal = Refusal(message, status=401, type_="authentication_error", code="invalid_api_key")
        await send_whole(response_of(refusal, scope["path"], {"www-authenticate": "Bearer"}), send)

    return respond


def key_of(scope: Scope) -> bytes | None:
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")  # Anthropic's


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def response_of(refusal: Refusal, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """Response of a refusal, in the form of its endpoint."""
    when = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
    body = messages.error_json(refusal) if path.startswith(messages.PATH) else refusal.to_json()
    return JSONResponse(body, refusal.status, {**(headers or {}), **when})


async def send_whole(response: Response, send: Send) -> None:
    """Send a response in two messages."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
