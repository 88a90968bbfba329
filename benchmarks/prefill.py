"""How long a prompt takes: beside other programs, and in a batch of prompts of different lengths. On the CPU, in
float32 or four bits.

    python benchmarks/grow.py fable grown-110m-2k --hidden-size 768 --num-layers 14 --intermediate-size 2304 \\
        --context-len 2048
    python benchmarks/prefill.py --target grown-110m-2k --gguf grown-110m-2k.gguf \\
        --llama-server llama-build/bin/llama-server

``grow.py fable fable-2k --hidden-size 256 --num-layers 6 --intermediate-size 704 --context-len 2048`` makes the
embedded target accept as much. llama.cpp is to be built for the machine (``-DGGML_NATIVE=ON``; its source comes with
the Python package xllamacpp); its ``convert_hf_to_gguf.py --outtype f32`` writes the target for it (``--gguf``). A GGUF
file (``--target FILE.gguf``) is compared with llama.cpp alone, activations in 8 bits, without the batch.

A prompt: calls of one greedy token for prompts of random tokens, a new one in each turn, so that no program finds one
in a cache; wall clock, all programs in turn, each in a process of its own, since the idle threads of one would slow the
others. "f32" and "f16" are types of llama.cpp's cache. A batch: calls of one token
for eight rows of 20 to 500 tokens. ``together`` is one call; ``one by one`` is a call for each row; ``as one row`` is a
single prompt of as many tokens, whose products are as wide as can be; ``as long as the longest`` is one call for eight
rows of 500 tokens, which is the cost of padding. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from intervals import interval_text
from rich.console import Console
from transformers import AutoModelForCausalLM

from outrider.api import load
from outrider.measure.intervals import paired_ratio
from outrider.measure.tables import new_table
from outrider.models.registry import resolve
from outrider.system.provenance import provenance

_LENGTHS = (130, 20, 500, 80, 280, 45, 370, 200)
_PAUSE_S = 0.1  # idle threads of one arm spin for a while before they sleep, and would slow the next

Run = Callable[[list[int]], float]
"""Token ids of a prompt -> seconds to its first token"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a known name, a folder, or a GGUF file")
    parser.add_argument("--gguf", type=Path, help="the target in float32, for llama.cpp; needed for a folder")
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's server, built for this machine")
    parser.add_argument("--tokens", default="512,2000", help="lengths of single prompts, by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    lengths = [int(text) for text in arguments.tokens.split(",")]
    server = arguments.llama_server.resolve()
    num_threads, num_repeats = arguments.threads, arguments.repeats
    torch.set_num_threads(num_threads)
    is_gguf = arguments.target.endswith(".gguf")
    if not is_gguf and arguments.gguf is None:
        parser.error("--gguf FILE: the target as llama.cpp reads it, in float32")
    target = Path(arguments.target if is_gguf else resolve(arguments.target).location)
    decoder = load(target, dtype="float32", device="cpu").plain()
    longest, vocab_size = max(*lengths, sum(_LENGTHS)), decoder.target.vocab_size
    if longest >= decoder.target.context_len:
        parser.error(f"the target accepts {decoder.target.context_len} tokens: grow one with --context-len 2048")
    rng = random.Random(0)

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(num_tokens)]

    origin = provenance("cpu")
    console = Console(width=100, highlight=False)
    console.print(f"{origin['processor']}, {num_threads} threads; torch {origin['torch']}")
    build = subprocess.run([server, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    console.print(f"llama.cpp: {' '.join((build.stdout + build.stderr).split())}")
    singles = {}
    with ExitStack() as stack:
        arms = {"Outrider": stack.enter_context(_in_process(_outrider, target, num_threads))}
        file = target if is_gguf else arguments.gguf
        if not is_gguf:
            arms["Hugging Face"] = stack.enter_context(_in_process(_hugging_face, target, num_threads))
        for cache_type in ("f16",) if is_gguf else ("f32", "f16"):
            run = stack.enter_context(_llama_cpp(server, file, cache_type, num_threads, longest + 8))
            arms[f"llama.cpp {cache_type}"] = run

        def alone(run: Run, num_tokens: int) -> float:
            time.sleep(_PAUSE_S)
            return run(prompt(num_tokens))

        for n in lengths:
            singles[n] = _in_turn({name: partial(alone, run, n) for name, run in arms.items()}, num_repeats)
            _show(console, f"a prompt of {n} tokens", singles[n], "Outrider", "Outrider / it, 95%")

    def together(lengths: Sequence[int]) -> float:
        rows = [prompt(n) for n in lengths]
        begin = time.perf_counter()
        decoder.generate(rows, max_new_tokens=1, temperature=0.0, ignore_eos=True)
        return time.perf_counter() - begin

    body = {"target": target.name, "seconds": singles, "provenance": origin}
    if not is_gguf:
        batches = _in_turn(
            {
                "together": lambda: together(_LENGTHS),
                "one by one": lambda: sum(together([n]) for n in _LENGTHS),
                "as one row": lambda: together([sum(_LENGTHS)]),
                "as long as the longest": lambda: together([max(_LENGTHS)] * len(_LENGTHS)),
            },
            num_repeats,
        )
        _show(console, f"{len(_LENGTHS)} rows, {sum(_LENGTHS)} tokens", batches, "together", "together / it, 95%")
        body |= {"lengths": _LENGTHS, "batch_seconds": batches}
    print(json.dumps(body))


@contextmanager
def _in_process(make: Callable[[Path], Callable[[list[int]], Any]], target: Path, num_threads: int) -> Iterator[Run]:
    """A program in a process of its own."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=_serve, args=(other, make, target, num_threads))
    process.start()
    other.close()

    def run(ids: list[int]) -> float:
        connection.send(ids)
        seconds: float = connection.recv()
        return seconds

    try:
        yield run
    finally:
        connection.close()
        process.join()


def _serve(connection: Connection, make: Callable[[Path], Callable[[list[int]], Any]], target: Path, num: int) -> None:
    torch.set_num_threads(num)
    run = make(target)
    while True:
        try:
            ids = connection.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        run(ids)
        connection.send(time.perf_counter() - begin)


def _outrider(target: Path) -> Callable[[list[int]], Any]:
    name = f"{target}:a8" if target.suffix == ".gguf" else target
    plain = load(name, dtype="float32", device="cpu").plain()
    return lambda ids: plain.generate([ids], max_new_tokens=1, temperature=0.0, ignore_eos=True)


def _hugging_face(target: Path) -> Callable[[list[int]], Any]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    def run(ids: list[int]) -> Any:
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)

    return run


@contextmanager
def _llama_cpp(server: Path, file: Path, cache_type: str, num_threads: int, context_len: int) -> Iterator[Run]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(num_threads)
    command = [str(server), "-m", str(file), "-t", threads, "-tb", threads, "-c", str(context_len), "-np", "1"]
    command += ["-ctk", cache_type, "-ctv", cache_type, "--cache-ram", "0", "--port", str(port)]
    # On the CPU its flash attention is the slower one with a float32 cache, and the faster one with float16.
    command += ["-fa", "off" if cache_type == "f32" else "auto"]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=null, stderr=null, stdin=null)

    def run(ids: list[int]) -> float:
        body = {"prompt": ids, "n_predict": 1, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        begin = time.perf_counter()
        _answer(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
        return time.perf_counter() - begin

    try:
        while True:
            try:
                _answer(f"http://127.0.0.1:{port}/health")
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None:
                    raise RuntimeError(f"this ended at once: {' '.join(command)}") from None
                time.sleep(0.1)
        yield run
    finally:
        process.terminate()
        process.wait()


def _answer(address: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def _in_turn(arms: dict[str, Callable[[], float]], num_repeats: int) -> dict[str, list[float]]:
    """Seconds of every arm, after a turn that is not counted. Each turn begins with another arm."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(num_repeats + 1):
        for place in range(len(arms)):
            name = list(arms)[(turn + place) % len(arms)]
            seconds = arms[name]()
            if turn > 0:
                taken[name].append(seconds)
    return taken


def _show(console: Console, title: str, taken: dict[str, list[float]], ours: str, ratio: str) -> None:
    table = new_table(title, "arm", "ms", ratio)
    for name, times in taken.items():
        over = None if name == ours else paired_ratio(taken[ours], times)
        table.add_row(name, f"{1e3 * statistics.median(times):.1f}", interval_text(over))
    console.print(table)


if __name__ == "__main__":
    main()
