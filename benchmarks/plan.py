"""Whether what ``outrider plan`` predicts comes true, and whether its choice is the best that can be measured.

    python benchmarks/plan.py --target fable --target GROWN [--draft fable-draft --draft ngram ...] [--threads 2]

For each target, ``outrider plan --measure`` at K = 1, 2, 4, 8: predicted speed-up of every draft, speed-up measured in
the same run with other seeds (arms in turn, 95% interval over the prompts), and the difference. The costs behind the
prediction are timed between the prompts of the measurement; tau, the tokens per round, is not taken from it. At
temperature 0 tau is known exactly beforehand; else both taus are estimates, each with an error of its own. Then what
the plan would choose (before anything was measured) against the best of all that was measured, plain decoding included.
The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.report import interval_text
from outrider.bench.tables import new_table
from outrider.stats.intervals import Interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append")
    parser.add_argument("--draft", action="append")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--acceptance", default="rejection")
    arguments = parser.parse_args()
    console = Console(width=100)
    documents = {}
    for target in arguments.target or ["fable"]:
        document = planned(target, arguments)
        documents[Path(target).name] = document
        report(console, f"{Path(target).name}, temperature {arguments.temperature:g}", document)
    print(json.dumps(documents))


def planned(target: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The document of ``outrider plan``."""
    command = [sys.executable, "-m", "outrider", "plan", "--measure", "--json", "-", "-k", "1,2,4,8"]
    command += ["--target", target, "--acceptance", arguments.acceptance]
    command += ["--threads", str(arguments.threads), "-t", str(arguments.temperature)]
    command += ["-n", str(arguments.max_new_tokens)]
    for draft in arguments.draft or ["fable-draft", "ngram"]:
        command += ["--draft", draft]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def report(console: Console, title: str, document: dict[str, Any]) -> None:
    choices = {(one["draft"], one["k"]): one for one in document["predicted"]}
    measured = {(one["draft"], one["k"]): Interval(**one["speed_up"]) for one in document["measured"][1:]}
    tau = {(one["draft"], one["k"]): one["stats"]["mean_acceptance_length"] for one in document["measured"][1:]}
    table = new_table(title, "draft", "K", "predicted", "measured, 95%", "difference", "tau", "measured")
    for (draft, k), interval in measured.items():
        predicted = choices[draft, k]["speed_up"]["value"]
        difference = predicted / interval.value - 1
        taus = choices[draft, k]["tau"]["value"], tau[draft, k]
        row = Path(draft).name, str(k), f"{predicted:.2f}", interval_text(interval), f"{difference:+.1%}"
        table.add_row(*row, *(f"{value:.2f}" for value in taus))
    console.print(table)
    chosen = document["settings"][0]["best"]
    reached = measured[chosen["draft"], chosen["k"]].value if chosen else 1.0
    best = max([1.0, *(interval.value for interval in measured.values())])
    name = f"{Path(chosen['draft']).name}, K = {chosen['k']}" if chosen else "none"
    console.print(f"The plan chooses {name}: {reached:.2f} measured, {reached / best:.1%} of the best, {best:.2f}.\n")


if __name__ == "__main__":
    main()
