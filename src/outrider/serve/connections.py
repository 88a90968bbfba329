"""Connection limits: how many are open, how long a request's head may take, and half-closed clients.

uvicorn limits neither the number of connections nor the time for a request's head, only the time between requests. And
it takes a half-closed connection for a closed one.

Sources: RFC 9112, 9.5 and 9.6 (timeouts; half-closed connections); RFC 9110, 15.2 (clients skip responses of status
1xx).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_LOG = logging.getLogger("outrider.serve")
_HEAD_S = 10.0  # for a request's head, from its first byte or from connecting
_FIRST_PROBE_S, _MOST_PROBE_S = 0.25, 15.0  # between checks whether a half-closed client still reads
BACKLOG = 64  # listen backlog: asyncio accepts this many before any is counted
_OTHER_FILES = 64 + BACKLOG  # of models and the log, and connections being refused


class Connection(H11Protocol):
    """One connection.

    Args:
        most: maximum number of connections. Beyond it, and beyond half of it from one address, the connection that
            has waited longest for its client is closed.
        more: arguments from uvicorn.
    """

    def __init__(self, *, most: int, **more: Any) -> None:
        super().__init__(**more)
        self._most, self._most_of_one = most, max(most // 2, 1)
        self._address = ""
        self._is_half_closed = self._is_dropped = False
        self._since_s = 0.0  # when the server began to wait for the client
        self._num_unread: int | None = None  # bytes not yet read by the client at the last check
        self._head_task: asyncio.TimerHandle | None = None
        self._probe_task: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = network_of(self.client[0]) if self.client else ""
        self._since_s = self.loop.time()
        self._time_head()
        everyone = [one for one in self.connections if isinstance(one, Connection) and not one._is_dropped]
        same = [one for one in everyone if one._address == self._address]
        if len(same) > self._most_of_one:
            self._make_room(same)
        elif len(everyone) > self._most:
            self._make_room(everyone)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle a half-closed client. It may still read; only sending shows whether it has gone."""
        if self._is_between_requests or self.cycle.more_body:
            return False
        self._is_half_closed = True
        self._probe(_FIRST_PROBE_S)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for task in (self._head_task, self._probe_task, self.timeout_keep_alive_task):
            if task is not None:
                task.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._since_s, self._num_unread = self.loop.time(), None
        super().on_response_complete()  # starts the next request if it has arrived
        if self._is_half_closed and self._is_between_requests:
            self.transport.close()
        if self.transport.is_closing() and self.timeout_keep_alive_task is None:
            self._time_reading()

    def timeout_keep_alive_handler(self) -> None:
        """Abort instead of closing: closing waits until the client has read everything, perhaps forever."""
        num_unread, num_before = self.transport.get_write_buffer_size(), self._num_unread
        if num_unread == 0:
            super().timeout_keep_alive_handler()
        elif num_before is None or num_unread < num_before:
            self._num_unread = num_unread
            self._time_reading()
        else:
            self.transport.abort()

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _time_reading(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _time_head(self) -> None:
        is_due = self._is_between_requests and self.timeout_keep_alive_task is None
        if not is_due and self._head_task is not None:
            self._head_task.cancel()
            self._head_task = None
        elif is_due and self._head_task is None:
            self._head_task = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _make_room(self, connections: list[Connection]) -> None:
        """Close a connection that waits for its client, preferably one that never made a request; this one if none
        waits."""
        _LOG.warning("too many connections: closing those that have been idle longest")
        waiting = [one for one in connections if one is not self and (one._is_between_requests or one.cycle.more_body)]
        dropped = min(waiting, key=lambda one: (one.cycle is not None, one._since_s), default=self)
        dropped._is_dropped = True
        dropped.transport.abort()

    def _probe(self, pause_s: float) -> None:
        """Send a response that clients skip. If the client has gone, the next probe finds the connection lost."""
        if self._is_between_requests or self.transport.is_closing():
            return
        if self.scope["http_version"] == "1.1" and not self.cycle.response_started:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        self._probe_task = self.loop.call_later(pause_s, self._probe, min(2 * pause_s, _MOST_PROBE_S))


def network_of(address: str) -> str:
    """Network prefix that belongs to one client: the first 64 bits of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


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
            _LOG.warning("%d files may be open (ulimit -n): at most %d connections", soft, max(soft - _OTHER_FILES, 2))
            return max(soft - _OTHER_FILES, 2)
    return most
