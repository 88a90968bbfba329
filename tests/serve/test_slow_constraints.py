"""Constraints of hostile clients: what takes too long to read holds up nobody."""

import contextlib
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from servers import LIMIT_S, Running, as_sent, running, wait_until

from outrider.text import structure
from pairs import embedded

SLOW = {"type": "string", "allOf": [{"pattern": f".*a{i}.*b{i}.*"} for i in range(30)]}
HOSTILE = {"prompt": "A", "max_tokens": 4, "guided_json": SLOW}
ORDINARY = {"prompt": "A", "max_tokens": 4}
ONE = {"authorization": "Bearer one"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(embedded(), context_len=128, api_keys=("one", "another", "other")) as one:
        yield one


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    structure._can_be_read.cache_clear()


def readings() -> list[psutil.Process]:
    """Processes of ours that read a constraint."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if any("llguidance" in word for word in process.cmdline()) else []
    return found


@pytest.fixture
def without_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No limit ends a reading within the test."""
    for name in ("_MOST_CHECK_S", "_MOST_CPU_S"):
        monkeypatch.setattr(structure, name, int(10 * LIMIT_S))
    yield
    monkeypatch.undo()
    deadline = time.monotonic() + LIMIT_S
    while (left := readings()) or time.monotonic() < deadline - LIMIT_S + 1:  # the next of a client may begin
        assert time.monotonic() < deadline
        for process in left:
            process.kill()
        time.sleep(0.05)


def test_ordinary_requests_do_not_wait_for_slow_constraints(server: Running, without_end: None) -> None:
    others = {"authorization": "Bearer other"}
    with contextlib.ExitStack() as stack, server.http() as http:
        for _ in range(3):
            client = stack.enter_context(socket.create_connection(server.listener.getsockname(), LIMIT_S))
            client.sendall(as_sent(HOSTILE, "/v1/completions", "Authorization: Bearer one"))
        wait_until(lambda: len(readings()) == 1)
        http.post("/v1/completions", json=ORDINARY | {"guided_regex": " [a-z]+"}, headers=others).raise_for_status()
        client = stack.enter_context(socket.create_connection(server.listener.getsockname(), LIMIT_S))
        client.sendall(as_sent(HOSTILE, "/v1/race", "Authorization: Bearer another"))
        wait_until(lambda: len(readings()) == 2)
        http.post("/v1/completions", json=ORDINARY, headers=others).raise_for_status()
        http.post("/tokenize", json={"prompt": "A"}, headers=others).raise_for_status()
        assert len(readings()) == 2


def test_a_machine_that_is_too_busy(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = ORDINARY | {"guided_regex": " [a-c]+"}
    with server.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(structure, "_MOST_CHECK_S", 0.0)
            response = http.post("/v1/completions", json=body, headers=ONE)
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        http.post("/v1/completions", json=body, headers=ONE).raise_for_status()
