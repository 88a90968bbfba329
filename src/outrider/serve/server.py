"""Start, wait for the end, shut down in order."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import uvicorn

from outrider.decoder import Decoder
from outrider.errors import OptionError
from outrider.serve.app import App
from outrider.serve.connections import BACKLOG, Connection
from outrider.serve.engine_thread import EngineThread
from outrider.serve.fair_queue import Turns
from outrider.serve.http_errors import unavailable
from outrider.serve.metrics import Metrics
from outrider.serve.prepare import Preparer
from outrider.serve.quota import Quota

_LOG = logging.getLogger("outrider.serve")
_TICK_S = 0.1
_KEEP_ALIVE_S = 75  # beyond the time for which clients keep idle connections, lest both ends meet in closing one
_GRACE_S = 5.0  # for errors to be sent, after those that run were given up


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server runs.

    Attributes:
        names: of the model, as clients call it.
        num_slots: rows that generate at a time.
        context_len: most tokens in a row, prompt included.
        max_queue: most rows that wait for a slot.
        max_per_client: most rows of one client, running or waiting; None is three quarters of all.
        max_connections: most connections at a time, half of them from one address.
        has_priority_across_clients: a request's ``priority`` counts beside those of other clients, too.
        queue_timeout_s: how long a request may wait for its first slot.
        api_keys: that clients may send; none lets everyone in.
        shutdown_timeout_s: how long running rows may go on after a signal to end.
    """

    names: tuple[str, ...]
    num_slots: int = 8
    context_len: int = 8192
    max_queue: int = 256
    max_per_client: int | None = None
    max_connections: int = 1024
    has_priority_across_clients: bool = False
    queue_timeout_s: float = 600.0
    api_keys: tuple[str, ...] = ()
    shutdown_timeout_s: float = 30.0


class Server:
    """A server on a socket.

    Args:
        load: makes the decoder, in the thread that will own it.
        listener: bound; the server closes it.
        on_ready: called with the worker when requests are taken.
    """

    def __init__(
        self,
        load: Callable[[], Decoder],
        options: ServerOptions,
        listener: socket.socket,
        on_ready: Callable[[EngineThread], None] = lambda worker: None,
    ) -> None:
        self._options, self._listener, self._on_ready = options, listener, on_ready
        self.worker = EngineThread(
            load,
            num_slots=options.num_slots,
            context_len=options.context_len,
            room=Quota(options.num_slots + options.max_queue, options.max_per_client),
            waiting=Turns(has_priority_across_clients=options.has_priority_across_clients),
            queue_timeout_s=options.queue_timeout_s,
            metrics=Metrics(lambda: self.worker.load, options.names[0]),
        )
        self._app = App(self.worker, options.names, options.api_keys)
        config = uvicorn.Config(
            self._app.asgi,
            http=partial(Connection, most=options.max_connections),  # type: ignore[arg-type]
            backlog=BACKLOG,
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
        """Until SIGTERM, SIGINT, or ``stop``.

        Raises:
            OutriderError, Exception: why the models could not be loaded, or the engine failed.
        """
        try:
            asyncio.run(self._run())
        finally:
            self._app.close()
            self.worker.join(_GRACE_S)  # a thread that computes while Python ends may crash
        if self.worker.error is not None:
            raise self.worker.error

    @property
    def connections(self) -> Collection[object]:
        """Those that are open."""
        return self._uvicorn.server_state.connections

    def stop(self) -> None:
        """Shut down in order. May be called from any thread."""
        self._uvicorn.should_exit = True

    async def _run(self) -> None:
        self.worker.start(self._set_ready, self.stop)
        draining = asyncio.create_task(self._drain())
        try:
            await self._uvicorn.serve([self._listener])
        finally:
            draining.cancel()
            self.worker.stop()

    def _set_ready(self) -> None:
        worker = self.worker
        self._app.preparer = Preparer(
            worker.decoder,
            worker.capacity,
            worker.schedule.max_k,
            worker.most_rows,
            self._options.names,
            worker.fingerprint,
        )
        self._on_ready(worker)

    async def _drain(self) -> None:
        """After a signal to end: no new requests; those that run may finish in time."""
        while not self._uvicorn.should_exit:
            await asyncio.sleep(_TICK_S)
        self.worker.drain()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._options.shutdown_timeout_s
        while self.worker.num_open and loop.time() < end_s:
            await asyncio.sleep(_TICK_S)
        if self.worker.num_open:
            _LOG.warning("%d texts did not end in time, and are given up", self.worker.num_open)
        self.worker.abort(unavailable("the server is shutting down", 1))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Port 0 takes a free one.

    Raises:
        OptionError
    """
    try:
        if not 0 <= port < 2**16:
            raise OSError("ports are numbers below 65536")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol, since asyncio turns Nagle's algorithm off only for sockets that say that they are TCP; left
        # on, it holds every answer up for 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one, like a..b
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError("--host, --port", f"{host}:{port}", f"{reason}: choose another address or port") from None
