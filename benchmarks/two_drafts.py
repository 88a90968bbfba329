"""One draft against another, for the same target.

    python benchmarks/two_drafts.py --draft OLD --draft NEW [--target fable ...] [-k 2-6] ...

Plain decoding and both drafts at each K, arms in turn, over the 15 built-in prompts, temperature 1 and greedy. For each
target: tokens per second of each arm, and how many times as fast the second draft at its best K is as the first at its
own, prompt by prompt, with a 95% interval. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.api import load, load_drafter
from outrider.bench.report import ArmSummary, interval_text, summarise, table
from outrider.bench.run import Arm, Case, Measurement, arms_by_k, interleave, warm_up
from outrider.cli.shared.options import parse_k
from outrider.models.placement import Placement
from outrider.stats.intervals import Interval, paired_ratio
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--target", action="append")
    parser.add_argument("-k", default="2-6")
    parser.add_argument("--acceptance", default="rejection")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    if len(arguments.draft) != 2:
        parser.error("two drafts")
    torch.set_num_threads(arguments.threads)
    console = Console(width=100)
    results: list[dict[str, Any]] = []
    for target in arguments.target or ["fable"]:
        rule = arguments.acceptance
        decoder = load(target, device="cpu", dtype="float32", acceptance=rule)
        arms = [Arm("plain", decoder)]
        for draft in arguments.draft:
            drafter = load_drafter(decoder, draft, placement=Placement("cpu", "float32"))
            arms += arms_by_k(replace(decoder, drafter=drafter), draft, parse_k(arguments.k))
        for temperature in (0.0, 1.0):
            options = {"temperature": temperature, "max_new_tokens": arguments.max_new_tokens, "ignore_eos": True}
            cases = [Case(index, prompt, index) for index, prompt in enumerate(PROMPTS)]
            warm_up(arms, cases, options)
            measurements = list(interleave(arms, cases, options))
            summaries = summarise(measurements, arms)
            console.print(table(summaries, f"{Path(target).name}, {rule}, temperature {temperature:g}"))
            old, new = (best(summaries, draft) for draft in arguments.draft)
            ratio = faster(measurements, old.arm, new.arm)
            console.print(
                f"{new.arm.name} is {interval_text(ratio)} times as fast as {old.arm.name}: "
                f"{new.tokens_per_s:.0f} against {old.tokens_per_s:.0f} tokens/s.\n"
            )
            results.append(
                {
                    "target": Path(target).name,
                    "acceptance": rule,
                    "temperature": temperature,
                    "ratio": ratio.to_json(),
                    "arms": [summary.to_json() for summary in summaries],
                }
            )
    print(json.dumps({"results": results, "provenance": provenance("cpu")}))


def best(summaries: list[ArmSummary], draft: str) -> ArmSummary:
    """Its fastest arm."""
    return max((one for one in summaries if one.arm.draft == draft), key=lambda one: one.tokens_per_s)


def faster(measurements: list[Measurement], old: Arm, new: Arm) -> Interval:
    """How many times as fast ``new`` decodes as ``old``, prompt by prompt."""
    times = [[m.decode_s_per_token for m in measurements if m.arm == arm] for arm in (old, new)]
    return paired_ratio(*times)


if __name__ == "__main__":
    main()
