"""``-k auto`` beside plain decoding and constant K, by the number of rows.

    python benchmarks/adaptive.py [--target fable] [--draft fable-draft] [--quantize int8] [--batch-sizes 1,2,4,8,16]
        [-k 1,2,4,6] [--threads 2] [--max-new-tokens 64] [--seconds 90] > adaptive_fable.txt

Temperature 1, no seeds. Every measurement is one call with as many prompts as it has rows, each writing the same
number of tokens; a time is the wall clock of the call, prefill included. At each number of rows all arms take turns for
``--seconds``, the first turn unmeasured. "auto" keeps what it learns from call to call, as it does in any process; the
constant arms are given their K.

Tokens per second of "auto" are compared with those of the best other arm in two ways, each with its 95% interval over
the turns. "auto / best": with the one whose mean turns out best. That mean is the largest of several noisy ones, and so
too high on average, the more the fewer turns. "fair": in each turn with the arm whose mean over all other turns is
best, so that no arm is chosen by the time that it is compared on. The last line of standard output is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import torch
from intervals import interval_text
from rich.console import Console

from outrider.api import load
from outrider.decoder import Decoder
from outrider.measure.intervals import paired_ratio
from outrider.measure.tables import new_table
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_LEAST_TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("--quantize", choices=["int8"], help="of the target")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16")
    parser.add_argument("-k", default="1,2,4,6", help="constant K, by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=90.0, help="for each number of rows")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes, ks = ([int(text) for text in values.split(",")] for values in (arguments.batch_sizes, arguments.k))
    pair = load(arguments.target, arguments.draft, device="cpu", dtype="float32", quantization=arguments.quantize)
    arms: dict[str, Decoder] = {"plain": pair.plain()}
    arms |= {f"K = {k}": replace(pair, num_draft_tokens=k) for k in ks}
    arms["auto"] = replace(pair, num_draft_tokens="auto")
    form = arguments.quantize or "float32"
    title = (
        f"{Path(arguments.target).name}, {form}, {pair.target.execution.name}, {arguments.threads} threads: tokens/s"
    )
    table = new_table(title, "rows", "turns", *arms, "best other", "auto / best", "fair")
    rows = []
    for size in sizes:
        rates = measure(arms, size, arguments.max_new_tokens, arguments.seconds)
        means = {name: geometric_mean(taken) for name, taken in rates.items()}
        best = max((name for name in arms if name != "auto"), key=means.__getitem__)
        ratio = paired_ratio(rates["auto"], rates[best])
        chosen = best_of_other_turns(rates)
        fair = paired_ratio(rates["auto"], [rates[name][turn] for turn, name in enumerate(chosen)])
        cells = (f"{mean:.0f}" for mean in means.values())
        num_turns = len(rates["auto"])
        table.add_row(str(size), str(num_turns), *cells, best, interval_text(ratio), interval_text(fair))
        found = {"best": best, "auto_over_best": ratio.to_json(), "fair": fair.to_json(), "chosen": chosen}
        rows.append({"num_rows": size, "tokens_per_s": rates} | found)
    Console(width=140).print(table)
    print(json.dumps({"rows": rows, "arguments": vars(arguments), "provenance": provenance("cpu")}))


def measure(arms: Mapping[str, Decoder], size: int, num_tokens: int, seconds: float) -> dict[str, list[float]]:
    """Tokens per second of each arm, turn by turn; which arm begins a turn changes with the turn."""
    rates: dict[str, list[float]] = defaultdict(list)
    names, turn, begin = list(arms), -1, time.perf_counter()
    while turn < _LEAST_TURNS or time.perf_counter() - begin < seconds:
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            rate = tokens_per_s(arms[name], size, num_tokens, max(turn, 0))
            if turn >= 0:
                rates[name].append(rate)
        turn += 1
    return {name: rates[name] for name in names}


def tokens_per_s(decoder: Decoder, size: int, num_tokens: int, turn: int) -> float:
    prompts = [PROMPTS[(turn * size + i) % len(PROMPTS)] for i in range(size)]
    begin = time.perf_counter()
    decoder.generate(prompts, max_new_tokens=num_tokens, ignore_eos=True, temperature=1.0)
    return size * num_tokens / (time.perf_counter() - begin)


def best_of_other_turns(rates: Mapping[str, Sequence[float]]) -> list[str]:
    """For each turn the arm but "auto" with the best mean over all turns but this one."""
    others = [name for name in rates if name != "auto"]

    def mean(name: str, left_out: int) -> float:
        return geometric_mean(rate for turn, rate in enumerate(rates[name]) if turn != left_out)

    return [max(others, key=lambda name: mean(name, turn)) for turn in range(len(rates["auto"]))]


if __name__ == "__main__":
    main()
