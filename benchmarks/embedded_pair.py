"""Speed-up of the embedded pair over plain decoding, against K, greedy and at temperature 1.

    python benchmarks/embedded_pair.py [--threads 1] > benchmarks/results/embedded_pair.txt

All arms run in turn on the 15 built-in prompts, 64 new tokens each. A table for each temperature; the last line of
standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch

from outrider.api import load, load_drafter
from outrider.measure.arms import Arm, Case, interleave, summarise, warm_up
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = load("fable", acceptance="rejection")
    model, ngram = (replace(target, drafter=load_drafter(target, name)) for name in ("fable-draft", "ngram"))
    arms = [Arm("plain", target)]
    for acceptance in ("rejection", "block"):
        decoder = replace(model, acceptance=acceptance)
        arms += [Arm(f"{acceptance}, K = {k}", decoder, f"fable-draft, {acceptance}", k) for k in (1, 2, 3, 4, 6, 8)]
    arms.append(Arm("ngram, K = 4", ngram, "ngram", 4))
    results = {}
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_new_tokens": arguments.max_new_tokens, "ignore_eos": True}
        cases = [Case(index, prompt, index) for index, prompt in enumerate(PROMPTS)]
        warm_up(arms, cases, options)
        summaries = summarise(list(interleave(arms, cases, options)), arms)
        title = f"fable with fable-draft, temperature {temperature:g}, {arguments.threads} thread(s)"
        print(title)
        for one in summaries:
            ratio = one.speed_up
            speed_up = "" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times plain, "
            print(f"  {one.arm.name}: {speed_up}{one.tokens_per_s:.0f} tokens/s, {one.ms_per_token[0]:.2f} ms a token")
        results[f"temperature {temperature:g}"] = [summary.to_json() for summary in summaries]
    print(json.dumps({"results": results, "provenance": provenance("cpu")}))


if __name__ == "__main__":
    main()
