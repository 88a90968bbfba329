"""Hostile requests beside ordinary clients, for soak.py: each attack is a client of its own, with its own key.

Ordinary clients send the same requests in quiet windows and in hostile ones, in turn, so that the machine's own changes
fall on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx
import psutil
from answered import Wrong, streamed, text

NUM_CLIENTS = 4
VICTIM = "victim"  # the key of a client whose text is guessed
_PROMPTS = ("Once upon a time there was a", "The king", "In a forest lived", "A fox said to the hen")
_LIMIT_S = 60.0
_PATTERNS = [{"pattern": f".*{a}1.*{b}1.*"} for a in "abcdef" for b in "vwxyz"]  # 1.4 KB, and a large automaton
_HOSTILE_SCHEMA = {"type": "string", "allOf": _PATTERNS}
_AMBIGUOUS = 'root ::= a\na ::= a a | [a-z ] | ""'
_FIELDS = {"grammar": "root = x", "mirostat": 2, "stop_regex": "a+", "stop": 0, "guidance_scale": 2, "flavour": 1}
_BAD_CONSTRAINTS = [
    {"guided_regex": "(a"},
    {"guided_json": {"type": "foo"}},
    {"guided_grammar": "start: x"},
    {"structured_outputs": {"choice": [1]}},
    {"response_format": {"type": "json_schema"}},
]
_Attack = Callable[["Attacker"], Awaitable[None]]


class Attacker:
    """One hostile client.

    Attributes:
        statuses: of its answers.
        wrong: answers that nobody should get.
    """

    def __init__(self, url: str, name: str) -> None:
        self.name, self.statuses, self.wrong = name, Counter[int](), list[str]()
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port = int(port)
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {name}"}
        self.http = httpx.AsyncClient(base_url=url, timeout=_LIMIT_S, limits=limits, headers=headers)

    async def post(self, body: dict[str, Any] | bytes, *expected: int) -> None:
        """Send one request; an answer with another status is wrong."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        self.statuses[response.status_code] += 1
        if response.status_code not in expected:
            self.wrong.append(f"{self.name}: {response.status_code} {response.text:.200}")


async def _patterns(attacker: Attacker) -> None:
    """Two at a time, whose automaton has no end."""
    body = {"prompt": "The", "max_tokens": 64, "guided_json": _HOSTILE_SCHEMA}
    await _again(lambda: attacker.post(body, 200, 400, 429, 503), 2, 1.0)


async def _ambiguous(attacker: Attacker) -> None:
    """Texts whose masks cost more with each token; with an error where a budget ends them."""
    body = {"prompt": "The", "max_tokens": 400, "guided_grammar": _AMBIGUOUS, "ignore_eos": False}
    await _again(lambda: attacker.post(body, 200, 400, 429, 503), 2, 1.0)


async def _long_prompts(attacker: Attacker) -> None:
    """Two of 4 MB at a time."""
    body = json.dumps({"prompt": "once upon a time " * 240_000}).encode()
    await _again(lambda: attacker.post(body, 400, 429), 2, 2.0)


async def _many_options(attacker: Attacker) -> None:
    """Words and ends of one row, and of as many as a server may allow, from clients that leave after a second."""
    word = "once upon a time " * 3
    cases = itertools.product((1, 96), ({"bad_words": [word] * 1000}, {"stop_token_ids": [7] * 500_000}))
    for num_rows, more in itertools.cycle(cases):
        body = {"prompt": ["The"] * num_rows, "max_tokens": 4, **more}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await attacker.post(body, 200, 400, 429, 503)
        await asyncio.sleep(0.5)


async def _many_names(attacker: Attacker) -> None:
    """Bodies whose parts take more than their bytes: unknown fields, empty lists."""
    fields = {"prompt": "The"} | {f"{i:x}": 0 for i in range(270_000)}
    names = json.dumps(fields, separators=(",", ":")).encode()
    lists = json.dumps({"prompt": "The", "metadata": [[]] * 900_000}, separators=(",", ":")).encode()
    few = json.dumps({"prompt": "The", "metadata": [[]] * 270_000}, separators=(",", ":")).encode()
    for body in itertools.cycle((names, lists, few)):
        await attacker.post(body, 200 if body is few else 400, 429)
        await asyncio.sleep(0.5)


async def _long_answers(attacker: Attacker) -> None:
    """Log-probabilities of a prompt, with 20 more at each place; and as many ids as a body holds."""
    scores = {"prompt": [7] * 900, "max_tokens": 1, "prompt_logprobs": 20}
    ids = json.dumps({"tokens": [7] * 2_000_000}, separators=(",", ":")).encode()
    while True:
        await attacker.post(scores, 200, 429, 503)
        response = await attacker.http.post("/detokenize", content=ids, headers={"content-type": "application/json"})
        attacker.statuses[response.status_code] += 1
        await asyncio.sleep(1.0)


async def _idle_sockets(attacker: Attacker) -> None:
    """260, half of them inside a header, to which they add a byte now and then; those that are closed are opened
    again."""
    held: list[socket.socket] = []
    try:
        while True:
            for connection in [one for one in held if _is_closed(one)]:
                held.remove(connection)
                connection.close()
            for connection in held[::2]:
                with contextlib.suppress(OSError):
                    connection.send(b"a")
            while len(held) < 260:
                held.append(socket.create_connection((attacker.host, attacker.port), _LIMIT_S))
                held[-1].setblocking(False)
                if len(held) % 2:
                    held[-1].send(b"POST /v1/completions HTTP/1.1\r\nX: ")
                await asyncio.sleep(0.002)
            await asyncio.sleep(1.0)
    finally:
        for connection in held:
            connection.close()


async def _no_requests(attacker: Attacker) -> None:
    """Bytes that are no HTTP, each of which could write a line into the log."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(attacker.host, attacker.port)
            writer.write(b"\x16\x03\x01 no request\r\n\r\n")
            await reader.read()
            writer.close()
        await asyncio.sleep(0.02)


async def _fields(attacker: Attacker) -> None:
    """Fields that would change the text, and are not served; mistakes in constraints."""
    rng = random.Random(0)
    while True:
        name, value = rng.choice(list(_FIELDS.items()))
        await attacker.post({"prompt": "The", "max_tokens": 4, name: value}, 400)
        await attacker.post({"prompt": "The", "max_tokens": 4, **rng.choice(_BAD_CONSTRAINTS)}, 400)
        await asyncio.sleep(0.25)


async def _many_labels(attacker: Attacker) -> None:
    """A choice of thousands."""
    labels = [f" label {i} of many" for i in range(4000)]
    body = {"prompt": "The", "max_tokens": 8, "guided_choice": labels}
    await _again(lambda: attacker.post(body, 200, 400, 429, 503), 1, 1.0)


async def _long_texts(attacker: Attacker) -> None:
    """40 at a time, as long as there is room."""
    body = {"prompt": "The", "max_tokens": 4000, "ignore_eos": True}
    await _again(lambda: attacker.post(body, 200, 429, 503), 40, 5.0)


async def _leavers(attacker: Attacker) -> None:
    """Clients that send a request, close their half and go."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {attacker.name}\r\n"
    body = json.dumps({"prompt": "The", "max_tokens": 4000, "ignore_eos": True})
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(attacker.host, attacker.port)
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            writer.write_eof()
            await asyncio.sleep(0.05)
            writer.close()
        await asyncio.sleep(0.5)


async def _guesses(attacker: Attacker) -> None:
    """Of another client's text, which the count of cached tokens would confirm."""
    rng = random.Random(0)
    while True:
        body = {"prompt": [rng.randrange(100, 400) for _ in range(40)], "max_tokens": 1}
        for key in (VICTIM, attacker.name):
            response = await attacker.http.post(
                "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )
            if response.status_code == 200 and response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]:
                attacker.wrong.append(f"{attacker.name}: a guess is confirmed")
            attacker.statuses[response.status_code] += 1
        await asyncio.sleep(0.5)


async def _unread(attacker: Attacker) -> None:
    """Answers, whole and streamed, that nobody reads, on 20 connections; those that are closed are opened again."""
    held: list[socket.socket] = []
    whole = "/detokenize", {"tokens": [300] * 4000}
    streamed_ = (
        "/v1/completions",
        {"prompt": "The", "max_tokens": 900, "logprobs": 20, "stream": True, "ignore_eos": True},
    )
    try:
        while True:
            for connection in [one for one in held if _is_broken(one)]:
                held.remove(connection)
                connection.close()
            while len(held) < 20:
                path, body = (whole, streamed_)[len(held) % 2]
                sent = json.dumps(body)
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {attacker.name}\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
                connection = socket.socket()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect((attacker.host, attacker.port))
                connection.sendall((head + sent).encode() * (100 if path == "/detokenize" else 1))
                held.append(connection)
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)
    finally:
        for connection in held:
            connection.close()


def _is_broken(connection: socket.socket) -> bool:
    """Whether the server has closed a connection, as far as a client knows that reads nothing."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


ATTACKS: dict[str, _Attack] = {
    "patterns": _patterns,
    "ambiguous": _ambiguous,
    "long-prompts": _long_prompts,
    "many-options": _many_options,
    "many-names": _many_names,
    "long-answers": _long_answers,
    "idle-sockets": _idle_sockets,
    "no-requests": _no_requests,
    "fields": _fields,
    "many-labels": _many_labels,
    "long-texts": _long_texts,
    "leavers": _leavers,
    "guesses": _guesses,
    "unread": _unread,
}


async def _attack(url: str, names: list[str]) -> None:
    """Until standard input ends. One JSON document says what the attacks found."""
    attackers = [Attacker(url, name) for name in names]
    tasks = [asyncio.create_task(ATTACKS[one.name](one)) for one in attackers]
    await asyncio.sleep(2.0)
    print("under way", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    for one, found in zip(attackers, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        if not isinstance(found, asyncio.CancelledError):
            one.wrong.append(f"{one.name}: {found!r:.200}")
        await one.http.aclose()
    statuses = {one.name: {str(status): count for status, count in one.statuses.items()} for one in attackers}
    print(json.dumps({"statuses": statuses, "wrong": [line for one in attackers for line in one.wrong]}))


async def hostile(
    url: str, server: psutil.Process, names: list[str], windows: Iterable[int], num_each: int
) -> dict[str, Any]:
    """Latencies of ordinary clients in quiet and in hostile windows, and what became of both.

    Args:
        server: its process; processes that it starts count with it.
        names: of the attacks.
        windows: numbers of windows, quiet and hostile.
        num_each: requests of each ordinary client in a window.
    """
    seconds: dict[str, list[float]] = {"quiet": [], "hostile": []}
    lost: list[str] = []
    attacks: dict[str, Counter[str]] = {name: Counter() for name in names}
    wrong: list[str] = []
    await _window(url, 4, lost)  # what is done once is done
    lost.clear()
    memory = [_memory_bytes(server)]
    for number in windows:
        seconds["quiet"] += await _window(url, num_each, lost)
        memory[0] = max(memory[0], _memory_bytes(server))
        # A process of its own, which gives way to the others: real attackers compute elsewhere.
        command = ["nice", "-n", "19", sys.executable, __file__, url, *names]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()  # they are under way
            watch = asyncio.create_task(_watch(server, memory))
            seconds["hostile"] += await _window(url, num_each, lost)
            watch.cancel()
            found = json.loads(process.communicate()[0])
        for name, statuses in found["statuses"].items():
            attacks[name].update(statuses)
        wrong += found["wrong"]
        await _until_idle(url, lost)
        print(f"window {number}: {len(lost)} lost, {memory[-1] >> 20} MiB", file=sys.stderr, flush=True)
    p99 = {kind: sorted(found)[int(0.99 * len(found))] for kind, found in seconds.items()}
    return {
        "num_ordinary": {kind: len(found) for kind, found in seconds.items()},
        "median_s": {kind: sorted(found)[len(found) // 2] for kind, found in seconds.items()},
        "p99_s": p99,
        "p99_ratio": p99["hostile"] / p99["quiet"],
        "lost": lost[:20],
        "num_lost": len(lost),
        "attacks": attacks,
        "wrong": wrong[:20],
        "memory_growth_bytes": max(memory) - memory[0],
    }


async def _window(url: str, num_each: int, lost: list[str]) -> list[float]:
    """The same requests each time."""
    seconds: list[float] = []

    async def client(number: int) -> None:
        rng = random.Random(number)
        headers = {"authorization": f"Bearer ordinary-{number}"}
        async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S, headers=headers) as http:
            for _ in range(num_each):
                num_tokens = rng.randint(16, 48)
                body = {"prompt": rng.choice(_PROMPTS), "max_tokens": num_tokens, "ignore_eos": True}
                begin = time.perf_counter()
                try:
                    if rng.random() < 0.5:
                        text(await http.post("/v1/completions", json=body), num_tokens)
                    else:
                        options = {"stream": True, "stream_options": {"include_usage": True}}
                        await streamed(http, body | options, num_tokens)
                except (Wrong, httpx.HTTPError) as error:
                    lost.append(f"{type(error).__name__}: {error}"[:300])
                seconds.append(time.perf_counter() - begin)

    await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    return seconds


async def _again(send: Callable[[], Awaitable[None]], num_at_a_time: int, pause_s: float) -> None:
    async def loop() -> None:
        while True:
            await send()
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_at_a_time):
            group.create_task(loop())


async def _watch(server: psutil.Process, memory: list[int]) -> None:
    while True:
        memory.append(_memory_bytes(server))
        await asyncio.sleep(0.25)


async def _until_idle(url: str, lost: list[str]) -> None:
    """Those that were left free their slots."""
    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S) as http:
        for _ in range(300):
            found = (await http.get("/metrics")).text
            values = dict(re.findall(r"^outrider:(num_\w+)\{[^}]*\} (\S+)$", found, re.MULTILINE))
            if values["num_requests_running"] == values["num_requests_waiting"] == "0.0":
                return
            await asyncio.sleep(0.1)
    lost.append("slots are not free after the attacks")


def keys(names: list[str]) -> str:
    """Of all clients, as ``$OUTRIDER_API_KEY`` takes them."""
    return " ".join([*names, VICTIM, *(f"ordinary-{number}" for number in range(NUM_CLIENTS))])


def print_hostile(result: dict[str, Any]) -> None:
    for kind in ("quiet", "hostile"):
        median_s, p99_s = result["median_s"][kind], result["p99_s"][kind]
        print(f"{kind:8} {result['num_ordinary'][kind]:5} requests, median {median_s:.3f} s, p99 {p99_s:.3f} s")
    print(f"p99 {result['p99_ratio']:.2f} times, {result['num_lost']} lost; log {result['log_bytes']} bytes")
    print(f"memory grew by {result['memory_growth_bytes'] / 2**20:.0f} MiB; exit code {result['exit_code']}")
    for name, statuses in result["attacks"].items():
        print(f"  {name:14} {', '.join(f'{status}: {count}' for status, count in sorted(statuses.items()))}")
    for one in (*result["lost"], *result["wrong"]):
        print("WRONG", one)


def _memory_bytes(process: psutil.Process) -> int:
    total = 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_info().rss
    return total


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1000) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    asyncio.run(_attack(sys.argv[1], sys.argv[2:]))
