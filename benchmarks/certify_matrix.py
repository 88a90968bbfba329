"""Certificates of the embedded pair for every rule, draft, temperature, filter and batch size: a night's work.

    python benchmarks/certify_matrix.py --output matrix.jsonl [--num-tokens 3000] [--compile] > certify_matrix.txt

240 certificates. Each is written to the output as it is had, so that a run that was cut off goes on where it was. The
probability that any of them gives a false alarm is 0.001 in all: each has its share. Where nothing alarms but a
control was missed, twice as many tokens are taken, up to eight times as many.

In the tables stands the deviation in total variation towards the draft that would have been found out with 99%, or what
went wrong; at temperature 0, where texts are compared, "same". The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
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
_MOST_TIMES = 8  # as many tokens

Cell = tuple[str, str, float, str, int]
"""rule, draft, temperature, filter, batch size"""


def cells() -> list[Cell]:
    return list(itertools.product(RULES, DRAFTS, TEMPERATURES, FILTERS, BATCH_SIZES))


def certified(decoder: Decoder, cell: Cell, num_tokens: int) -> dict[str, Any]:
    """The row of a cell, with its certificate."""
    rule, _, temperature, name, batch_size = cell
    sampling = Sampling(temperature=temperature, max_new_tokens=64, **FILTERS[name])
    prompts = [tuple(decoder.encode(prompt)) for prompt in PROMPTS]
    level = LEVEL / len(cells())
    job = Job(replace(decoder, acceptance=rule), sampling, prompts, level, batch_size, seed=0)
    began = time.perf_counter()
    pilot = fly(job)
    tokens = num_tokens
    certificate = certify(job, pilot, tokens)
    while only_missed(certificate) and tokens < _MOST_TIMES * num_tokens:
        tokens *= 2
        certificate = certify(job, pilot, tokens)
    return {"cell": list(cell), "seconds": time.perf_counter() - began, **certificate.to_json()}


def only_missed(certificate: Certificate) -> bool:
    """Whether all that stands against it is that a control was not found out."""
    statistical = certificate.statistical
    is_content = certificate.exact.is_ok and all(one.is_ok for one in certificate.greedy)
    return is_content and statistical is not None and statistical.is_ok and not certificate.is_certified


def missing(done: list[dict[str, Any]]) -> Iterator[Cell]:
    there = {tuple(row["cell"]) for row in done}
    return (cell for cell in cells() if cell not in there)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-tokens", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    done = []
    if arguments.output.exists():
        done = [json.loads(line) for line in arguments.output.read_text().splitlines()]
    plain = load("fable", compile=arguments.compile)
    drafters = {name: load_drafter(plain, name) for name in DRAFTS}
    if arguments.compile:
        drafters = {name: drafter.compiled() for name, drafter in drafters.items()}
    for cell in missing(done):
        row = certified(replace(plain, drafter=drafters[cell[1]]), cell, arguments.num_tokens)
        done.append(row)
        with arguments.output.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(len(done), *cell, verdict(row), f"{row['seconds']:.0f} s", sep=", ", file=sys.stderr, flush=True)
    console = Console(width=100)
    report(console, done)
    rows = [{key: row[key] for key in ("cell", "seconds", "is_certified")} | summary(row) for row in done]
    print(json.dumps({"cells": rows, "compiled": arguments.compile, "provenance": provenance("cpu")}))


def summary(row: dict[str, Any]) -> dict[str, Any]:
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


def verdict(row: dict[str, Any]) -> str:
    if not row["exact"]["is_ok"]:
        return "exact: failed"
    if not all(one["is_ok"] for one in row["greedy"]):
        return "text: failed"
    statistical = row["statistical"]
    if statistical is not None and not statistical["is_ok"]:
        return "alarm"
    if not row["is_certified"]:
        return "missed " + ", ".join(c["name"] for c in row["controls"] if c["excuse"] is None and not c["is_caught"])
    if statistical is None:
        return "same"
    return "certified" if statistical["detectable"] is None else f"{statistical['detectable']:.1%}"


def report(console: Console, done: list[dict[str, Any]]) -> None:
    by_cell = {tuple(row["cell"]): row for row in done}
    for draft, batch_size in itertools.product(DRAFTS, BATCH_SIZES):
        table = new_table(f"{draft}, batches of {batch_size}", "temperature", "filter", *RULES)
        for temperature, name in itertools.product(TEMPERATURES, FILTERS):
            found = [by_cell[rule, draft, temperature, name, batch_size] for rule in RULES]
            table.add_row(f"{temperature:g}", name, *map(verdict, found))
        console.print(table)
    num_certified = sum(row["is_certified"] for row in done)
    ps = [p for row in done if (p := summary(row)["smallest_p"]) is not None]
    controls = [summary(row) for row in done]
    num_caught, num_made = (sum(one[key] for one in controls) for key in ("num_caught", "num_controls"))
    console.print(
        f"{num_certified} of {len(done)} certified; {num_caught} of {num_made} mistakes found out; "
        f"smallest p of a test {min(ps):.1g} among {8 * len(ps)} tests; {sum(r['seconds'] for r in done) / 3600:.1f} h."
    )


if __name__ == "__main__":
    main()
