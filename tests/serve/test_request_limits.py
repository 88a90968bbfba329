"""Requests whose reading costs much more than their bytes are bounded, and not read for clients that have left; long
answers are written in pieces."""

import json
import socket
import threading
from typing import Any

import pytest
from servers import LIMIT_S, Running, as_sent, wait_until

from outrider.serve import body as reader
from outrider.serve.answers import json_text
from outrider.serve.http_errors import Refusal
from outrider.serve.prepare import Preparer


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
