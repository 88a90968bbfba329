"""Images at addresses: from allowed hosts alone, real ones on this machine, and at nobody else's cost."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from servers import LIMIT_S, running, wait_until, words

from outrider.errors import OptionError
from outrider.serve import image_fetch
from outrider.serve.http_errors import Refusal
from outrider.serve.image_fetch import ImageFetcher, check_hosts


class Host(ThreadingHTTPServer):
    """Answers by the path of a request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.may_answer = threading.Event()
        self.paths: list[str] = []
        self.name = f"127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client has gone."""


class Handler(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.path == "/slow":
            self.server.may_answer.wait(LIMIT_S)
        status = {"/moved": 302, "/gone": 404}.get(self.path, 200)
        body = b"x" * 2000 if self.path == "/long" else b"image"
        if self.path == "/silent":
            return
        self.send_response(status)
        if self.path == "/moved":
            self.send_header("Location", "/image")
        if self.path != "/endless":
            self.send_header("Content-Length", str(len(body) + 5 * (self.path == "/cut")))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.may_answer.set()
        one.shutdown()
        thread.join()


def fetch(hosts: list[str], urls: list[str]) -> dict[str, bytes]:
    return asyncio.run(ImageFetcher(hosts).fetch(urls))


def test_files_come_from_an_allowed_host(host: Host) -> None:
    base = f"http://{host.name}"
    urls = [f"{base}/image", f"{base}/endless?size=1#part"]  # the second ends with the connection
    assert fetch([host.name], urls) == dict.fromkeys(urls, b"image")
    assert host.paths[-2:] == ["/image", "/endless?size=1"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/moved", "answers 302, a redirect, which is not followed"),
        ("/gone", "answers 404"),
        ("/cut", "peer closed connection"),
        ("/silent", "no image comes from"),
        ("/long", "are longer than 1000 bytes in all"),
    ],
)
def test_what_a_host_may_answer(host: Host, path: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "_MOST_BYTES", 1000)
    host.paths.clear()
    with pytest.raises(Refusal, match=reason) as caught:
        fetch([host.name], [f"http://{host.name}{path}"])
    assert caught.value.param == "messages" and caught.value.status == 400 and host.name in str(caught.value)
    assert host.paths == [path]


def test_all_images_count(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "_MOST_BYTES", 9)
    with pytest.raises(Refusal, match="longer than 9 bytes in all"):
        fetch([host.name], [f"http://{host.name}/{i}" for i in range(2)])
    with pytest.raises(Refusal, match="more than 64 images"):
        fetch([host.name], [f"http://{host.name}/{i}" for i in range(65)])


def test_a_host_that_does_not_answer(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "_MOST_S", 0.05)
    with pytest.raises(Refusal, match=f"did not arrive within 0.05 seconds.*{host.name}"):
        fetch([host.name], [f"http://{host.name}/slow"])
    monkeypatch.undo()
    with pytest.raises(Refusal, match=f"no image comes from {host.name}: .*SSL"):
        fetch([host.name], [f"https://{host.name}/image"])
    with pytest.raises(Refusal, match="no image comes from 127.0.0.1:1"):
        fetch(["127.0.0.1:1"], ["http://127.0.0.1:1/image"])


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/a",
        "http://example.com.evil.example/a",
        "http://sub.example.com/a",
        "http://example.com:8080/a",
        "https://example.com:80/a",
        "http://other.example:443/a",
        "http://user@example.com/a",
        "http://other.example\\@example.com/a",
        "http://example.com/a\r\nX-Y: 1",
        "http:///a",
        "http://example.com:99999/a",
        "http://[::1/a",
    ],
)
def test_other_addresses_are_not_opened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "_content", None)
    with pytest.raises(Refusal) as caught:
        fetch(["example.com", "other.example:90"], [url])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("host", "url", "is_allowed"),
    [
        ("example.com:443", "https://example.com/a", True),
        ("example.com:443", "https://example.com:443/a", True),
        ("example.com:443", "http://example.com/a", False),
        ("example.com:80", "http://example.com/a", True),
        ("example.com:80", "https://example.com/a", False),
        ("example.com", "https://example.com:443/a", True),
        ("example.com", "http://example.com:80/a", True),
    ],
)
def test_the_port_of_a_scheme(host: str, url: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Need not stand in the address."""

    async def content(*_: object) -> bytes:
        return b"image"

    monkeypatch.setattr(image_fetch, "_content", content)
    if is_allowed:
        assert fetch([host], [url]) == {url: b"image"}
    else:
        with pytest.raises(Refusal, match="images are not fetched from"):
            fetch([host], [url])


def test_hosts() -> None:
    found = check_hosts(["A.example", "b.example:81", "[::1]:80"])
    assert found.keys() == {("a.example", None), ("b.example", 81), ("::1", 80)}
    for wrong in ("", "http://a.example", "a.example/b", "a:b", "u@a.example", "*.example", "a b"):
        with pytest.raises(OptionError, match="--allow-image-host"):
            check_hosts([wrong])


def test_a_slow_host_holds_up_nobody(host: Host) -> None:
    """While one client's requests wait for it, others are answered, with images too."""
    decoder = words()
    decoder.tokenizer.chat_template = "{{ messages[0].content }}"
    host.may_answer.clear()
    host.paths.clear()

    def chat(path: str) -> Any:
        part = {"type": "image_url", "image_url": {"url": f"http://{host.name}{path}"}}
        return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}

    with running(decoder, image_hosts=(host.name,)) as server, server.http() as http, ThreadPoolExecutor(8) as pool:
        slow = [pool.submit(http.post, "/v1/chat/completions", json=chat("/slow")) for _ in range(8)]
        wait_until(lambda: len(host.paths) == 8)
        others = {"authorization": "Bearer other"}
        assert http.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200
        answer = http.post("/v1/chat/completions", json=chat("/image"), headers=others)
        assert "no processor" in answer.json()["error"]["message"] and not any(one.done() for one in slow)
        host.may_answer.set()
        assert {one.result().status_code for one in slow} == {400}
        answer = http.post("/v1/chat/completions", json=chat("/gone"))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
