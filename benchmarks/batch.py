"""Tokens per second of batches, against those of one sequence.

    python benchmarks/batch.py [--target fable] [--draft fable-draft] [-k 4] [--batch-sizes 1,2,4,8] [--threads 2]

Compiled; plain and speculative; at temperature 1. Every batch is one call with as many prompts as it has rows,
each writing the same number of tokens; a time is the wall clock of the call, prefill included. The sizes take turns,
after the same work, with the same seeds, unmeasured. "/ batch 1" is the ratio of tokens per second, with its 95%
interval over the turns. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from outrider.api import load
from outrider.bench.report import interval_text
from outrider.bench.tables import new_table
from outrider.decoder import Decoder
from outrider.stats.intervals import paired_ratio
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--batch-sizes", default="1,2,4,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options = {"device": "cpu", "dtype": "float32", "acceptance": "rejection", "num_draft_tokens": arguments.k}
    pair = load(arguments.target, arguments.draft, **options)
    decoders = {"plain": pair.plain(), f"speculative, K = {arguments.k}": pair}
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    rates: dict[tuple[str, int], list[float]] = {arm: [] for arm in product(decoders, sizes)}
    for is_measured in (False, True):  # the same work unmeasured first, so that what happens once has happened
        for turn in range(arguments.turns):
            for (name, size), taken in rates.items():
                rate = tokens_per_s(decoders[name], size, arguments.max_new_tokens, turn)
                if is_measured:
                    taken.append(rate)
    title = f"{Path(arguments.target).name}, {arguments.threads} threads"
    table = new_table(title, "arm", "batch", "tokens/s", f"/ batch {sizes[0]}")
    rows = []
    for (name, size), taken in rates.items():
        ratio = paired_ratio(taken, rates[name, sizes[0]])
        table.add_row(name, str(size), f"{median(taken):.0f}", interval_text(ratio))
        rows.append({"arm": name, "batch_size": size, "tokens_per_s": taken})
    Console(width=100).print(table)
    print(json.dumps({"rows": rows, "provenance": provenance("cpu")}))


def tokens_per_s(decoder: Decoder, size: int, num_tokens: int, turn: int, *, is_seeded: bool = True) -> float:
    prompts = [PROMPTS[(turn * size + i) % len(PROMPTS)] for i in range(size)]
    seeds = [turn * size + i for i in range(size)] if is_seeded else None
    begin = time.perf_counter()
    decoder.generate(prompts, max_new_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=seeds)
    return size * num_tokens / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
