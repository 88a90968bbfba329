"""Images of chats at addresses: fetched from the hosts that the operator allows, and from no others.

A host is compared by name. It is trusted with the address that its name resolves to: private addresses are not refused.
No redirect is followed, since it could lead to another host, and no proxy is used. (vLLM has the same switch,
``--allowed-media-domains``, but fetches from everywhere by default.)
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterable, Sequence
from typing import Any

import httpx

from outrider.errors import OptionError
from outrider.serve.http_errors import Refusal
from outrider.text.chat_images import MOST_IMAGES, has_images, image_urls

# Limits of one request.
_MOST_BYTES = 4 * 2**20  # as for a request's body, in which images are otherwise
_MOST_S = 10.0
_HEADERS = {"User-Agent": "outrider", "Accept": "image/*", "Accept-Encoding": "identity"}
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]+")  # no patterns: a star would match nothing


def check_hosts(hosts: Iterable[str]) -> dict[tuple[str, int | None], str]:
    """Allowed (name, port) pairs; the port is None for those of http and https. Raises OptionError."""
    found = {}
    for host in hosts:
        try:
            if not _HOST.fullmatch(host):
                raise ValueError
            url = httpx.URL(f"//{host}")  # without a scheme, whose own port httpx drops
        except (ValueError, httpx.InvalidURL):
            remedy = "a host name, or HOST:PORT for another port than 80 and 443"
            raise OptionError("--allow-image-host", host, remedy) from None
        found[url.host, url.port] = host
    return found


class ImageFetcher:
    """Fetches images of chats.

    Args:
        hosts: names, each perhaps with a port: see ``check_hosts``. Without any nothing is fetched.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = check_hosts(hosts)
        self._tls = ssl.create_default_context() if hosts else False

    def urls_of(self, prompts: Sequence[Any]) -> list[str]:
        """Addresses of the images of chats; none if nothing is fetched."""
        return [url for prompt in prompts if has_images(prompt) for url in image_urls(prompt)] if self._hosts else []

    async def fetch(self, urls: Sequence[str]) -> dict[str, bytes]:
        """The files at addresses. Raises Refusal: it names the host, and the reason."""
        if len(urls) > MOST_IMAGES:
            raise _refusal(f"the prompt has more than {MOST_IMAGES} images: give fewer")
        parsed = {url: self._checked(url) for url in urls}
        found: dict[str, bytes] = {}
        host = ""
        try:
            async with asyncio.timeout(_MOST_S), self._client() as client:
                for text, url in parsed.items():
                    host = url.netloc.decode()
                    found[text] = await _content(client, url, host, _MOST_BYTES - sum(map(len, found.values())))
        except TimeoutError:
            message = f"the images did not arrive within {_MOST_S:g} seconds: the last one asked for is from {host}"
            raise _refusal(message) from None
        except (OSError, httpx.HTTPError) as error:
            raise _refusal(f"no image comes from {host}: {error or type(error).__name__}") from None
        return found

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=self._tls, headers=_HEADERS, timeout=None, trust_env=False)

    def _checked(self, text: str) -> httpx.URL:
        """Raises Refusal."""
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL:
            raise _refusal(f"the address {text!r:.80} of an image is invalid") from None
        ports = {None, _PORTS.get(url.scheme)} if url.port is None else {url.port}
        if url.userinfo or not any((url.host, port) in self._hosts for port in ports):
            allowed = ", ".join(self._hosts.values())
            raise _refusal(f"images are not fetched from {url.netloc.decode():.100}: allowed are {allowed}")
        return url


async def _content(client: httpx.AsyncClient, url: httpx.URL, host: str, most: int) -> bytes:
    """Body of a successful response. Raises Refusal, OSError, httpx.HTTPError."""
    content = bytearray()
    async with client.stream("GET", url) as response:
        if response.status_code != 200:
            more = ", a redirect, which is not followed" if response.is_redirect else ""
            raise _refusal(f"no image comes from {host}: it answers {response.status_code}{more}")
        async for part in response.aiter_raw():
            content += part
            if len(content) > most:
                raise _refusal(f"the images are longer than {_MOST_BYTES} bytes in all, the last one from {host}")
    return bytes(content)


def _refusal(message: str) -> Refusal:
    return Refusal(message, param="messages")
