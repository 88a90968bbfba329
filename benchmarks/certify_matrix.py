"""Certificates of the embedded pair for every rule, draft, temperature, filter and batch size: a night's work.

    python benchmarks/certify_matrix.py --output matrix.jsonl [--num-tokens 3000] [--draft ngram ...] > matrix.txt

240 certificates at a level of 0.001 each. Known mistakes are of `rejection` whatever rule is certified, so they are
made once for all rules; so is the pilot run. Six prompts; where nothing alarms but a mistake was missed, all rules are
given twice as many tokens, up to eight times as many (at temperature 0, all fifteen prompts). What is done is written
to the output, so that a run that was cut off goes on where it was; several may share the work by --draft, each with an
output of its own, and --report takes these together.

In the tables stands the deviation in total variation towards the draft that would have been found out with 99%, or what
went wrong; at temperature 0, where texts are compared, "same". The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.api import Decoder, load, load_drafter
from outrider.bench.prompts import PROMPTS
from outrider.bench.report import new_table
from outrider.flow import Sampling
from outrider.lab.certificate import Certificate
from outrider.lab.certify import Job, certify, fly
from outrider.provenance import provenance
from outrider.verify import RULES

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
_NUM_PROMPTS = 6

Group = tuple[str, float, str, int]
"""draft, temperature, filter, batch size"""
Row = dict[str, Any]


def groups(drafts: Sequence[str]) -> list[Group]:
    return list(itertools.product(drafts, TEMPERATURES, FILTERS, BATCH_SIZES))


def certified(decoder: Decoder, group: Group, num_tokens: int) -> list[Row]:
    """A row for each rule; that of `rejection` has the controls."""
    _, temperature, name, batch_size = group
    sampling = Sampling(temperature=temperature, max_new_tokens=64, **FILTERS[name])
    prompts = [tuple(decoder.encode(prompt)) for prompt in PROMPTS]

    def job_of(rule: str, num_prompts: int) -> Job:
        return Job(replace(decoder, acceptance=rule), sampling, prompts[:num_prompts], LEVEL, batch_size, seed=0)

    began = time.perf_counter()
    first, *others = RULES
    sizes = [(len(prompts), num_tokens)]  # at temperature 0, prompts are all that there can be more of
    if temperature > 0:
        sizes = [(_NUM_PROMPTS, times * num_tokens) for times in (2, 4, 8)]
    num_prompts, tokens = _NUM_PROMPTS, num_tokens
    pilot = fly(job_of(first, num_prompts))
    certificate = certify(job_of(first, num_prompts), pilot, tokens)
    while only_missed(certificate) and sizes:
        num_prompts, tokens = sizes.pop(0)
        certificate = certify(job_of(first, num_prompts), pilot, tokens)
    found = {first: certificate}
    for rule in others:
        found[rule] = certify(job_of(rule, num_prompts), pilot, tokens, controls=())
    seconds = time.perf_counter() - began
    return [
        {"group": list(group), "rule": rule, "seconds": seconds / 3, **one.to_json()} for rule, one in found.items()
    ]


def only_missed(certificate: Certificate) -> bool:
    """Whether all that stands against it is that a control was not found out."""
    layers = [certificate.exact, *certificate.greedy]
    if certificate.statistical is not None:
        layers.append(certificate.statistical)
    return all(one.is_ok for one in layers) and not certificate.is_certified


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--draft", action="append", choices=DRAFTS)
    parser.add_argument("--num-tokens", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", type=Path, nargs="*", help="outputs of other runs, to be told of with this one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    done = read(arguments.output)
    there = {tuple(row["group"]) for row in done}
    plain = load("fable")
    for group in groups(arguments.draft or DRAFTS):
        if group in there:
            continue
        rows = certified(replace(plain, drafter=load_drafter(plain, group[0])), group, arguments.num_tokens)
        done += rows
        with arguments.output.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        print(*group, *map(verdict, rows), f"{3 * rows[0]['seconds']:.0f} s", sep=", ", file=sys.stderr, flush=True)
    for path in arguments.report or ():
        done += read(path)
    report(Console(width=100), done)
    rows = [{key: row[key] for key in ("group", "rule", "seconds", "is_certified")} | summary(row) for row in done]
    print(json.dumps({"certificates": rows, "provenance": provenance("cpu")}))


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
    if not row["exact"]["is_ok"]:
        return "exact: failed"
    if not all(one["is_ok"] for one in row["greedy"]):
        return "text: failed"
    statistical = row["statistical"]
    if statistical is not None and not statistical["is_ok"]:
        return "alarm"
    if not row["is_certified"]:
        missed = [c["name"] for c in row["controls"] if c["excuse"] is None and not c["is_caught"]]
        return "missed " + ", ".join(missed) if missed else "idle"
    if statistical is None:
        return "same"
    return "certified" if statistical["detectable"] is None else f"{statistical['detectable']:.1%}"


def report(console: Console, done: list[Row]) -> None:
    found = {(row["rule"], *row["group"]): row for row in done}
    for draft, batch_size in itertools.product(DRAFTS, BATCH_SIZES):
        table = new_table(f"{draft}, batches of {batch_size}", "temperature", "filter", *RULES)
        for temperature, name in itertools.product(TEMPERATURES, FILTERS):
            rows = [found.get((rule, draft, temperature, name, batch_size)) for rule in RULES]
            table.add_row(f"{temperature:g}", name, *("not run" if row is None else verdict(row) for row in rows))
        console.print(table)
    summaries = [summary(row) for row in done]
    ps = [one["smallest_p"] for one in summaries if one["smallest_p"] is not None]
    num_caught, num_made = (sum(one[key] for one in summaries) for key in ("num_caught", "num_controls"))
    num_certified, hours = sum(row["is_certified"] for row in done), sum(row["seconds"] for row in done) / 3600
    console.print(
        f"{num_certified} of {len(done)} certified; {num_caught} of {num_made} mistakes found out; "
        f"smallest p {min(ps):.1g} among {8 * len(ps)} tests; {hours:.1f} h of one thread."
    )


if __name__ == "__main__":
    main()
