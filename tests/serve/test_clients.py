"""Clients beside one another: a client is an API key, knows nothing of others, and holds nothing for ever."""

import socket
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from servers import LIMIT_S, Running, as_sent, running, wait_until, words

from outrider.serve import admission, server
from outrider.serve.prepare import Preparer

SECRET = [f"w{i}" for i in range(10, 40)]


def cached(http: httpx.Client, key: str, words: Sequence[str], **more: Any) -> int:
    """Tokens of a prompt that the answer to this key calls cached."""
    path = "/v1/chat/completions" if more else "/v1/completions"
    body = {"max_tokens": 1} | (more or {"prompt": " ".join(words)})
    response = http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    found: int = response.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_the_count_of_cached_tokens_confirms_no_guess() -> None:
    """Of another's text: it is the same for a right guess and for a wrong one."""
    with running(words(), api_keys=("alice", "bob")) as one, one.http() as http:
        assert [cached(http, "alice", SECRET) for _ in range(2)] == [0, 29]
        assert cached(http, "bob", SECRET[:20]) == cached(http, "bob", [*SECRET[:18], "w1", "w1"]) - 18 == 0
        assert cached(http, "alice", SECRET[:25]) == 24
    for keys in ((), ("alice",)):  # without several keys all are one client
        with running(words(), api_keys=keys) as one, one.http() as http:
            assert [cached(http, "alice", SECRET), cached(http, keys[0] if keys else "bob", SECRET)] == [0, 29]


def test_a_shared_prompt() -> None:
    """As text, and as system message; as text alone beside a template without these."""
    without = words()
    without.tokenizer.chat_template = "{{ raise_exception('no system') if messages[0].role == 'system' else 'w7' }}"
    with running(without, api_keys=("a", "b"), shared_prompts=(" ".join(SECRET[:20]),)) as one, one.http() as http:
        assert [cached(http, key, SECRET) for key in ("a", "b")] == [0, 20]
    decoder, shared = words(), " ".join(SECRET[:20])
    decoder.tokenizer.chat_template = "{% for m in messages %}w7 {{ m.content }} {% endfor %}"
    with (
        running(decoder, api_keys=("alice", "bob"), shared_prompts=(shared,)) as one,
        one.http() as http,
    ):
        assert cached(http, "alice", SECRET) == 0
        assert cached(http, "bob", SECRET) == 20
        for key, expected in (("alice", 0), ("bob", 22)):
            system, user = {"role": "system", "content": shared}, {"role": "user", "content": " ".join(SECRET)}
            assert cached(http, key, (), messages=[system, user]) == expected


def test_other_headers_make_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys."""
    monkeypatch.setattr(admission, "_KEEP_ALIVE_S", 0.05)  # so that a stream begins while it waits
    options = {"num_slots": 1, "context_len": 1_000_000, "max_per_client": 1}
    long = {"prompt": "w1", "max_tokens": 900_000, "stream": True}
    with running(words(1_000_000), **options) as one, one.http() as http:
        with http.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()  # kept, since the response is closed with it
            next(lines)
            for headers in ({"authorization": "Bearer b"}, {"x-forwarded-for": "1.2.3.4"}, {"x-api-key": "c"}):
                assert http.post("/v1/completions", json={"prompt": "w1"}, headers=headers).status_code == 429
        wait_until(lambda: one.num_open == 0)


def unread(one: Running, sent: bytes) -> socket.socket:
    """A connection whose answer is not read."""
    connection = socket.socket()
    one.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else megabytes fit between the two
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(LIMIT_S)
    connection.connect(one.listener.getsockname())
    connection.sendall(sent)
    return connection


@pytest.mark.parametrize("kind", ["whole", "streamed"])
def test_unread_answers_count_until_they_are_sent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And there is a limit for each client, and one for all."""
    monkeypatch.setattr(admission, "_MOST_UNREAD_BYTES", 40 * 2**20 if kind == "whole" else 100_000)
    monkeypatch.setattr(Preparer, "detokenize", lambda self, sent: {"prompt": "w" * 30 * 2**20})
    options = {"num_slots": 2, "context_len": 1_000_000, "api_keys": ("a", "b", "c")}
    path = "/detokenize" if kind == "whole" else "/v1/completions"
    body = {} if kind == "whole" else {"prompt": "w1", "max_tokens": 900_000, "stream": True, "logprobs": 20}

    with running(words(1_000_000), **options) as one, one.http() as http:

        def status(key: str) -> int:
            return http.post("/tokenize", json={"prompt": "w1"}, headers={"authorization": f"Bearer {key}"}).status_code

        def held() -> float:
            return one.metric("outrider:unread_bytes")

        assert held() == 0
        with unread(one, as_sent(body, path, "Authorization: Bearer a")) as first:
            wait_until(lambda: status("a") == 429)
            assert held() >= (30 * 2**20 if kind == "whole" else 75_000)
            if kind == "whole":
                assert status("b") == 200
                with unread(one, as_sent(body, path, "Authorization: Bearer b")):
                    wait_until(lambda: status("c") == 503)
                    assert held() >= 60 * 2**20
                wait_until(lambda: status("c") == 200)
                first.settimeout(LIMIT_S)
                num_read = 0
                while num_read < 30 * 2**20:  # it was not cut
                    num_read += len(first.recv(2**20))
        wait_until(lambda: held() == 0 and status("a") == 200)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"], ids=["nothing", "head", "body"])
def test_who_sends_by_drips_is_left(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STALL_S", 0.3)
    with running(words()) as one, socket.create_connection(one.listener.getsockname(), LIMIT_S) as connection:
        connection.sendall(sent)
        wait_until(lambda: _is_left(connection, b"" if not sent else b" "), 0.05)


def _is_left(connection: socket.socket, drip: bytes) -> bool:
    """Whether a connection is closed; else another byte is sent."""
    connection.settimeout(0.01)
    try:
        connection.sendall(drip)
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_who_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their answers count no more."""
    monkeypatch.setattr(server, "_STALL_S", 0.3)
    monkeypatch.setattr(Preparer, "detokenize", lambda self, sent: {"prompt": "w" * 30 * 2**20})
    with running(words()) as one, unread(one, as_sent({}, "/detokenize")):
        wait_until(lambda: one.metric("outrider:unread_bytes") > 2**20)
        wait_until(lambda: one.metric("outrider:unread_bytes") == 0)


class Plain:
    """An object with these attributes, equal to itself alone."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


def connection(*, is_whole: bool = True, is_answered: bool = False, is_paused: bool = False) -> Any:
    """As uvicorn has them."""
    one: Any = Plain(flow=Plain(write_paused=is_paused), num_unread=9, now_s=0.0, left_at=0.0)
    one.cycle = Plain(response_complete=is_answered, more_body=not is_whole)
    one.transport = Plain(
        get_write_buffer_size=lambda: one.num_unread, abort=lambda: setattr(one, "left_at", one.now_s)
    )
    return one


def test_connections_that_wait_for_the_server_are_kept() -> None:
    """And those in which something goes on."""
    seen: dict[Any, tuple[object, float]] = {}
    idle, body, stuck = connection(), connection(is_whole=False), connection(is_paused=True)
    waits, busy, reads = connection(), connection(is_answered=True), connection(is_paused=True)
    idle.cycle, every = None, (idle, body, stuck, waits, busy, reads)  # no head so far
    for second in range(200):
        if second % 50 == 0:
            busy.cycle, reads.num_unread = Plain(response_complete=True, more_body=False), second
        kept = [one for one in every if not one.left_at]
        for one in kept:
            one.now_s = float(second)
        seen = server.close_stalled(kept, seen, float(second))
    assert [one.left_at for one in every] == [76.0, 76.0, 76.0, 0.0, 0.0, 0.0]
