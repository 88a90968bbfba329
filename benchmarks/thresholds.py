"""Whether ending drafts where the draft is unsure (`--draft NAME:min-prob=P`) pays.

    python benchmarks/thresholds.py > benchmarks/results/thresholds.txt

The embedded pair, eager, arms in turn over the 15 built-in prompts, greedy and at temperature 1: for each K and P
tokens per round, drafted tokens per round, and the speed over that without a threshold, prompt by prompt, with a 95%
interval. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.api import load, load_drafter
from outrider.bench.report import interval_text
from outrider.bench.run import Arm, Case, Measurement, interleave, warm_up
from outrider.records import Stats
from outrider.stats.intervals import Interval, paired_ratio
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_PROBS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--acceptance", default="block")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = load("fable", device="cpu", acceptance=arguments.acceptance)
    arms = [Arm("plain", decoder)]
    for k in (4, 8):
        for prob in _PROBS:
            name = "fable-draft" + (f":min-prob={prob:g}" if prob else "")
            drafting = replace(decoder, drafter=load_drafter(decoder, name))
            arms.append(Arm(f"{name}, K = {k}", drafting, name, k))
    console = Console(width=100)
    results: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_new_tokens": arguments.max_new_tokens, "ignore_eos": True}
        cases = [Case(index, prompt, index) for index, prompt in enumerate(PROMPTS)]
        warm_up(arms, cases, options)
        measurements = list(interleave(arms, cases, options))
        table = Table(title=f"Temperature {temperature:g}, {arguments.acceptance}, {arguments.threads} thread(s)")
        for title in ("K", "P", "tokens per round", "drafted", "accepted", "over P = 0", "over plain"):
            table.add_column(title, justify="right")
        for arm in arms[1:]:
            base = next(one for one in arms[1:] if one.num_draft_tokens == arm.num_draft_tokens)
            stats = sum((one.stats for one in measurements if one.arm is arm), Stats())
            tau, drafted = stats.mean_acceptance_length, stats.num_draft_tokens / stats.num_rounds
            rate = stats.draft_acceptance_rate
            ratios = [_faster(measurements, other, arm) for other in (base, arms[0])]
            assert tau is not None and rate is not None and arm.draft is not None
            prob_text = arm.draft.partition("=")[2] or "0"
            numbers = f"{tau:.2f}", f"{drafted:.2f}", f"{100 * rate:.0f}%", *map(interval_text, ratios)
            table.add_row(str(arm.num_draft_tokens), prob_text, *numbers)
            results.append(
                {"temperature": temperature, "k": arm.num_draft_tokens, "min_prob": float(prob_text), "tau": tau}
                | {"num_drafted": drafted, "over_no_threshold": ratios[0].to_json(), "over_plain": ratios[1].to_json()}
            )
        console.print(table)
    print(json.dumps({"results": results, "provenance": provenance("cpu")}))


def _faster(measurements: list[Measurement], old: Arm, new: Arm) -> Interval:
    """Times as fast, prompt by prompt."""
    before, after = ([one.decode_s_per_token for one in measurements if one.arm is arm] for arm in (old, new))
    return paired_ratio(before, after)


if __name__ == "__main__":
    main()
