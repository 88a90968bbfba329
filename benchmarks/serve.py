"""Servers under load: tokens per second, time to the first token, time per token.

    python benchmarks/serve.py [--clients 1 4 8 16] [--seconds 3] [--turns 2]
        [--llama-server PATH --gguf TARGET DRAFT] [--transformers PYTHON]

Each arm is a server in a process of its own; all are started first, and take the load in turns, so that the weather of
the machine is the same for all. So many clients send a request each and the next one when it is answered, for so many
seconds: one of 15 short prompts, at temperature 1 without other options, 16 to 112 new tokens, end tokens ignored where
the server can do so. (Texts of one length would begin and end together without drafts, and only there, which saves
forwards in no real load.) Clients are coroutines of this process, which shares the processor with the server.

Outrider's arms: plain, K = 4, auto, and auto with seeds (which keeps K = 4). "auto" is compared with the better of
plain and K = 4, turn by turn. Time per token is that of a request after its first tokens, over the tokens after those;
with drafts they come in groups. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median, quantiles
from typing import Any

import httpx
from rich.console import Console

from outrider.measure.tables import new_table
from outrider.models.registry import resolve
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_NUM_TOKENS = (64, 16, 112, 48, 80, 32, 96)  # of the requests, in turn
_CONTEXT, _SLOTS, _K = 192, 8, 4
_LIMIT_S = 120.0
_PLAIN, _CONSTANT, _AUTO, _SEEDED = "plain", f"K = {_K}", "auto", "auto, seeded"


@dataclass(frozen=True)
class Arm:
    """A server and the way to ask it.

    Attributes:
        command: that starts it, without its port.
        body: fields of each request, beside the prompt.
        is_seeded: each request has its own seed.
    """

    name: str
    command: Sequence[str]
    body: dict[str, Any]
    is_seeded: bool = False


@dataclass
class Load:
    """Requests of some seconds.

    Attributes:
        num_failed: requests without an answer.
        first_s, token_s: of each request; the second for texts of more than one chunk.
    """

    num_tokens: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf", nargs=2, metavar=("TARGET", "DRAFT"))
    parser.add_argument("--transformers", metavar="PYTHON", help="that has transformers[serving]")
    arguments = parser.parse_args()
    arms = [*_outrider(arguments), *_llama_cpp(arguments), *_transformers(arguments)]
    loads: dict[tuple[str, int], list[Load]] = defaultdict(list)
    with _started(arms, arguments.threads) as urls:
        for arm in arms:  # unmeasured: memory is taken, and shapes are met
            for num_clients in sorted({1, 2, 3, *arguments.clients}):
                asyncio.run(_load(urls[arm.command], arm, num_clients, 0.5))
        for turn in range(arguments.turns):
            for num_clients in arguments.clients:
                for arm in arms[::-1] if turn % 2 else arms:
                    load = asyncio.run(_load(urls[arm.command], arm, num_clients, arguments.seconds))
                    loads[arm.name, num_clients].append(load)
    _print(arms, arguments.clients, loads)
    rows = [
        {
            "arm": name,
            "clients": num_clients,
            "tokens_per_s": [one.rate for one in them],
            "num_failed": sum(one.num_failed for one in them),
            **_latencies(them),
        }
        for (name, num_clients), them in loads.items()
    ]
    print(json.dumps({"provenance": provenance("cpu"), "loads": rows, "arguments": vars(arguments)}))


def _outrider(arguments: argparse.Namespace) -> list[Arm]:
    main_ = "from outrider.cli.app import main; main()"
    command = [sys.executable, "-c", main_, "serve", "--target", arguments.target, "--device", "cpu"]
    command += ["--slots", str(_SLOTS), "--context", str(_CONTEXT)]
    draft = ["--draft", arguments.draft, "-k"]
    body = {"ignore_eos": True, "temperature": 1.0}
    auto = (*command, *draft, "auto")
    return [
        Arm(_PLAIN, (*command, "--draft", "none"), body),
        Arm(_CONSTANT, (*command, *draft, str(_K)), body),
        Arm(_AUTO, auto, body),
        Arm(_SEEDED, auto, body, is_seeded=True),
    ]


def _llama_cpp(arguments: argparse.Namespace) -> list[Arm]:
    if not arguments.llama_server:
        return []
    target, draft = arguments.gguf
    threads = str(arguments.threads)
    command = [arguments.llama_server, "-m", target, "-t", threads, "-tb", threads, "-np", str(_SLOTS)]
    command += ["-c", str(_SLOTS * _CONTEXT), "--cache-ram", "0", "--poll", "0"]
    drafting = ["-md", draft, "--spec-type", "draft-simple", "-td", threads, "-tbd", threads]
    sampling = {"samplers": ["temperature"], "ignore_eos": True, "temperature": 1.0}
    return [
        Arm("llama.cpp, plain", tuple(command), sampling),
        Arm(f"llama.cpp, K = {_K}", (*command, *drafting, "--spec-draft-n-max", str(_K)), sampling),
    ]


def _transformers(arguments: argparse.Namespace) -> list[Arm]:
    if not arguments.transformers:
        return []
    path = str(resolve(arguments.target).path)
    main_ = "from transformers.cli.transformers import main; main()"
    command = (arguments.transformers, "-c", main_, "serve", path, "--continuous-batching", "--device", "cpu")
    body = {"model": path, "temperature": 1.0}
    return [Arm("Transformers", (*command, "--dtype", "float32"), body)]


@contextlib.contextmanager
def _started(arms: Sequence[Arm], num_threads: int) -> Iterator[dict[Sequence[str], str]]:
    """A server for each command: its address."""
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    urls: dict[Sequence[str], str] = {}
    with contextlib.ExitStack() as stack:
        for command in dict.fromkeys(arm.command for arm in arms):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            null = subprocess.DEVNULL
            process = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=null, stderr=null)
            stack.enter_context(_ended(process))
            urls[command] = f"http://127.0.0.1:{port}"
            # One after the other, since some of them measure while they start.
            _wait_until_ready(urls[command], process, command)
        yield urls


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait(_LIMIT_S)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], command: Sequence[str]) -> None:
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"this ended at once: {' '.join(command)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)


async def _load(url: str, arm: Arm, num_clients: int, seconds: float) -> Load:
    load = Load()
    requests, seeds = zip(itertools.cycle(PROMPTS), itertools.cycle(_NUM_TOKENS), strict=False), itertools.count()
    begin = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S, limits=httpx.Limits(max_connections=None)) as http:

        async def client() -> None:
            while time.perf_counter() < begin + seconds:
                prompt, num_tokens = next(requests)
                body = (
                    arm.body
                    | {"prompt": prompt, "max_tokens": num_tokens}
                    | ({"seed": next(seeds)} if arm.is_seeded else {})
                )
                try:
                    await _request(http, body, load)
                except httpx.ConnectError:  # it has ended
                    load.num_failed += 1
                    return
                except httpx.HTTPError:  # llama.cpp closes connections without notice; the next one is new
                    load.num_failed += 1

        await asyncio.gather(*(client() for _ in range(num_clients)))
    load.seconds = time.perf_counter() - begin
    return load


async def _request(http: httpx.AsyncClient, body: dict[str, Any], load: Load) -> None:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    begin, first, last, num_tokens = time.perf_counter(), 0.0, 0.0, 0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            value = json.loads(line.removeprefix("data: "))
            if value.get("usage"):
                num_tokens = value["usage"]["completion_tokens"]
            if any(choice["text"] for choice in value["choices"]):
                last = time.perf_counter()
                first = first or last
    load.num_tokens += num_tokens
    load.first_s.append(first - begin)
    if num_tokens > 1 and last > first:
        load.token_s.append((last - first) / (num_tokens - 1))


def _latencies(loads: Sequence[Load]) -> dict[str, float]:
    """Of all requests, in milliseconds: the median and the worst of a hundred."""
    found = {}
    for name in ("first", "token"):
        values = [1e3 * value for load in loads for value in getattr(load, f"{name}_s")]
        cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [math.nan] * 99
        found |= {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98]}
    return found


def _print(arms: Sequence[Arm], clients: Sequence[int], loads: dict[tuple[str, int], list[Load]]) -> None:
    console = Console(width=120)
    table = new_table("tokens/s", "server", *(f"{n} clients" if n > 1 else "1 client" for n in clients))
    for arm in arms:
        table.add_row(arm.name, *(f"{median(one.rate for one in loads[arm.name, n]):.0f}" for n in clients))
    console.print(table)
    for name, about in (("first", "time to the first tokens"), ("token", "time per token")):
        table = new_table(f"{about}, ms: median / 99th percentile", "server", *map(str, clients))
        for arm in arms:
            cells = (_latencies(loads[arm.name, n]) for n in clients)
            table.add_row(arm.name, *(f"{one[f'{name}_p50_ms']:.1f} / {one[f'{name}_p99_ms']:.1f}" for one in cells))
        console.print(table)
    for (name, n), them in loads.items():
        if num_failed := sum(one.num_failed for one in them):
            console.print(f"{name}, {n} clients: {num_failed} requests without an answer")
    for name in (_AUTO, _SEEDED):
        ratios = []
        for n in clients:
            turns = zip(loads[name, n], loads[_PLAIN, n], loads[_CONSTANT, n], strict=True)
            ratios.append(geometric_mean(one.rate / max(plain.rate, k.rate) for one, plain, k in turns))
        console.print(f"{name}, over the better of plain and K = {_K}: {', '.join(f'{one:.2f}' for one in ratios)}")


if __name__ == "__main__":
    main()
