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
from urllib.parse import SplitResult, urlsplit

import httpx

from outrider.errors import OptionError
from outrider.serve.http_errors import Refusal
from outrider.text.chat_images import MOST_IMAGES, has_images, image_urls

# Limits of one request.
_MOST_BYTES = 4 * 2**20  # as for a request's body, in which images are otherwise
_MOST_S = 10.0  # or the resolver's own limit, if that is longer
_HEADERS = {"User-Agent": "outrider", "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
_HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]+")  # no patterns: a star would match nothing
_PORTS = {"http": 80, "https": 443}


def check_hosts(hosts: Iterable[str]) -> dict[tuple[str, int | None], str]:
    """Allowed (name, port) pairs; the port is None for those of http and https. Raises OptionError."""
    found = {}
    for host in hosts:
        try:
            split = urlsplit(f"//{host}")
            name, port = split.hostname, split.port
        except ValueError:
            name, port = None, None
        if not name or host != split.netloc or not _HOST.fullmatch(host):
            raise OptionError("--allow-image-host", host, "a host name, or HOST:PORT for another port than 80 and 443")
        found[name, port] = host
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

    def fetch(self, urls: Sequence[str]) -> dict[str, bytes]:
        """The files at addresses. Waits for their hosts: not for the event loop.

        Raises:
            Refusal: it names the host, and the reason.
        """
        if len(urls) > MOST_IMAGES:
            raise _refusal(f"the prompt has more than {MOST_IMAGES} images: give fewer")
        splits = [self._checked(url) for url in urls]
        return asyncio.run(self._fetch_all(urls, splits))

    async def _fetch_all(self, urls: Sequence[str], splits: Sequence[SplitResult]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        host = ""
        client = httpx.AsyncClient(verify=self._tls, headers=_HEADERS, timeout=None, trust_env=False)
        try:
            async with asyncio.timeout(_MOST_S), client:
                for url, split in zip(urls, splits, strict=True):
                    host = split.netloc
                    found[url] = await _content(client, url, host, _MOST_BYTES - sum(map(len, found.values())))
        except TimeoutError:
            raise _refusal(
                f"the images did not arrive within {_MOST_S:g} seconds: the last one asked for is from {host}"
            ) from None
        except (OSError, httpx.HTTPError) as error:
            raise _refusal(f"no image comes from {host}: {error or type(error).__name__}") from None
        return found

    def _checked(self, url: str) -> SplitResult:
        """Raises Refusal."""
        try:
            split = urlsplit(url)
            name, port = split.hostname, split.port
        except ValueError:
            raise _refusal(f"the address {url!r:.80} of an image is invalid") from None
        # urlsplit drops line breaks.
        if not name or "@" in split.netloc or not all("!" <= character <= "~" for character in url):
            raise _refusal(f"the address {url!r:.80} of an image is invalid: give a host, and no user; encode the rest")
        own = port or _PORTS[split.scheme]
        if (name, own) not in self._hosts and ((name, None) not in self._hosts or own != _PORTS[split.scheme]):
            raise _refusal(
                f"images are not fetched from {split.netloc:.100}: allowed are {', '.join(self._hosts.values())}"
            )
        return split


async def _content(client: httpx.AsyncClient, url: str, host: str, most: int) -> bytes:
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
