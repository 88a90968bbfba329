"""Certificates of the embedded pair for every rule, draft, temperature, filter and batch size: a night's work.

    python benchmarks/certify_matrix.py --output matrix.jsonl [--num-tokens 3000] [--draft ngram ...] > matrix.txt

240 certificates at a level of 0.001 each. Known mistakes are of `rejection` whatever rule is certified, and what rows
do beside each other does not change them, so they are made once for all rules, in batches of 4; so is the pilot run.
What is done is written to the output, so that a run that was cut off goes on where it was. If it is run again with more
tokens or more prompts, it does again where nothing was wrong but that a mistake had been missed. Several may share the
work by --draft, --temperature and --batch-size, each with an output of its own, and --report takes these together.

In the tables stands the deviation in total variation towards the draft that would have been found out with 99%, or what
went wrong; at temperature 0, where texts are compared, "same". The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.api import load, load_drafter
from outrider.certify.design import num_tests
from outrider.certify.run import CertifyTask, certify, run_pilot
from outrider.decoder import Decoder
from outrider.measure.tables import new_table
from outrider.options import Sampling
from outrider.sampling.rules import REJECTION, RULES
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

DRAFTS = ("fable-draft", "ngram")
TEMPERATURES = (0.0, 0.5, 1.0, 1.5)
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k 20": {"top_k": 20},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalty 1.2": {"repetition_penalty": 1.2},
}
BATCH_SIZES = (1, 4)
LEVEL = 1e-3

Group = tuple[str, float, str, int]
"""draft, temperature, filter, batch size"""
Row = dict[str, Any]


def groups(drafts: Sequence[str], temperatures: Sequence[float], batch_sizes: Sequence[int]) -> list[Group]:
    return list(itertools.product(drafts, temperatures, FILTERS, batch_sizes))


def certified(decoder: Decoder, group: Group, num_tokens: int, num_prompts: int) -> list[Row]:
    """A row for each rule; that of `rejection` has the controls."""
    _, temperature, name, batch_size = group
    sampling = Sampling(temperature=temperature, max_new_tokens=64, **FILTERS[name])
    prompts = [tuple(decoder.encode(prompt)) for prompt in PROMPTS[:num_prompts]]
    jobs = {
        rule: CertifyTask(replace(decoder, acceptance=rule), sampling, prompts, LEVEL, batch_size, seed=0)
        for rule in RULES
    }
    began = time.perf_counter()
    pilot = run_pilot(jobs[REJECTION.name])
    rows = []
    for rule, job in jobs.items():
        has_controls = rule == REJECTION.name and batch_size == max(BATCH_SIZES)
        certificate = certify(job, pilot, num_tokens, controls=None if has_controls else ())
        rows.append({"group": list(group), "rule": rule, "num_prompts": num_prompts, **certificate.to_json()})
    seconds = (time.perf_counter() - began) / len(rows)
    return [row | {"seconds": seconds, "asked": [num_tokens, num_prompts]} for row in rows]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--draft", action="append", choices=DRAFTS)
    parser.add_argument("--temperature", action="append", choices=TEMPERATURES, type=float)
    parser.add_argument("--batch-size", action="append", choices=BATCH_SIZES, type=int)
    parser.add_argument("--num-tokens", type=int, default=3000)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", type=Path, nargs="*", help="outputs of other runs, to be told of with this one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asked = [arguments.num_tokens, arguments.num_prompts]
    done = {(*row["group"], row["rule"]): row for row in read(arguments.output)}  # the last of each counts
    there = [row["group"] for row in done.values() if not has_missed(row) or row["asked"] == asked]
    plain = load("fable")
    chosen = arguments.draft or DRAFTS, arguments.temperature or TEMPERATURES, arguments.batch_size or BATCH_SIZES
    for group in groups(*chosen):
        if there.count(list(group)) == len(RULES):
            continue
        rows = certified(replace(plain, drafter=load_drafter(plain, group[0])), group, *asked)
        done |= {(*group, row["rule"]): row for row in rows}
        with arguments.output.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        print(*group, *map(verdict, rows), f"{3 * rows[0]['seconds']:.0f} s", sep=", ", file=sys.stderr, flush=True)
    for path in arguments.report or ():
        done |= {(*row["group"], row["rule"]): row for row in read(path)}
    report(Console(width=100), done)
    kept = "group", "rule", "seconds", "verdict", "num_prompts"
    rows = [{key: row[key] for key in kept} | summary(row) for row in done.values()]
    print(json.dumps({"certificates": rows, "provenance": provenance("cpu")}))


def has_missed(row: Row) -> bool:
    """Whether there were too few tokens. (An alarm is not tried again.)"""
    return row["verdict"] == "inconclusive"


def summary(row: Row) -> Row:
    """What is kept of a certificate in the document."""
    statistical = row["statistical"] or {}
    controls = [control for control in row["controls"] if control["excuse"] is None]
    return {
        "num_tokens": statistical.get("num_tokens"),
        "detectable": statistical.get("detectable"),
        "smallest_p": min((test["p"] for test in statistical.get("tests", [])), default=None),
        "num_controls": len(controls),
        "num_caught": sum(control["is_caught"] for control in controls),
    }


def verdict(row: Row) -> str:
    statistical = row["statistical"]
    if row["verdict"] == "failed":
        has_bug = any(one["verdict"] == "bug" for report in row["greedy"] for one in report["differences"])
        return "text: failed" if has_bug else "alarm"
    if row["verdict"] != "passed":
        missed = [c["name"] for c in row["controls"] if c["excuse"] is None and not c["is_caught"]]
        return "missed " + ", ".join(missed) if missed else "idle" if row["is_idle"] else "too few"
    if statistical is None:
        return "same"
    return "certified" if statistical["detectable"] is None else f"{statistical['detectable']:.1%}"


def report(console: Console, done: Mapping[tuple[Any, ...], Row]) -> None:
    for draft, batch_size in itertools.product(DRAFTS, BATCH_SIZES):
        table = new_table(f"{draft}, batches of {batch_size}", "temperature", "filter", *RULES)
        for temperature, name in itertools.product(TEMPERATURES, FILTERS):
            rows = [done.get((draft, temperature, name, batch_size, rule)) for rule in RULES]
            if any(rows):
                table.add_row(f"{temperature:g}", name, *("not run" if row is None else verdict(row) for row in rows))
        if table.row_count:
            console.print(table)
    summaries = [summary(row) for row in done.values()]
    ps = [one["smallest_p"] for one in summaries if one["smallest_p"] is not None]
    num_caught, num_made = (sum(one[key] for one in summaries) for key in ("num_caught", "num_controls"))
    num_certified = sum(row["verdict"] == "passed" for row in done.values())
    hours = sum(row["seconds"] for row in done.values()) / 3600
    console.print(
        f"{num_certified} of {len(done)} certified; {num_caught} of {num_made} mistakes found out; "
        f"smallest p {min(ps):.1g} among {num_tests(has_rounds=True) * len(ps)} tests; {hours:.1f} h of one thread."
    )


if __name__ == "__main__":
    main()
