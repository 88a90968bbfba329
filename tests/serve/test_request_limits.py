"""Requests whose reading costs much more than their bytes are bounded, and not read for clients that have left; long
answers are written in pieces."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import LIMIT_S, Running, as_sent, running, wait_until

from outrider.serve import body as reader
from outrider.serve.answers import json_text
from outrider.serve.http_errors import Refusal
from outrider.serve.prepare import Preparer
from pairs import embedded


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(embedded(), context_len=128, num_slots=2) as one:
        yield one


def test_nothing_is_read_for_clients_that_have_left(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    inner: Callable[..., Any] = Preparer.token_ids
    read: list[str] = []

    def slow(self: Preparer, prompt: str, *more: Any) -> Any:
        read.append(prompt)
        begun.set()
        assert prompt == "B" or go_on.wait(LIMIT_S)
        return inner(self, prompt, *more)

    monkeypatch.setattr(Preparer, "token_ids", slow)
    with socket.create_connection(server.listener.getsockname()) as client:
        client.sendall(as_sent({"prompt": ["A"] * 8, "max_tokens": 2}))
        assert begun.wait(LIMIT_S)
    wait_until(lambda: not server.model.admission._reserved)
    go_on.set()
    threads = server.server._app._tokenizing
    wait_until(lambda: not threads._running)
    with server.http() as http:
        http.post("/v1/completions", json={"prompt": "B", "max_tokens": 2}).raise_for_status()
    assert read == ["A", "B"]


def test_a_body_of_many_parts_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in strings are no parts."""
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


def test_long_answers_are_written_in_pieces(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no more than some hundred items: the encoder holds the interpreter."""
    value = {"a": [], "b": {}, "c": [{"d": [[i, {"e": None}] for i in range(n)]} for n in (0, 1, 250)], "ü": "\u2028"}
    for options in ({}, {"ensure_ascii": False, "separators": (",", ":")}):
        assert json_text(value, **options) == json.dumps(value, **options)
    longest, encode = [0], json.JSONEncoder.encode

    def watched(self: json.JSONEncoder, given: Any) -> str:
        text = encode(self, given)
        longest[0] = max(longest[0], len(text))
        return text

    monkeypatch.setattr(json.JSONEncoder, "encode", watched)
    body = json.dumps({"prompt": [[7] * 120] * 8, "max_tokens": 1, "echo": True, "logprobs": 9, "prompt_logprobs": 20})
    with server.http() as http:
        sent = {"content": body, "headers": {"content-type": "application/json"}}
        assert len(http.post("/v1/completions", **sent).raise_for_status().content) > 6 * longest[0]
