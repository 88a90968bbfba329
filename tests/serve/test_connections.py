"""Connections that say nothing, are too many, or have closed their half; and the log about them."""

import json
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from servers import LIMIT_S, Running, as_sent, is_free, running, wait_until, words

from outrider.serve import connections, log_limit
from outrider.serve.connections import network_of, room_for_connections
from outrider.serve.log_limit import RateLimitFilter

SHORT = {"prompt": "w1", "max_tokens": 3, "seed": 1}
LONG = {"prompt": "w1", "max_tokens": 900_000, "seed": 1}
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: local"


@pytest.fixture
def server() -> Iterator[Running]:
    with running(words(1_000_000), num_slots=2, context_len=1_000_000, max_connections=20) as one:
        yield one


def connect(server: Running, source: str = "127.0.0.1") -> socket.socket:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    return socket.create_connection(address, LIMIT_S, source_address=(source, 0))


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def is_closed(connection: socket.socket) -> bool:
    """Waits for the other end to close it, behind whatever it has sent."""
    with suppress(ConnectionResetError):
        read_all(connection)
    return True


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (HALF_A_HEAD, b""),
        (b"GET /health HTTP/1.1\r\n", b""),
        (as_sent(SHORT) + HALF_A_HEAD, b'"choices"'),
        # Each byte of a body after its answer would begin the time for idle connections again.
        (b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n", b"HTTP/1.1 405"),
    ],
)
def test_a_head_that_does_not_come(
    server: Running, sent: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first, and after an answer."""
    monkeypatch.setattr(connections, "_HEAD_S", 0.2)
    with connect(server) as connection:
        connection.sendall(sent)
        if answer:
            while answer not in connection.recv(65536):
                pass
            connection.sendall(b"x")
        assert is_closed(connection)


def test_idle_connections_make_room(server: Running) -> None:
    """More than one address may have, and more than all may; the ones that wait longest are closed, and nobody else."""
    with ExitStack() as stack, server.http() as http:
        busy = stack.enter_context(connect(server))
        busy.sendall(as_sent(LONG | {"stream": True}))
        assert busy.recv(100).startswith(b"HTTP/1.1 200")
        assert http.get("/health").status_code == 200  # an idle one that has been of use
        idle = []
        for index in range(60):
            idle.append(stack.enter_context(connect(server, f"127.0.0.{index % 3 + 1}")))
            idle[-1].sendall(HALF_A_HEAD if index % 2 else b"")
        for connection in idle[:40]:
            assert is_closed(connection)
        for _ in range(5):
            with server.http() as new:
                assert new.post("/v1/completions", json=SHORT).status_code == 200
        assert http.get("/health").status_code == 200
        assert busy.recv(100)
        assert server.metric("outrider:num_requests_running") == 1
    wait_until(lambda: is_free(server))


def test_connections_beyond_the_limit_that_are_all_busy(server: Running) -> None:
    """A new one is closed, and those that are served go on."""
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(server)) for _ in range(10)]
        for connection in busy:
            connection.sendall(as_sent(LONG | {"stream": True}))
        wait_until(lambda: server.num_open == 10)
        assert is_closed(stack.enter_context(connect(server)))
        other = stack.enter_context(connect(server, "127.0.0.2"))
        other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 200")
        assert server.num_open == 10
    wait_until(lambda: server.num_open == 0)


@pytest.mark.parametrize(("more", "num_requests"), [({}, 1), ({"stream": True}, 1), ({}, 3)])
def test_a_client_that_closes_its_half_gets_its_answer(server: Running, more: dict, num_requests: int) -> None:
    """To all requests before."""
    with connect(server) as connection:
        connection.sendall(as_sent(SHORT | more | {"max_tokens": 100}) * num_requests)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200") == answer.count(b'"length"') == num_requests


def test_a_client_that_closes_its_half_and_goes(server: Running) -> None:
    """While it waits for a whole answer, in which nothing is sent to it."""
    connection = connect(server)
    connection.sendall(as_sent(LONG))
    connection.shutdown(socket.SHUT_WR)
    wait_until(lambda: server.metric("outrider:num_requests_running") == 1)
    connection.close()
    wait_until(lambda: is_free(server))


@pytest.mark.parametrize("kind", ["close", "keep-alive"])
def test_an_answer_that_nobody_reads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is given up, although closing would wait for the reader."""
    monkeypatch.setattr("outrider.serve.server._KEEP_ALIVE_S", 0.2)
    with running(words(4096), context_len=4096) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        body = SHORT | {"max_tokens": 150, "logprobs": 20}
        slow.sendall(as_sent(body).replace(b"Host:", f"Connection: {kind}\r\nHost:".encode(), 1))
        held = server.server.connections
        wait_until(lambda: server.metric("outrider:generation_tokens_total") >= 150)
        wait_until(lambda: not held)


def test_one_client_of_ipv6_has_many_addresses() -> None:
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::1%eth0") == "2001:db8:1:2::/64"
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("a name") == "a name"


def test_connections_are_fewer_than_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits = [(256, 256)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, given: limits.append(given))
    assert room_for_connections(1024) == 128 and "ulimit" in caplog.text
    limits.append((256, resource.RLIM_INFINITY))
    assert room_for_connections(1024) == 1024
    assert limits[-1] == (1152, resource.RLIM_INFINITY)


def test_a_client_cannot_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few warnings of each kind are logged; the next line counts those that were left out."""
    now = [100.0]
    monkeypatch.setattr(log_limit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    few, passed = RateLimitFilter(), []

    def send(level: int, message: str, *arguments: object) -> None:
        record = logging.LogRecord("x", level, __file__, 1, message, arguments, None)
        if few.filter(record):
            passed.append(record.getMessage())

    for i in range(12):
        send(logging.WARNING, "100%% of %d", i)
        send(logging.INFO, "told")
    send(logging.ERROR, "another")
    now[0] += 61
    send(logging.WARNING, "100%% of %d", 99)
    assert passed.count("told") == 12 and passed[-2:] == ["another", "100% of 99 (and 7 more like it)"]
    assert [one for one in passed if one.startswith("100%")] == [f"100% of {i}" for i in range(5)] + passed[-1:]


def test_a_client_that_leaves_before_its_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server need not wait for it when it ends."""
    may_parse, is_parsing = threading.Event(), threading.Event()

    def parse_late(body: bytes) -> dict:
        is_parsing.set()
        assert may_parse.wait(LIMIT_S)
        return json.loads(body)

    try:
        with running(words(), shutdown_timeout_s=10 * LIMIT_S) as server:
            monkeypatch.setattr("outrider.serve.app.parse_body", parse_late)
            with connect(server) as connection:
                connection.sendall(as_sent(SHORT))
                assert is_parsing.wait(LIMIT_S)
    finally:
        may_parse.set()
