"""Two adapters of one base on one server: memory, and the time of two busy models.

    python benchmarks/several_models.py memory [--target fable] [--draft fable-draft]
    python benchmarks/several_models.py time [--turns 5] [--requests 8]

The adapters (LoRA of the attention's query and value projections, random) are made here. "memory": a server has the
base alone, one the base and an adapter, one the base and both; each model has the draft as well. Memory is what a
server holds privately when it is ready (RssAnon of Linux).

"time": the same requests, all at once to each model, of fixed seeds and lengths (K = 4): first to one adapter and, when
they are answered, to the other; and to both at the same time. The two take turns; wall-clock time and the server's
processor time, which other programs disturb less. Then one stream to an adapter, alone and while the other is busy. The
last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import httpx
import peft
import torch
from transformers import AutoModelForCausalLM

from outrider.models.registry import resolve
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_LIMIT_S, _NUM_TOKENS, _NUM_STREAM_TOKENS = 120.0, 64, 160
_NAMES = ("one", "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "time"])
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        adapters = _adapters(arguments.target, Path(folder))
        found = (_memory if arguments.what == "memory" else _time)(adapters, arguments)
    print(json.dumps({"provenance": provenance("cpu"), **found, "arguments": vars(arguments)}))


def _memory(adapters: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    memory: dict[str, float] = {}
    for models in (("base",), ("base", "one"), ("base", *_NAMES)):
        with _server(models, adapters, arguments) as (_, pid):
            (kib,) = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        memory[" + ".join(models)] = int(kib) / 1024
        print(f"{' + '.join(models)}: {int(kib) / 1024:.0f} MiB")
    return {"memory_mib": memory}


def _time(adapters: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    arms = {"one after the other": False, "together": True}
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    with _server(_NAMES, adapters, arguments) as (url, pid):
        for turn in range(-1, arguments.turns):
            for arm in (*arms,)[:: -1 if turn % 2 else 1]:
                begin_s, begin_cpu_s = time.perf_counter(), _cpu_s(pid)
                asyncio.run(_both(url, arguments.requests, is_together=arms[arm]))
                if turn >= 0:  # the first is not measured
                    times[arm].append((time.perf_counter() - begin_s, _cpu_s(pid) - begin_cpu_s))
        alone, beside = (asyncio.run(_stream(url, arguments.requests * is_busy)) for is_busy in (False, True))
    num_tokens = 2 * arguments.requests * _NUM_TOKENS
    for arm, own in times.items():
        wall_s, cpu_s = (median(one) for one in zip(*own, strict=True))
        print(f"{arm}: {wall_s:.2f} s, {num_tokens / wall_s:.0f} tokens/s; {cpu_s:.2f} s of the processor")
    for which, name in enumerate(("time", "processor time")):
        pairs = zip(times["together"], times["one after the other"], strict=True)
        ratios = [together[which] / apart[which] for together, apart in pairs]
        spread = f"{geometric_mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{name} of together over that of one after the other: {spread}")
    print(f"a stream alone: {alone:.0f} tokens/s; beside {arguments.requests} of the other model: {beside:.0f}")
    return {"seconds_and_processor_seconds": times, "stream_tokens_per_s": {"alone": alone, "beside": beside}}


def _adapters(target: str, folder: Path) -> dict[str, str]:
    """Names of the base and of two adapters of it."""
    path = resolve(target).location
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = {"base": path}
    for seed, name in enumerate(_NAMES):
        torch.manual_seed(seed)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=8, init_lora_weights=False)
        adapted: Any = peft.get_peft_model(model, config)
        for key, weight in adapted.named_parameters():
            if "lora_B" in key:
                weight.data.mul_(0.02)  # a small change, so that drafts are still accepted
        adapted.save_pretrained(folder / name)
        model = adapted.unload()
        found[name] = f"{path}+{folder / name}"
    return found


@contextlib.contextmanager
def _server(
    models: Sequence[str], adapters: dict[str, str], arguments: argparse.Namespace
) -> Iterator[tuple[str, int]]:
    """A server that is ready: its address and process."""
    (first, target), *added = ((name, adapters[name]) for name in models)
    words = ["--target", target, "--served-model-name", first, "--draft", arguments.draft, "-k", "4"]
    words += [word for name, target in added for word in ("--add-model", f"{name}={target}")]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    main_ = "from outrider.cli.app import main; main()"
    command = [sys.executable, "-c", main_, "serve", "--device", "cpu", "--context", "512", "--port", port, *words]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(_LIMIT_S)


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def _both(url: str, num_requests: int, *, is_together: bool) -> None:
    async with httpx.AsyncClient(timeout=_LIMIT_S, limits=httpx.Limits(max_connections=None)) as http:
        asked = [_ask(http, url, name, num_requests) for name in _NAMES]
        if is_together:
            await asyncio.gather(*asked)
        else:
            for one in asked:
                await one


async def _ask(http: httpx.AsyncClient, url: str, name: str, num_requests: int, num_tokens: int = _NUM_TOKENS) -> None:
    async def one(which: int) -> None:
        body = {"model": name, "prompt": PROMPTS[which % len(PROMPTS)], "seed": which, "max_tokens": num_tokens}
        response = await http.post(f"{url}/v1/completions", json=body | {"ignore_eos": True, "temperature": 1.0})
        response.raise_for_status()

    await asyncio.gather(*map(one, range(num_requests)))


async def _stream(url: str, num_others: int) -> float:
    """Tokens per second of one request, while so many of the other model run."""
    async with httpx.AsyncClient(timeout=_LIMIT_S, limits=httpx.Limits(max_connections=None)) as http:
        others = asyncio.create_task(_ask(http, url, "other", num_others, 250))
        await asyncio.sleep(1.0)
        begin_s = time.perf_counter()
        await _ask(http, url, "one", 1, _NUM_STREAM_TOKENS)
        seconds = time.perf_counter() - begin_s
        assert others.done() == (num_others == 0)
        await others
    return _NUM_STREAM_TOKENS / seconds


if __name__ == "__main__":
    main()
