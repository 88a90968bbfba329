"""Time of K tokens drafted in one forward (PARD), over that of a draft step of the same model.

    python benchmarks/parallel_drafts.py > benchmarks/results/parallel_drafts.txt

The embedded pair; its draft drafts one token after the other, and, with token 4095 as its mask token, all in one
forward. (The time does not depend on the weights. `--trained` is a checkpoint of that model trained to fill in the mask
tokens; with it tau is compared, too.) Rounds of the loop are interleaved; times are medians of the rounds' draft time.
The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.decoding.engine import decode
from outrider.drafters.base import Drafter
from outrider.drafters.model import ModelDrafter
from outrider.options import Sampling
from outrider.records import Request, Stats
from outrider.sampling.rules import BLOCK
from outrider.stats.counts import tau_interval
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_KS = (1, 2, 4, 8)
_NUM_PASSES = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = load("fable", "fable-draft", device="cpu")
    one_by_one = decoder.drafter
    assert isinstance(one_by_one, ModelDrafter)
    at_once = replace(one_by_one, mask_id=4095)
    if arguments.trained is not None:
        trained = load_drafter(decoder, arguments.trained)
        assert isinstance(trained, ModelDrafter) and trained.mask_id is not None
        at_once = trained
    drafters = {"one by one": one_by_one, "at once": at_once}
    console = Console(width=100)
    times = _times(decoder, drafters)
    steps = {k: times["one by one", k] for k in _KS}
    step_s = (steps[8] - steps[1]) / 7  # of a further token
    rows = [
        {"draft": name, "k": k, "draft_s": seconds, "steps": seconds / step_s} for (name, k), seconds in times.items()
    ]
    table = Table(title=f"Draft times of a round, ms; a draft step takes {1e3 * step_s:.3f} ms")
    for title in ("draft", "K", "ms", "in draft steps"):
        table.add_column(title, justify="right")
    for (name, k), seconds in times.items():
        table.add_row(name, str(k), f"{1e3 * seconds:.2f}", f"{seconds / step_s:.2f}")
    console.print(table)
    taus = []
    if arguments.trained is not None:
        for temperature in (0.0, 1.0):
            for k in (4, 8):
                for name, drafter in drafters.items():
                    tau = tau_interval(_stats(decoder, drafter, k, temperature))
                    assert tau is not None
                    taus.append({"draft": name, "k": k, "temperature": temperature, "tau": tau.to_json()})
                    bounds = f"{tau.low:.2f} to {tau.high:.2f}"
                    console.print(f"temperature {temperature:g}, K = {k}, {name}: tau {tau.value:.2f} ({bounds})")
    print(json.dumps({"results": {"times": rows, "tau": taus}, "provenance": provenance("cpu")}))


def _requests(decoder: Decoder, max_new_tokens: int, temperature: float) -> list[Request]:
    return [
        Request(decoder.encode(prompt), Sampling(seed=i, temperature=temperature, max_new_tokens=max_new_tokens))
        for i, prompt in enumerate(PROMPTS)
    ]


def _times(decoder: Decoder, drafters: Mapping[str, Drafter]) -> dict[tuple[str, int], float]:
    """Seconds of drafting in a round of one row, by drafter and K."""
    seconds: dict[tuple[str, int], list[float]] = {(name, k): [] for k in _KS for name in drafters}
    requests = _requests(decoder, 40, 1.0)
    for i in range(_NUM_PASSES):
        for key, found in seconds.items():
            one = [requests[i % len(requests)]]
            rounds = list(decode(decoder.target, drafters[key[0]], one, BLOCK, num_draft_tokens=key[1]))
            if i > 0:
                found += [round_.timing.draft_s for round_ in rounds[1:-2]]
    return {key: statistics.median(found) for key, found in seconds.items()}


def _stats(decoder: Decoder, drafter: Drafter, k: int, temperature: float) -> Sequence[Stats]:
    requests = _requests(decoder, 96, temperature)
    stats = [Stats()] * len(requests)
    for round_ in decode(decoder.target, drafter, requests, BLOCK, num_draft_tokens=k):
        for row in round_.rows:
            stats[row.row] += row.stats
    return stats


if __name__ == "__main__":
    main()
