"""A server under mixed load and faults: does it answer everything, once, with the right text, and keep its memory?

    python benchmarks/soak.py [--requests 20000] [--malformed 1000] [--clients 16] [--log /dev/full]
    python benchmarks/soak.py --hostile [--attacks NAME ...] [--windows 3 | --minutes M] [--window-requests 60]

The server is a process of its own, with a tiny model whose weights hold a NaN at one word. Its log goes to a full disk.
Clients send, at random: texts whole and streamed, chats, scored prompts, several choices, clients that leave (before
the answer, in the middle of it, in the middle of their own request), prompts that are too long, prompts with the word
that gives NaN, requests with wrong fields, and bodies that are no requests, each another.

Each answer is checked: a text has its tokens and one end; an error has a status and OpenAI's form, and names the field
where one is wrong; nobody gets both. Half of the texts are greedy, half are sampled under `gumbel`; each is the same
bytes as that of plain decoding, alone, with the seed that the answer states. Memory is that of the server's process
(resident), after a tenth of the requests and at the end.

With ``--hostile`` the embedded pair is served to ordinary clients, in quiet windows and beside attacks (hostile.py).
It passes if no ordinary request is lost, their 99th percentile stays within twice its quiet value, memory within 200
MB, and the log within a megabyte. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from answered import Wrong, refused, streamed, text
from hostile import ATTACKS, NUM_CLIENTS, hostile, keys, print_hostile

import outrider
from outrider.system.provenance import provenance

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from pairs import broken_model, word_tokenizer

_Answer = tuple[str, dict[str, Any], str]  # a prompt, its options, and the text that came
_CONTEXT = 64
_LIMIT_S = 60.0
_KINDS = {  # kind: its share
    "whole": 30,
    "streamed": 30,
    "chat": 8,
    "scored": 6,
    "choices": 6,
    "leaves before the answer": 4,
    "leaves in mid-stream": 4,
    "leaves in its request": 2,
    "too long": 4,
    "NaN": 3,
    "wrong field": 3,
}
_WRONG: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("top_p", 2),
    ("n", 0),
    ("max_tokens", "many"),
    ("stop", 7),
    ("seed", "x"),
    ("logit_bias", {"x": 1}),
    ("tools", [{}]),
    ("prompt", []),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="with those that are malformed")
    parser.add_argument("--malformed", type=int, default=1_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--log", default="/dev/full")
    parser.add_argument("--hostile", action="store_true", help="hostile requests beside ordinary clients")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--windows", type=int, default=3, help="quiet ones, and as many hostile ones")
    parser.add_argument("--minutes", type=float, help="as many windows as begin in this time")
    parser.add_argument("--per-client", type=int, default=1, help="most texts of a client, running or waiting")
    parser.add_argument("--window-requests", type=int, default=60, help="of each ordinary client in a window")
    arguments = parser.parse_args()
    result = _hostile(arguments) if arguments.hostile else _faults(arguments)
    print(json.dumps({"provenance": provenance("cpu"), **result}))
    if not result["is_passed"]:
        sys.exit(1)


def _faults(arguments: argparse.Namespace) -> dict[str, Any]:
    answers: list[_Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        options = ["--target", str(_model(Path(folder))), "--draft", "ngram", "-k", "4", "--slots", "8"]
        options += ["--context", str(_CONTEXT), "--acceptance", "gumbel"]
        with _server(options, Path(arguments.log)) as (url, process):
            result = asyncio.run(_soak(url, process, arguments, answers))
            process.send_signal(signal.SIGTERM)
            result["exit_code"] = process.wait(_LIMIT_S)
        different = _different(Path(folder), answers)
    result |= {"num_compared": len(answers), "num_different": len(different), "different": different[:20]}
    result["is_passed"] = (
        not result["wrong"]
        and not different
        and result["exit_code"] == -signal.SIGTERM
        and result["memory_growth"] < 1.03
    )
    _print(result)
    return result


def _hostile(arguments: argparse.Namespace) -> dict[str, Any]:
    """A slot for every client, and one text of each: so nobody waits for a slot, but for the others' work. With more
    texts of each (--per-client) they wait until a text is paused."""
    num_slots, per_client = NUM_CLIENTS + len(arguments.attacks), str(arguments.per_client)
    options = ["--draft", "none", "--slots", str(num_slots), "--max-per-client", per_client, "--context", "1024"]
    os.environ["OUTRIDER_API_KEY"] = keys(arguments.attacks)
    options += ["--threads", "1"]  # more wait for each other where other processes compute
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with _server(options, log) as (url, process):
            windows: Iterable[int] = range(arguments.windows)
            if arguments.minutes is not None:
                end_s = time.monotonic() + 60 * arguments.minutes
                windows = itertools.takewhile(lambda _: time.monotonic() < end_s, itertools.count())
            found = hostile(url, psutil.Process(process.pid), arguments.attacks, windows, arguments.window_requests)
            result = asyncio.run(found)
            process.send_signal(signal.SIGTERM)
            result["exit_code"] = process.wait(_LIMIT_S)
        result["log_bytes"] = log.stat().st_size
    result["is_passed"] = (
        not result["lost"]
        and not result["wrong"]
        and result["exit_code"] == -signal.SIGTERM
        and result["p99_ratio"] <= 2
        and result["memory_growth_bytes"] <= 200 * 2**20
        and result["log_bytes"] <= 2**20
    )
    print_hostile(result)
    return result


@contextlib.contextmanager
def _server(options: list[str], log: Path) -> Iterator[tuple[str, Any]]:
    """Its address and process."""
    port = _free_port()
    command = [sys.executable, "-c", "from outrider.cli.app import main; main()", "serve", "--device", "cpu"]
    with (
        open(log, "w") as stderr,
        subprocess.Popen([*command, *options, "--port", str(port)], stderr=stderr) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process)
            yield url, process
        finally:
            process.kill()


def _model(folder: Path) -> Path:
    broken_model(folder)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
    return port


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None, "the server has ended"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)


def _different(model: Path, answers: list[_Answer]) -> list[str]:
    """Answers whose text is not that of plain decoding, alone."""
    plain = outrider.load(model)
    assert plain.target.execution.name == "native"
    found = []
    for prompt, options, answer in answers:
        (twin,) = plain.generate([prompt], acceptance="gumbel", ignore_eos=True, logit_bias={7: -100}, **options)
        if twin.text != answer:
            found.append(f"{prompt!r} {options}: {answer!r} in place of {twin.text!r}")
    return found


async def _soak(
    url: str, process: subprocess.Popen[bytes], arguments: argparse.Namespace, answers: list[_Answer]
) -> dict[str, Any]:
    rng = random.Random(0)
    kinds = rng.choices(list(_KINDS), _KINDS.values(), k=arguments.requests - arguments.malformed)
    work = [(kind, rng.getrandbits(32)) for kind in kinds]
    work += [("malformed", body) for body in malformed_bodies(rng, arguments.malformed)]
    rng.shuffle(work)
    server = psutil.Process(process.pid)
    counts: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    memory: list[int] = []
    marks = {len(work) // 10, len(work) // 2}
    begin = time.perf_counter()
    num_done = 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal num_done
        while work:
            kind, what = work.pop()
            try:
                statuses[await _send(http, kind, what, answers)] += 1
            except Exception as error:  # whatever it is, it is a fault to report
                wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            counts[kind] += 1
            num_done += 1
            if num_done in marks:
                memory.append(server.memory_info().rss)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(arguments.clients)))
        seconds = time.perf_counter() - begin
        is_idle = False
        for _ in range(100):  # those that were left leave before the next round
            found = (await http.get("/metrics")).text
            values = dict(re.findall(r"^outrider:(num_\w+)\{[^}]*\} (\S+)$", found, re.MULTILINE))
            is_idle = values["num_free_slots"] == "8.0" and values["num_requests_waiting"] == "0.0"
            if is_idle:
                break
            await asyncio.sleep(0.1)
        if not is_idle:
            wrong.append("slots are not free in the end")
        if (await http.get("/health")).status_code != 200:
            wrong.append("the server is not healthy in the end")
    memory.append(server.memory_info().rss)
    return {
        "num_requests": sum(counts.values()),
        "seconds": seconds,
        "by_kind": dict(counts),
        "by_status": {str(status): count for status, count in sorted(statuses.items())},
        "num_wrong": len(wrong),
        "wrong": wrong[:20],
        "memory_bytes": memory,
        "memory_growth": memory[-1] / memory[0],
        "num_threads": server.num_threads(),
        "num_files": server.num_fds(),
    }


def malformed_bodies(rng: random.Random, count: int) -> list[bytes]:
    """Bodies that are no requests, each another: noise, cut JSON, other values, wrong types."""
    bodies: set[bytes] = set()
    whole = json.dumps({"prompt": "w1 w2", "max_tokens": 4, "stop": ["w9"], "logit_bias": {"3": 1.5}})
    while len(bodies) < count:
        noise = rng.randbytes(rng.randint(1, 60))
        value = rng.choice([None, True, rng.random(), [], {}, [[rng.random()]], {"a": rng.random()}, -rng.random()])
        bodies.add(
            rng.choice(
                [
                    noise,
                    whole[: rng.randint(1, len(whole) - 1)].encode() + noise[:2],
                    json.dumps([rng.random(), value]).encode(),
                    json.dumps({"prompt": value, "user": rng.random()}).encode(),
                    json.dumps({"prompt": "w1", rng.choice(["n", "stop", "stream"]): {"x": rng.random()}}).encode(),
                    b"[" * rng.randint(1, 5000),
                    b'{"prompt": "' + noise.replace(b'"', b"'") + b'\\ud800"}',
                ]
            )
        )
    return sorted(bodies)


async def _send(http: httpx.AsyncClient, kind: str, what: Any, answers: list[_Answer]) -> int:
    """The status of one request. Raises Wrong."""

    def note(choices: list[dict[str, Any]]) -> int:
        for choice in choices:
            words = choice["message"]["content"] if "message" in choice else choice["text"]
            options = {"max_new_tokens": num_tokens, "temperature": body["temperature"], "seed": choice["seed"]}
            answers.append((prompt, options, words))
        return 200

    if kind == "malformed":
        response = await http.post("/v1/completions", content=what, headers={"content-type": "application/json"})
        return refused(response, 400)
    rng = random.Random(what)
    prompt = " ".join(f"w{rng.choice([i for i in range(90) if i != 7])}" for _ in range(rng.randint(1, 20)))
    num_tokens = rng.randint(1, 24)
    # The model itself must not generate the word that gives NaN.
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "logit_bias": {"7": -100}}
    body["temperature"] = rng.choice([0, 1])
    if rng.random() < 0.5:
        body["seed"] = rng.randint(0, 9)
    if kind == "whole":
        response = await http.post("/v1/completions", json=body | {"logprobs": rng.choice([None, 2])})
        return note(text(response, num_tokens))
    if kind == "streamed":
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        return note(await streamed(http, asked, num_tokens))
    if kind == "chat":
        del body["prompt"]
        chat = body | {"messages": [{"role": "user", "content": prompt}]}
        return note(text(await http.post("/v1/chat/completions", json=chat), num_tokens))
    if kind == "scored":
        echo = body | {"prompt": prompt + " w1", "echo": True, "logprobs": 1}
        response = await http.post("/v1/completions", json=echo)
        (choice,) = response.json()["choices"]
        if len(choice["logprobs"]["token_logprobs"]) != len(prompt.split()) + 1 + num_tokens:
            raise Wrong("a token is not scored")
        text(response, num_tokens)
        choice["text"] = choice["text"].removeprefix(prompt + " w1")
        prompt += " w1"
        return note([choice])
    if kind == "choices":
        return note(text(await http.post("/v1/completions", json=body | {"n": 3}), 3 * num_tokens))
    if kind == "too long":
        return refused(await http.post("/v1/completions", json=body | {"prompt": "w1 " * 80}), 400, "prompt")
    if kind == "wrong field":
        name, value = rng.choice(_WRONG)
        return refused(await http.post("/v1/completions", json=body | {name: value}), 400, name)
    if kind == "NaN":
        # With a status when streamed, too, since nothing was sent before.
        asked = body | {"prompt": "w3 w7 w8", "stream": rng.random() < 0.5}
        return refused(await http.post("/v1/completions", json=asked), 500)
    return await _leave(http, kind, body, rng)


async def _leave(http: httpx.AsyncClient, kind: str, body: dict[str, Any], rng: random.Random) -> int:
    """0: nobody waited for the status."""
    body |= {"max_tokens": 40}
    if kind == "leaves in its request":
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: 1000\r\n\r\n" + json.dumps(body).encode())
        await writer.drain()
        writer.close()
        return 0
    if kind == "leaves before the answer":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.02):
                await http.post("/v1/completions", json=body)
        return 0
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.aiter_lines()
        for _ in range(rng.randint(1, 6)):
            await anext(lines, None)
    return 0


def _print(result: dict[str, Any]) -> None:
    print(f"{result['num_requests']} requests in {result['seconds']:.0f} s, {result['num_wrong']} answered wrongly")
    for kind, count in sorted(result["by_kind"].items(), key=lambda item: -item[1]):
        print(f"  {kind:26} {count:6}")
    print("status (0: nobody waited for it)")
    for status, count in result["by_status"].items():
        print(f"  {status:26} {count:6}")
    mib = ", ".join(f"{one / 2**20:.1f}" for one in result["memory_bytes"])
    print(f"memory after a tenth, after half, at the end: {mib} MiB ({result['memory_growth']:.3f} times)")
    print(f"threads {result['num_threads']}, open files {result['num_files']}, exit code {result['exit_code']}")
    print(f"{result['num_compared']} texts beside plain decoding alone: {result['num_different']} differ")
    for one in (*result["wrong"], *result["different"]):
        print("WRONG", one)


if __name__ == "__main__":
    main()
