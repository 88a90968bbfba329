"""Requests and constraints whose reading costs much more than their bytes: they hold up nobody."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from servers import LIMIT_S, Running, as_sent, running, wait_until

from outrider.serve import body as reader
from outrider.serve.answers import json_text
from outrider.serve.http_errors import Refusal
from outrider.serve.prepare import Preparer
from outrider.text import structure
from pairs import embedded


def test_nothing_is_read_for_clients_that_have_left(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    inner, read = Preparer.token_ids, list[str]()

    def slow(self: Preparer, prompt: str, *more: Any) -> Any:
        read.append(prompt)
        begun.set()
        assert prompt == "B" or go_on.wait(LIMIT_S)
        return inner(self, prompt, *more)

    monkeypatch.setattr(Preparer, "token_ids", slow)
    with socket.create_connection(server.listener.getsockname()) as client:
        client.sendall(as_sent({"prompt": ["A"] * 2, "max_tokens": 2}))
        assert begun.wait(LIMIT_S)
    wait_until(lambda: not server.model.admission._reserved)
    go_on.set()
    wait_until(lambda: not server.server._app._tokenizing._running)
    with server.http() as http:
        http.post("/v1/completions", json={"prompt": "B", "max_tokens": 2}).raise_for_status()
    assert read == ["A", "B"]


def test_long_answers_are_written_as_json_is() -> None:
    value = {"a": [], "b": {}, "c": [{"d": [[i, {"e": None}] for i in range(n)]} for n in (0, 1, 250)], "ü": "\u2028"}
    for options in ({}, {"ensure_ascii": False, "separators": (",", ":")}):
        assert json_text(value, **options) == json.dumps(value, **options)


def test_a_body_of_many_parts_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"prompt": '[{"a": 1}, \\' * 100_000 + "[[["}
    assert reader.parse_json(json.dumps(texts).encode()) == texts
    monkeypatch.setattr(reader, "from_json", None)
    many = 300_000
    for body in (
        "{" + ",".join(f'"f{i}":0' for i in range(many)) + "}",
        '{"prompt": "\\"", "a": [' + ",".join(["{}"] * many) + "]}",
        '{"a": "' + '\\"' * 100_000 + '", "b": ' + "[" * many,
    ):
        with pytest.raises(Refusal, match="more than 278528 names, lists and objects: send fewer"):
            reader.parse_json(body.encode())


SLOW = {"type": "string", "allOf": [{"pattern": f".*a{i}.*b{i}.*"} for i in range(30)]}
HOSTILE = {"prompt": "A", "max_tokens": 4, "guided_json": SLOW}
ORDINARY = {"prompt": "A", "max_tokens": 4}
ONE = {"authorization": "Bearer one"}


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with running(embedded(), context_len=128, api_keys=("one", "another", "other")) as one:
        yield one


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    structure._can_be_read.cache_clear()


def readings() -> list[psutil.Process]:
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


def test_ordinary_requests_do_not_wait_for_slow_constraints(keyed: Running, without_end: None) -> None:
    others = {"authorization": "Bearer other"}
    with contextlib.ExitStack() as stack, keyed.http() as http:
        for _ in range(3):
            client = stack.enter_context(socket.create_connection(keyed.listener.getsockname(), LIMIT_S))
            client.sendall(as_sent(HOSTILE, "/v1/completions", "Authorization: Bearer one"))
        wait_until(lambda: len(readings()) == 1)
        http.post("/v1/completions", json=ORDINARY | {"guided_regex": " [a-z]+"}, headers=others).raise_for_status()
        client = stack.enter_context(socket.create_connection(keyed.listener.getsockname(), LIMIT_S))
        client.sendall(as_sent(HOSTILE, "/v1/race", "Authorization: Bearer another"))
        wait_until(lambda: len(readings()) == 2)
        http.post("/v1/completions", json=ORDINARY, headers=others).raise_for_status()
        http.post("/tokenize", json={"prompt": "A"}, headers=others).raise_for_status()
        assert len(readings()) == 2


def test_a_machine_that_is_too_busy(keyed: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = ORDINARY | {"guided_regex": " [a-c]+"}
    with keyed.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(structure, "_MOST_CHECK_S", 0.0)
            response = http.post("/v1/completions", json=body, headers=ONE)
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        http.post("/v1/completions", json=body, headers=ONE).raise_for_status()
