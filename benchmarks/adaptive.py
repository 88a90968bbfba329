"""``-k auto`` beside plain decoding and constant K, by the number of rows.

    python benchmarks/adaptive.py [--target fable] [--draft fable-draft] [--quantize int8] [--batch-sizes 1,2,4,8,16]
        [-k 1,2,4,6] [--threads 2] [--max-new-tokens 64] [--turns 4] > adaptive_fable.txt

Eager, temperature 1, no seeds. Every measurement is one call with as many prompts as it has rows, each writing the same
number of tokens; a time is the wall clock of the call, prefill included. All arms take turns. "auto / best" is the
ratio of tokens per second to those of the best other arm at this number of rows, with its 95% interval over the turns.
The best one is known only in the end, and is the best of several noisy means. The last line of standard output is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import torch
from batch import tokens_per_s
from rich.console import Console

from outrider.api import load
from outrider.bench.report import interval_text, new_table
from outrider.decoder import Decoder
from outrider.stats.intervals import paired_ratio
from outrider.system.provenance import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("--quantize", choices=["int8"], help="of the target")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16")
    parser.add_argument("-k", default="1,2,4,6", help="constant K, by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes, ks = ([int(text) for text in values.split(",")] for values in (arguments.batch_sizes, arguments.k))
    pair = load(arguments.target, arguments.draft, device="cpu", dtype="float32", quantization=arguments.quantize)
    arms: dict[str, Decoder] = {"plain": pair.plain()}
    arms |= {f"K = {k}": replace(pair, num_draft_tokens=k) for k in ks}
    arms["auto"] = replace(pair, num_draft_tokens="auto")
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for turn in range(-1, arguments.turns):  # the first is not measured
        for size in sizes:
            for place in range(len(arms)):
                name = list(arms)[(place + turn) % len(arms)]
                rate = tokens_per_s(arms[name], size, arguments.max_new_tokens, max(turn, 0), is_seeded=False)
                if turn >= 0:
                    rates[name, size].append(rate)
    form = arguments.quantize or "float32"
    title = f"{Path(arguments.target).name}, {form}, eager, {arguments.threads} threads: tokens/s"
    table = new_table(title, "rows", *arms, "best other", "auto / best")
    rows = []
    for size in sizes:
        means = {name: geometric_mean(rates[name, size]) for name in arms}
        best = max((name for name in arms if name != "auto"), key=means.__getitem__)
        ratio = paired_ratio(rates["auto", size], rates[best, size])
        table.add_row(str(size), *(f"{mean:.0f}" for mean in means.values()), best, interval_text(ratio))
        taken = {name: rates[name, size] for name in arms}
        rows.append({"num_rows": size, "tokens_per_s": taken, "best": best, "auto_over_best": ratio.to_json()})
    Console(width=110).print(table)
    print(json.dumps({"rows": rows, "arguments": vars(arguments), "provenance": provenance("cpu")}))


if __name__ == "__main__":
    main()
