"""Many prompts of uneven length through few slots: refilled at once, against batches that wait for their longest row.

    python benchmarks/refill.py [--target fable] [--draft fable-draft] [-k 4] [--prompts 200] [--slots 8] [--threads 2]

Each prompt has its own number of new tokens, from 8 to 256, drawn with a fixed seed. "batches" are calls of
``generate`` with as many prompts as there are slots, one after the other: rows leave them, and are not replaced.
"refilled" is one call: the next prompt takes the slot of a row that has ended. The ideal is the ratio of rounds: the
gain if a round cost the same at every number of rows, and no slot were ever empty. At temperature 1, prefill included.
The arms
take turns, each turn with other prompts. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median

import torch
from intervals import interval_text
from rich.console import Console

from outrider.api import load
from outrider.decoder import Decoder
from outrider.measure.intervals import paired_ratio
from outrider.measure.tables import new_table
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_SHORTEST, _LONGEST = 8, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pair = load(arguments.target, arguments.draft, device="cpu", dtype="float32", num_draft_tokens=arguments.k)
    arms = {
        "plain, batches": (pair.plain(), False, None),
        "plain, refilled": (pair.plain(), True, None),
        f"K = {arguments.k}, refilled": (pair, True, None),
        "K = auto, refilled": (pair, True, "auto"),
    }
    rng = random.Random(0)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    lengths_of_turns = []
    for decoder, is_refilled, k in arms.values():  # unmeasured: memory is taken, costs are measured
        _seconds(decoder, [_SHORTEST] * (2 * arguments.slots), arguments.slots, is_refilled, k)
    for _ in range(arguments.turns):
        lengths = [rng.randint(_SHORTEST, _LONGEST) for _ in range(arguments.prompts)]
        lengths_of_turns.append(lengths)
        for name, (decoder, is_refilled, k) in arms.items():
            rates[name].append(sum(lengths) / _seconds(decoder, lengths, arguments.slots, is_refilled, k))
    baseline = rates["plain, batches"]
    title = f"{Path(arguments.target).name}, {arguments.prompts} prompts, {arguments.slots} slots, eager"
    table = new_table(f"{title}, {arguments.threads} threads", "arm", "tokens/s", "/ batches")
    for name, taken in rates.items():
        table.add_row(name, f"{median(taken):.0f}", interval_text(paired_ratio(taken, baseline)))
    Console(width=100).print(table)
    ideal = median(_ideal(lengths, arguments.slots) for lengths in lengths_of_turns)
    print(f"ideal refilling of plain decoding: {ideal:.2f}")
    print(json.dumps({"tokens_per_s": rates, "ideal": ideal, "provenance": provenance("cpu")}))


def _seconds(decoder: Decoder, lengths: list[int], num_slots: int, is_refilled: bool, k: str | None) -> float:
    step = len(lengths) if is_refilled else num_slots
    begin = time.perf_counter()
    for start in range(0, len(lengths), step):
        part = lengths[start : start + step]
        prompts = [PROMPTS[(start + i) % len(PROMPTS)] for i in range(len(part))]
        decoder.generate(prompts, max_new_tokens=part, ignore_eos=True, num_slots=num_slots, num_draft_tokens=k)
    return time.perf_counter() - begin


def _ideal(lengths: list[int], num_slots: int) -> float:
    """Rounds of batches over rounds of slots that are never empty."""
    batches = [lengths[start : start + num_slots] for start in range(0, len(lengths), num_slots)]
    return sum(map(max, batches)) / (sum(lengths) / num_slots)


if __name__ == "__main__":
    main()
