"""Clients that go away, read slowly or are too many; models that fail; servers that are stopped."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from servers import LIMIT_S, Running, as_sent, is_free, loading, running, wait_until, words
from torch import Tensor

from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import ModelNotFound
from outrider.serve import admission, answers, app, prepare, race, served_model
from outrider.serve.served_model import ServedModel, ServerOptions
from outrider.serve.server import Server, listen
from pairs import broken_model, word_tokenizer

LONG = {"prompt": "w1", "max_tokens": 900_000, "seed": 1}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Texts of it have no end, unless they are asked for. Those who wait hear of it soon."""
    monkeypatch.setattr(admission, "_KEEP_ALIVE_S", 0.05)
    with running(words(1_000_000), num_slots=2, context_len=1_000_000, max_queue=1) as one:
        yield one


def test_clients_that_leave_free_their_slots(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Of streams: many, since a client may leave at the very moment at which there is something to send; of whole
    answers; and in the middle of a request, which is no fault of ours, and not logged as one."""
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
    """Two slots, and one more may wait; it leaves like the others."""
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
    """It reads nothing of its long answer."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Else megabytes fit between the two, which a busy machine does not generate in the time of a test.
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.connect(server.listener.getsockname())
        slow.sendall(as_sent(LONG | {"stream": True, "logprobs": 20}))
        wait_until(lambda: server.metric("outrider:generation_tokens_total") > 200)  # more than the buffers hold
        with server.openai() as client:
            answer = client.completions.create(model="toy", prompt="w2", max_tokens=100)
        assert answer.usage.completion_tokens == 100
        assert server.metric("outrider:num_requests_running") == 1
    wait_until(lambda: is_free(server))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the engine thread, in seconds; a test may put it forward."""
    clock = [1.0]
    monkeypatch.setattr(served_model, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    return clock


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_a_request_that_has_waited_too_long(more: dict, now: list[float]) -> None:
    """A status reports it, streamed or not; texts that have begun go on, and so do the others of their request,
    which wait for them."""
    two = LONG | {"n": 2, "stream": True}
    with running(words(1_000_000), num_slots=1, context_len=1_000_000) as server, server.http() as http:
        with http.stream("POST", "/v1/completions", json=two) as stream, ThreadPoolExecutor(1) as pool:
            lines = stream.iter_lines()
            next(lines)
            late = pool.submit(http.post, "/v1/completions", json=LONG | more)
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


def test_a_score_that_has_waited_too_long(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model.ServedModel, "_work_on_thread", lambda self: None)  # it is busy with others
    body = {"prompt": "w1 w2", "max_tokens": 0, "echo": True, "logprobs": 0}
    with running(words()) as server, server.http() as http, ThreadPoolExecutor(1) as pool:
        late = pool.submit(http.post, "/v1/completions", json=body)
        wait_until(lambda: server.num_open == 1)
        now[0] += 1000
        assert late.result().status_code == 503


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_score_that_runs_when_the_server_ends(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on to its end, and so does the text after it."""
    may_score, score = threading.Event(), served_model.prompt_logprobs

    def score_late(*arguments: Any) -> Any:
        assert may_score.wait(LIMIT_S)
        yield from score(*arguments)

    monkeypatch.setattr(served_model, "prompt_logprobs", score_late)
    body = {"prompt": ["w1 w2", "w3 w4"], "max_tokens": max_tokens, "echo": True, "logprobs": 0}
    with running(words(), shutdown_timeout_s=LIMIT_S) as server, server.http() as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/completions", json=body)
        wait_until(lambda: server.num_open > 0)
        server.server.stop()
        wait_until(lambda: server.model.admission.state == "draining")
        may_score.set()
        choices = answer.result().json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [2 + max_tokens] * 2


def test_what_runs_when_the_server_ends_hears_of_it(server: Running) -> None:
    """Too long for --shutdown-timeout, which is 0 here. The openai client raises an error."""
    with (
        server.openai() as client,
        server.http() as http,
        http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response,
    ):
        lines, stream = response.iter_lines(), iter(client.completions.create(model="toy", **LONG, stream=True))
        assert next(lines) and next(stream)
        server.server.stop()
        *_, error, done = (line for line in lines if line)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    assert done == "data: [DONE]"
    assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]


def test_a_text_that_fails_alone(tmp_path: Path) -> None:
    """NaN for one prompt, and none for the others."""
    tokenizer = word_tokenizer()
    folder = broken_model(tmp_path)
    tokenizer.save_pretrained(folder)
    with running(load(folder, device="cpu")) as server, server.openai() as client:
        with pytest.raises(openai.InternalServerError, match="the model toy gave NaN"):
            client.completions.create(model="toy", prompt="w7 w8")
        with pytest.raises(openai.APIError, match="the model toy gave NaN"):
            list(client.completions.create(model="toy", prompt="w7 w8", stream=True))
        with pytest.raises(openai.InternalServerError, match="the model toy gave NaN"):
            client.completions.create(model="toy", prompt="w7 w8", echo=True, logprobs=1, max_tokens=0)
        assert client.completions.create(model="toy", prompt="w1 w2", max_tokens=1).choices


def test_before_a_server_is_ready() -> None:
    """It refuses requests. If it ends before it is ready, it takes none after all, and its counts can be read; so it
    ends if its model cannot be loaded."""
    for ends in (False, True):
        may_load, found = threading.Event(), list[ServedModel]()

        def load_late(may_load: threading.Event = may_load) -> Decoder:
            assert may_load.wait(LIMIT_S)
            return words()

        with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
            server = Server(("toy",), load_late, ServerOptions(shutdown_timeout_s=0.0), listener, found.append)
            ended = pool.submit(server.run)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=LIMIT_S, verify=False) as http:
                wait_until(lambda http=http: http.get("/health").status_code == 503)  # type: ignore[misc]
                assert http.get("/v1/models").status_code == 503
                assert http.post("/v1/completions", json={"prompt": "w1"}).status_code == 503
                if ends:
                    server.model.drain()
                assert http.get("/metrics").status_code == 200
                may_load.set()
                if not ends:
                    wait_until(lambda found=found: bool(found))  # type: ignore[misc]
                    assert http.get("/health").status_code == 200
            server.stop()
            ended.result(LIMIT_S)
        assert bool(found) == (not ends)

    def fail() -> Decoder:
        raise ModelNotFound("no such model")

    with listen("127.0.0.1", 0) as listener, pytest.raises(ModelNotFound):
        Server(("toy",), fail, ServerOptions(), listener).run()


class Panic(BaseException):
    """As Rust's, which PyO3 raises, is no ``Exception``."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_an_engine_that_fails_ends_the_server(kind: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """Clients are told, and so is whoever started the server."""
    decoder = words()
    is_broken = threading.Event()

    whole = decoder.target.model.forward

    @wraps(whole)  # whose signature tells how it calls its cache
    def forward(*arguments: object, **more: object) -> object:
        if is_broken.is_set():
            raise kind("the device is gone")
        return whole(*arguments, **more)

    decoder.target.model.forward = forward
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        server = Server(("toy",), loading(decoder), ServerOptions(), listener)
        ended = pool.submit(server.run)
        wait_until(lambda: server.model.admission.state == "ready")
        is_broken.set()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        response = httpx.post(url, json={"prompt": "w1"}, timeout=LIMIT_S)
        with pytest.raises(kind, match="the device is gone"):
            ended.result(LIMIT_S)
    assert server.model.admission.state == "failed"  # of which /health tells
    assert response.status_code == 500 and "device" not in response.text
    assert "the engine has failed" in caplog.text


def test_a_request_that_lacks_memory() -> None:
    """It is told to come again, and the server goes on."""
    decoder = words(1000)
    whole = decoder.target.model.forward

    @wraps(whole)
    def forward(input_ids: Tensor, *arguments: object, **more: object) -> object:
        if input_ids.shape[1] > 100:
            torch.empty(2**60, dtype=torch.uint8)
        return whole(input_ids, *arguments, **more)

    decoder.target.model.forward = forward
    with running(decoder, context_len=1000) as server, server.http() as http:
        for num_words, status in ((3, 200), (300, 503), (4, 200)):
            prompt = " ".join(["w1"] * num_words)
            response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3})
            assert response.status_code == status, response.text
        assert http.get("/health").status_code == 200


def _fails(*_: object, **__: object) -> Any:
    raise RuntimeError("a mistake of ours")


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("module", "name", "path", "body"),
    [
        (prepare, "encode", "completions", {}),
        (served_model, "prompt_logprobs", "completions", {"prompt_logprobs": 1}),
        (race, "race_events", "race", {}),
        (app, "whole_answer", "completions", {}),
        (answers, "usage_of", "completions", STREAMED),
        (answers, "_drafts", "responses", {"stream": True}),
        (answers, "_drafts", "responses", {}),
    ],
)
def test_errors_of_ours_are_in_the_log(
    module: Any, name: str, path: str, body: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With their traceback, once, wherever they are. Clients see none of it."""
    decoder = words()
    decoder.tokenizer.chat_template = "w1"
    monkeypatch.setattr(module, name, _fails)
    with running(decoder) as server, server.http() as http:
        asked = {"input": "w1", "max_output_tokens": 2} if path == "responses" else {"prompt": "w1 w2", "max_tokens": 2}
        answer = http.post(f"/v1/{path}", json=asked | body)
    assert "internal server error" in answer.text and "mistake" not in answer.text
    assert answer.status_code == (200 if "stream" in body else 500)
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert "in _fails" in caplog.text and logged.levelname == "ERROR"
