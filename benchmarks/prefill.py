"""How long a prompt takes: beside other programs, and in a batch of prompts of different lengths. On the CPU, in
float32 or four bits.

    python benchmarks/grow.py fable grown-110m-2k --hidden-size 768 --num-layers 14 --intermediate-size 2304 \\
        --context-len 2048
    python benchmarks/prefill.py --target grown-110m-2k --llama-server llama-build/bin/llama-server

``grow.py fable fable-2k --hidden-size 256 --num-layers 6 --intermediate-size 704 --context-len 2048`` makes the
embedded target accept as much. llama.cpp is built as peers.py describes; ``pip install gguf`` for its format. Two GGUF
files (``--target FILE.gguf --draft FILE.gguf``) are compared with llama.cpp alone, activations in 8 bits, without the
batch.

A prompt: calls of one greedy token for prompts of random tokens, a new one in each turn, so that no program finds one
in a cache; wall clock, all programs in turn, each in a process of its own (peer_arms/). A batch: calls of one token
for eight rows of 20 to 500 tokens. ``together`` is one call; ``one by one`` is a call for each row; ``as one row`` is a
single prompt of as many tokens, whose products are as wide as can be; ``as long as the longest`` is one call for eight
rows of 500 tokens, which is the cost of padding. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peer_arms.hugging_face import hf_arms
from peer_arms.llama_cpp import llama_cpp_arms, llama_cpp_build
from peer_arms.own import outrider_arms
from peer_arms.worker import Worker
from rich.console import Console

from outrider.api import load
from outrider.bench.report import interval_text
from outrider.bench.tables import new_table
from outrider.models.registry import resolve
from outrider.options import DEFAULT_ACCEPTANCE
from outrider.stats.intervals import paired_ratio
from outrider.system.provenance import provenance

_ARMS = {
    "float32": ("Outrider eager, plain", "HF, plain", "llama.cpp f32, plain", "llama.cpp f16, plain"),
    "gguf": ("Outrider a8, plain", "llama.cpp f16, plain"),
}
_LENGTHS = (130, 20, 500, 80, 280, 45, 370, 200)
_PAUSE_S = 0.1  # idle threads of one arm spin for a while before they sleep, and would slow the next


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a known name, a folder, or a GGUF file")
    parser.add_argument("--draft", default="fable-draft", help="the arms want one of the same kind; none uses it")
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's server, built for this machine")
    parser.add_argument("--tokens", default="512,2000", help="lengths of single prompts, by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    lengths = [int(text) for text in arguments.tokens.split(",")]
    server = arguments.llama_server.resolve()
    num_threads, num_repeats = arguments.threads, arguments.repeats
    torch.set_num_threads(num_threads)
    names = arguments.target, arguments.draft
    weights = "gguf" if arguments.target.endswith(".gguf") else "float32"
    target, draft = (Path(name if weights == "gguf" else resolve(name).location) for name in names)
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
    console.print(f"llama.cpp: {llama_cpp_build(server)}")
    with TemporaryDirectory() as folder:
        more = server, num_threads, longest + 8, Path(folder)
        workers = [
            Worker(outrider_arms, (target, draft, (), DEFAULT_ACCEPTANCE, weights), num_threads),
            Worker(llama_cpp_arms, (target, draft, (), *more, weights), num_threads),
        ]
        if weights == "float32":
            workers.append(Worker(hf_arms, (target, draft, ()), num_threads))
        places = {arm.name: (worker, index) for worker in workers for index, arm in enumerate(worker.arms)}

        def alone(name: str, num_tokens: int) -> float:
            worker, index = places[name]
            time.sleep(_PAUSE_S)
            _, seconds = worker.run(index, prompt(num_tokens), 0.0, 0, 1)
            return seconds

        singles = {}
        try:
            for n in lengths:
                singles[n] = _in_turn({name: partial(alone, name, n) for name in _ARMS[weights]}, num_repeats)
                _show(console, f"a prompt of {n} tokens", singles[n], _ARMS[weights][0], "Outrider / it, 95%")
        finally:
            for worker in workers:
                worker.stop()

    def together(lengths: Sequence[int]) -> float:
        rows = [prompt(n) for n in lengths]
        begin = time.perf_counter()
        decoder.generate(rows, max_new_tokens=1, temperature=0.0, ignore_eos=True)
        return time.perf_counter() - begin

    body = {"target": target.name, "seconds": singles, "provenance": origin}
    if weights == "float32":
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
