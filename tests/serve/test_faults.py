"""Clients that go away, read slowly or are too many; models that fail; servers that are stopped."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
import torch
from servers import LIMIT_S, Running, as_sent, is_free, running, unread, wait_until, words
from torch import Tensor

from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import ModelNotFound
from outrider.requests import async_session
from outrider.serve import admission, answers, app, prepare, race, served_model
from outrider.serve.served_model import ServerOptions
from outrider.serve.server import Server, listen
from pairs import broken_model, word_tokenizer

LONG = {"prompt": "w1", "max_tokens": 900_000, "seed": 1}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(admission, "_KEEP_ALIVE_S", 0.05)
    with running(words(1_000_000), num_slots=2, context_len=1_000_000, max_queue=1) as one:
        yield one


def test_disconnected_clients_free_their_slots(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Of streams, of whole answers, and in the middle of a request, which is not logged as a fault of ours."""
    with server.openai() as client:
        for _ in range(10):
            stream = client.completions.create(model="toy", **LONG, n=2, stream=True)
            assert next(iter(stream)).choices and server.num_open == 2
            stream.close()
            wait_until(lambda: is_free(server))
    wait_until(lambda: server.metric("outrider:requests_total", 'finished_reason="abort"') == 20)
    with socket.create_connection(server.listener.getsockname()) as connection:
        connection.sendall(as_sent(LONG))
        wait_until(lambda: server.metric("outrider:num_requests_running") == 1)
    wait_until(lambda: is_free(server))
    with socket.create_connection(server.listener.getsockname()) as connection:
        connection.sendall(as_sent(LONG)[:-10])
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200
    assert {one.name for one in caplog.records} <= {"asyncio"}  # which may tell of the others


def test_a_full_queue(server: Running) -> None:
    with server.http() as http:
        assert http.post("/v1/completions", json=LONG | {"n": 4}).status_code == 400  # there is never room for so many
        with ExitStack() as streams:
            for _ in range(3):
                streams.enter_context(http.stream("POST", "/v1/completions", json=LONG | {"stream": True}))
            for path in ("completions", "race"):
                response = http.post(f"/v1/{path}", json=LONG)
                assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "unavailable"
            assert server.num_open == 3
        wait_until(lambda: is_free(server))
        assert http.post("/v1/completions", json={"prompt": "w1", "max_tokens": 3}).status_code == 200


def test_a_slow_reader_stops_nobody(server: Running) -> None:
    with unread(server, as_sent(LONG | {"stream": True, "logprobs": 20})):
        wait_until(lambda: server.metric("outrider:generation_tokens_total") > 200)  # more than the buffers hold
        with server.openai() as client:
            answer = client.completions.create(model="toy", prompt="w2", max_tokens=100)
        assert answer.usage.completion_tokens == 100
        assert server.metric("outrider:num_requests_running") == 1
    wait_until(lambda: is_free(server))


def test_a_request_that_has_waited_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status reports it; texts that have begun go on, and so do the others of their request, which wait for them."""
    now = [1.0]  # the clock of tickets
    for module in (async_session, served_model):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    two = LONG | {"n": 2, "stream": True}
    with running(words(1_000_000), num_slots=1, context_len=1_000_000) as server, server.http() as http:
        with http.stream("POST", "/v1/completions", json=two) as stream, ThreadPoolExecutor(1) as pool:
            lines = stream.iter_lines()
            next(lines)
            late = pool.submit(http.post, "/v1/completions", json=LONG | {"stream": True})
            wait_until(lambda: server.metric("outrider:num_requests_waiting") == 2)
            now[0] += 1000
            response = late.result()
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert "waited 600 seconds" in response.json()["error"]["message"]
            assert server.metric("outrider:num_requests_running") == 1
            wait_until(lambda: server.metric("outrider:num_requests_waiting") == 1)
            assert server.metric("outrider:requests_total", 'finished_reason="timeout"') == 1
            assert all("error" not in next(lines) for _ in range(20))
        wait_until(lambda: server.num_open == 0)


def test_what_runs_when_the_server_ends_hears_of_it(server: Running) -> None:
    """Too long for --shutdown-timeout, which is 0 here. The openai client raises an error."""
    with server.openai() as client:
        stream = iter(client.completions.create(model="toy", **LONG, stream=True))
        assert next(stream)
        server.server.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_a_text_that_fails_alone(tmp_path: Path) -> None:
    word_tokenizer().save_pretrained(broken_model(tmp_path))
    with running(load(tmp_path, device="cpu")) as server, server.openai() as client:
        with pytest.raises(openai.InternalServerError, match="the model toy gave NaN"):
            client.completions.create(model="toy", prompt="w7 w8")
        with pytest.raises(openai.APIError, match="the model toy gave NaN"):
            list(client.completions.create(model="toy", prompt="w7 w8", stream=True))
        assert client.completions.create(model="toy", prompt="w1 w2", max_tokens=1).choices


def test_before_a_server_is_ready() -> None:
    """It refuses requests. It ends if its model cannot be loaded."""
    may_load = threading.Event()
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        load_late = lambda: may_load.wait(LIMIT_S) and words()  # noqa: E731
        server = Server(("toy",), load_late, ServerOptions(shutdown_timeout_s=0.0), listener)
        ended = pool.submit(server.run)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=LIMIT_S, verify=False) as http:
            wait_until(lambda: http.get("/health").status_code == 503)
            assert http.post("/v1/completions", json={"prompt": "w1"}).status_code == 503
            assert http.get("/metrics").status_code == 200
            may_load.set()
            wait_until(lambda: http.get("/health").status_code == 200)
        server.stop()
        ended.result(LIMIT_S)

    def fail() -> Decoder:
        raise ModelNotFound("no such model")

    with listen("127.0.0.1", 0) as listener, pytest.raises(ModelNotFound):
        Server(("toy",), fail, ServerOptions(), listener).run()


def before_each_forward(decoder: Decoder, check: Callable[[Tensor], object]) -> None:
    whole = decoder.target.model.forward

    @wraps(whole)  # whose signature tells how it calls its cache
    def forward(input_ids: Tensor, *arguments: object, **more: object) -> object:
        check(input_ids)
        return whole(input_ids, *arguments, **more)

    decoder.target.model.forward = forward


class Panic(BaseException):
    """As Rust's, which PyO3 raises, is no ``Exception``."""


def test_an_engine_that_fails_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    decoder = words()
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        server = Server(("toy",), lambda: decoder, ServerOptions(), listener)
        ended = pool.submit(server.run)
        wait_until(lambda: server.model.admission.state == "ready")
        before_each_forward(decoder, Mock(side_effect=Panic("the device is gone")))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        response = httpx.post(url, json={"prompt": "w1"}, timeout=LIMIT_S)
        with pytest.raises(Panic, match="the device is gone"):
            ended.result(LIMIT_S)
    assert server.model.admission.state == "failed"  # of which /health tells
    assert response.status_code == 500 and "device" not in response.text
    assert "the engine has failed" in caplog.text


def test_a_request_that_lacks_memory() -> None:
    decoder = words(1000)
    before_each_forward(decoder, lambda ids: torch.empty(2**60 * (ids.shape[1] > 100), dtype=torch.uint8))
    with running(decoder, context_len=1000) as server, server.http() as http:
        for num_words, status in ((3, 200), (300, 503), (4, 200)):
            body = {"prompt": "w1 " * num_words, "max_tokens": 3}
            assert http.post("/v1/completions", json=body).status_code == status


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("module", "name", "path", "body"),
    [
        (prepare, "encode", "completions", {}),
        (race, "race_events", "race", {}),
        (app, "whole_answer", "completions", {}),
        (answers, "usage_of", "completions", STREAMED),
        (answers, "_drafts", "responses", {}),
    ],
)
def test_errors_of_ours_are_in_the_log(
    module: Any, name: str, path: str, body: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With their traceback, once, wherever they are. Clients see none of it."""
    decoder = words()
    decoder.tokenizer.chat_template = "w1"
    monkeypatch.setattr(module, name, Mock(side_effect=RuntimeError("a mistake of ours")))
    with running(decoder) as server, server.http() as http:
        asked = {"input": "w1", "max_output_tokens": 2} if path == "responses" else {"prompt": "w1 w2", "max_tokens": 2}
        answer = http.post(f"/v1/{path}", json=asked | body)
    assert "internal server error" in answer.text and "mistake" not in answer.text
    assert answer.status_code == (200 if "stream" in body else 500)
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert "a mistake of ours" in caplog.text and logged.levelname == "ERROR"
