"""Clients beside one another: a client is an API key, knows nothing of others, and holds nothing for ever."""

import socket
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from servers import LIMIT_S, as_sent, running, unread, wait_until, words

from outrider.serve import admission, server
from outrider.serve.prepare import Preparer

SECRET = [f"w{i}" for i in range(10, 40)]


def cached(http: httpx.Client, key: str, words: Sequence[str], **more: Any) -> int:
    path = "/v1/chat/completions" if more else "/v1/completions"
    body = {"max_tokens": 1} | (more or {"prompt": " ".join(words)})
    response = http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    found: int = response.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_the_count_of_cached_tokens_confirms_no_guess() -> None:
    with running(words(), api_keys=("alice", "bob")) as one, one.http() as http:
        assert [cached(http, "alice", SECRET) for _ in range(2)] == [0, 29]
        assert cached(http, "bob", SECRET[:20]) == cached(http, "bob", [*SECRET[:18], "w1", "w1"]) - 18 == 0
        assert cached(http, "alice", SECRET[:25]) == 24
    for keys in ((), ("alice",)):  # without several keys all are one client
        with running(words(), api_keys=keys) as one, one.http() as http:
            assert [cached(http, "alice", SECRET), cached(http, keys[0] if keys else "bob", SECRET)] == [0, 29]


def test_a_shared_prompt() -> None:
    decoder, shared = words(), " ".join(SECRET[:20])
    decoder.tokenizer.chat_template = "{% for m in messages %}w7 {{ m.content }} {% endfor %}"
    with running(decoder, api_keys=("alice", "bob"), shared_prompts=(shared,)) as one, one.http() as http:
        assert [cached(http, key, SECRET) for key in ("alice", "bob")] == [0, 20]
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": " ".join(SECRET)}]
        assert [cached(http, key, (), messages=messages) for key in ("alice", "bob")] == [0, 22]


def test_unread_answers_count_until_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there is a limit for each client, and one for all."""
    monkeypatch.setattr(admission, "_MOST_UNREAD_BYTES", 40 * 2**20)
    monkeypatch.setattr(Preparer, "detokenize", lambda self, sent: {"prompt": "w" * 30 * 2**20})
    with running(words(), num_slots=2, api_keys=("a", "b", "c")) as one, one.http() as http:

        def status(key: str) -> int:
            return http.post("/tokenize", json={"prompt": "w1"}, headers={"authorization": f"Bearer {key}"}).status_code

        with unread(one, as_sent({}, "/detokenize", "Authorization: Bearer a")) as first:
            wait_until(lambda: status("a") == 429)
            assert one.metric("outrider:unread_bytes") >= 30 * 2**20 and status("b") == 200
            with unread(one, as_sent({}, "/detokenize", "Authorization: Bearer b")):
                wait_until(lambda: status("c") == 503)
            wait_until(lambda: status("c") == 200)
            num_read = 0
            while num_read < 30 * 2**20:  # it was not cut
                num_read += len(first.recv(2**20))
        wait_until(lambda: one.metric("outrider:unread_bytes") == 0 and status("a") == 200)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"], ids=["nothing", "head", "body"])
def test_who_sends_by_drips_is_left(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STALL_S", 0.3)
    with running(words()) as one, socket.create_connection(one.listener.getsockname(), LIMIT_S) as connection:
        connection.sendall(sent)
        connection.settimeout(0.01)

        def is_left() -> bool:
            try:
                connection.sendall(b" " if sent else b"")
                return connection.recv(1000) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_left, 0.05)


def test_who_reads_nothing_is_left_and_who_waits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STALL_S", 0.3)
    monkeypatch.setattr(Preparer, "detokenize", lambda self, sent: time.sleep(1.5) or {"prompt": "w" * 30 * 2**20})
    with running(words()) as one, one.http() as http:
        assert http.post("/detokenize", json={}).status_code == 200
        with unread(one, as_sent({}, "/detokenize")):
            wait_until(lambda: one.metric("outrider:unread_bytes") > 2**20)
            wait_until(lambda: one.metric("outrider:unread_bytes") == 0)
