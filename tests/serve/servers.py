"""Servers for the tests: real ones, on a free port of this machine, in a thread."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from openai import OpenAI

from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER
from outrider.serve.served_model import ServedModel, ServerOptions
from outrider.serve.server import Server, listen
from pairs import word_tokenizer
from toys import random_table, table_lm

LIMIT_S = 60.0  # until a test that hangs is given up


@dataclass
class Running:
    server: Server
    listener: socket.socket
    url: str
    api_key: str | None

    @property
    def model(self) -> ServedModel:
        return self.server.model

    @property
    def num_open(self) -> int:
        """Unfinished rows and tasks."""
        return self.model.admission.num_open

    def openai(self) -> OpenAI:
        key, client = self.api_key or "none", httpx.Client(timeout=LIMIT_S, verify=False)
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=client)

    def http(self) -> httpx.Client:
        """Nothing is encrypted here, and to read all certificates of this machine takes longer than most requests."""
        return httpx.Client(base_url=self.url, timeout=LIMIT_S, verify=False)

    def metric(self, name: str, *labels: str) -> float:
        """The value in /metrics of a name with these labels; 0 where there is none."""
        found = ",".join(sorted((*labels, f'model_name="{self.model.names[0]}"')))
        start = f"{name}{{{found}}} "
        with self.http() as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(one.removeprefix(start)) for one in lines if one.startswith(start))


@contextmanager
def running(decoder: Decoder, names: Sequence[str] = ("toy",), **options: object) -> Iterator[Running]:
    """A server for a decoder with these names. It must end when it is stopped."""
    is_ready = threading.Event()
    chosen = ServerOptions(**{"num_slots": 4, "shutdown_timeout_s": 0.0, **options})
    with listen("127.0.0.1", 0) as listener:
        server = Server(names, lambda: decoder, chosen, listener, lambda model: is_ready.set())
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert is_ready.wait(LIMIT_S)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield Running(server, listener, url, next(iter(chosen.api_keys), None))
        finally:
            server.stop()
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], pause_s: float = 0.01) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(pause_s)


def as_sent(value: object, path: str = "/v1/completions", *headers: str) -> bytes:
    body = json.dumps(value).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def unread(one: Running, sent: bytes) -> socket.socket:
    connection = socket.socket()
    one.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else megabytes fit between the two
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(LIMIT_S)
    connection.connect(one.listener.getsockname())
    connection.sendall(sent)
    return connection


def is_free(server: Running) -> bool:
    return server.metric("outrider:num_free_slots") == 2 and server.num_open == 0


def words(context_len: int = 64) -> Decoder:
    """A decoder of words without end tokens. With a long context its texts have no end within any test."""
    target = table_lm(random_table(50, 0), context_len=context_len)
    return Decoder(target, word_tokenizer(50), frozenset(), NO_DRAFTER)
