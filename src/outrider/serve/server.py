"""Server lifecycle: start, serve, shut down gracefully."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import uvicorn

from outrider.errors import OptionError
from outrider.serve.app import App
from outrider.serve.http_errors import unavailable
from outrider.serve.prepare import Preparer
from outrider.serve.served_model import LoadDecoder, ServedModel, ServerOptions
from outrider.text.thinking import thinking_of
from outrider.text.tool_formats import tool_format_of

_LOG = logging.getLogger("outrider.serve")
_TICK_S = 0.1
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that clients close first
_STALL_S = 75.0  # for a head, for all of a body, and without a byte that is read
_Seen = dict[Any, tuple[object, float]]
_OTHER_FILES = 128  # open files beside connections: of models and the log, and connections being refused
_GRACE_S = 5.0  # to send errors after running requests are cancelled


class Server:
    """HTTP server on a bound socket, which it closes; ``on_ready`` is called when requests are accepted. The rest: see
    ``ServedModel``."""

    def __init__(
        self,
        names: Sequence[str],
        load: LoadDecoder,
        options: ServerOptions,
        listener: socket.socket,
        on_ready: Callable[[ServedModel], None] = lambda model: None,
    ) -> None:
        self._options, self._listener, self._on_ready = options, listener, on_ready
        self.model = ServedModel(names, load, options)
        self._app = App(self.model, options.api_keys)
        config = uvicorn.Config(
            self._app.asgi,
            http="h11",
            limit_concurrency=room_for_connections(options.max_connections),
            lifespan="off",
            log_config=None,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            access_log=False,
            timeout_graceful_shutdown=int(options.shutdown_timeout_s + _GRACE_S) + 1,
            server_header=False,
        )
        self._uvicorn = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or ``stop``. Raises OutriderError, Exception: loading the model or the engine
        failed."""
        try:
            asyncio.run(self._run())
        finally:
            self._app.close()
            self.model.session.join(_GRACE_S)  # a thread that still computes at exit may crash
        if self.model.error is not None:
            raise self.model.error

    def stop(self) -> None:
        """Shut down gracefully. May be called from any thread."""
        self._uvicorn.should_exit = True

    async def _run(self) -> None:
        self.model.start(self._set_ready, self.stop)
        draining = asyncio.create_task(self._drain())
        try:
            await self._uvicorn.serve([self._listener])
        finally:
            draining.cancel()
            self.model.session.stop()

    def _set_ready(self) -> None:
        options, tokenizer = self._options, self.model.decoder.tokenizer
        tool_format = tool_format_of(tokenizer, options.tool_parser)
        self._app.preparer = Preparer(self.model, tool_format, thinking_of(tokenizer, options.reasoning_parser))
        self._on_ready(self.model)

    async def _tick(self) -> None:
        await asyncio.sleep(_TICK_S)
        self.model.time_out()

    async def _drain(self) -> None:
        """Close stalled connections. After a shutdown signal refuse new requests; running ones may finish in time."""
        loop, seen = asyncio.get_running_loop(), _Seen()
        while not self._uvicorn.should_exit:
            await self._tick()
            seen = close_stalled(self._uvicorn.server_state.connections, seen, loop.time())
        self.model.drain()
        end_s = loop.time() + self._options.shutdown_timeout_s
        while self.model.admission.num_open and loop.time() < end_s:
            await self._tick()
        if self.model.admission.num_open:
            _LOG.warning("%d requests did not end in time and are cancelled", self.model.admission.num_open)
        self.model.abort(unavailable("the server is shutting down", 1))


def close_stalled(connections: Iterable[Any], seen: _Seen, now_s: float) -> _Seen:
    """Close connections that have waited too long for their client: for a head, all the rest of a body, or a reader,
    since uvicorn limits none of these times. Takes and returns the waiting ones, each with its state and since when."""
    found: _Seen = {}
    for one in list(connections):
        cycle = one.cycle  # of the latest request
        if cycle is None or cycle.response_complete or cycle.more_body or one.flow.write_paused:
            state = (cycle, one.transport.get_write_buffer_size())
            old, since_s = seen.get(one, (None, now_s))
            found[one] = (state, since_s if old == state else now_s)
            if now_s - found[one][1] > _STALL_S:
                one.transport.abort()
    return found


def room_for_connections(most: int) -> int:
    """Number of connections, at most ``most``, that fit beside other open files. Raises the soft limit if needed."""
    if sys.platform == "win32":
        return most
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = most + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < need:
            most = max(soft - _OTHER_FILES, 2)
            _LOG.warning("%d files may be open (ulimit -n): at most %d connections", soft, most)
    return most


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Port 0 takes a free one. Raises OptionError."""
    try:
        if not 0 <= port < 2**16:
            raise OSError("ports are numbers below 65536")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The protocol is named because asyncio sets TCP_NODELAY only on sockets that declare TCP; without it every
        # response takes 40 ms more.
        with ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            on_error.pop_all()
        return listener
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible name, like a..b
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError("--host, --port", f"{host}:{port}", f"{reason}: choose another address or port") from None
