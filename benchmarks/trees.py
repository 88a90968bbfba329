"""Trees of drafts, and several paths, against the best chain.

    python benchmarks/trees.py --measure-costs --threads 2 > benchmarks/results/trees_costs.txt
    python benchmarks/trees.py spec_bench.jsonl hellaswag_prompts.jsonl stories.txt \\
        --costs benchmarks/results/trees_costs.txt > benchmarks/results/trees.txt

The embedded target continues the first N prompts of each file under Gumbel noise, with a seed for each. tree_rounds.py
finds the expected rounds of chains, trees and paths along these sequences; tree_checks.py compares it with the engine,
with best-first search and with an enumeration. Drafts: the embedded one; one that sees the last two tokens only (weak);
the mean of the embedded draft's and the target's logits (strong; along every third sequence).

Costs are those measured here, where a column more is not free, and those of free columns, as on a GPU: a verify costs 1
for any N, a draft forward c for any number of nodes. Making the tree itself (the best of N x V scores in each level)
costs nothing here, which flatters trees. Standard errors are from resampled sequences; the choice of the fastest K,
depth and tau is not resampled. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tree_rounds import SIZES, Arm, Studied, drafts, prompts_of, recorded, study

from outrider.api import load, load_drafter
from outrider.bench.round_costs import CostArm, time_rounds
from outrider.drafters.base import Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.placement import Placement
from outrider.replay.renewal import Floats
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from outrider.system.provenance import provenance

_FREE = (0.05, 0.1, 0.2)  # c: a draft forward over a verify
_WIDTHS = (1, 5, 17, 61)  # columns whose forwards are timed
_LENGTH = 130  # tokens before them: views and caches do not grow during the measurement
_NUM_WIDTHS = max(SIZES) + 2
_DEPTHS = (4, 8, 16)  # of trees, in the first table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("-n", "--num-prompts", type=int, default=8, help="of each file")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--drafts", nargs="+", default=["fable-draft", "weak", "strong"])
    parser.add_argument("--taus", type=float, nargs="+", default=[0.2, 0.35, 0.5, 0.7])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--costs", type=Path, help="output of --measure-costs")
    parser.add_argument("--measure-costs", action="store_true", help="only that")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = load("fable", device="cpu", dtype="float32")
    drafter = load_drafter(decoder, "fable-draft", placement=Placement("cpu", "float32"))
    if arguments.measure_costs:
        found = {decoder.target.execution.name: measured_costs(decoder.target, drafter)}
        print(json.dumps({"results": found, "provenance": provenance("cpu")}))
        return
    costs = {f"free, c = {c:g}": Costs.free(c) for c in _FREE}
    if arguments.costs:
        measured = json.loads(arguments.costs.read_text().splitlines()[-1])["results"]
        costs |= {kind: Costs.of(one) for kind, one in measured.items()}
    prompts = [ids for path in arguments.files for ids in prompts_of(decoder, path, arguments.num_prompts)]
    console, results = Console(width=150), []
    for temperature in arguments.temperatures:
        texts = recorded(decoder.target, prompts, temperature)
        known = {draft.name: draft for draft in drafts(decoder.target, drafter.models[0])}
        for draft in (known[name] for name in arguments.drafts):
            studied = study(decoder.target, draft, texts[:: draft.stride], temperature, arguments.taus)
            result = {"temperature": temperature, "draft": draft.name, **summarised(studied, costs)}
            results.append(result)
            report(console, result)
    print(json.dumps({"results": results, "num_texts": len(prompts), "provenance": provenance("cpu")}))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a forward, by its columns. [62]"""

    verify: Floats
    draft: Floats

    def seconds(self, arm: Arm) -> Floats:
        """Of each sequence. [X]"""
        total: Floats = arm.rounds * self.verify[arm.size + 1] + arm.forwards @ self.draft
        return total

    @classmethod
    def free(cls, c: float) -> Costs:
        """Costs, over a verify, where columns are free."""
        return cls(np.ones(_NUM_WIDTHS), np.full(_NUM_WIDTHS, c))

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Costs:
        """Costs from ``measured_costs``. A draft forward costs a draft step, and more by the same factor as a wider
        forward of the draft as a target."""
        columns = np.arange(_NUM_WIDTHS)
        verify = np.interp(columns, measured["widths"], measured["verify_s"])
        draft = np.interp(columns, measured["widths"], measured["draft_verify_s"])
        return cls(verify + measured["rest_s"], draft * measured["draft_step_s"] / draft[1])


def measured_costs(target: LM, drafter: Drafter) -> dict[str, Any]:
    """Times of verifies of target and draft by their columns, of a draft step, and of the rest of a round."""
    draft = drafter.models[0]
    look_up = NgramDrafter()
    arms = [CostArm(lm, look_up, width - 1) for lm in (target, draft) for width in _WIDTHS]
    arms.append(CostArm(target, drafter, 4))
    taken = time_rounds(arms, REJECTION, num_rows=1, length=_LENGTH, num_passes=25)
    *forwards, pair = taken
    verifies = [statistics.median(one.verify_s for one in found) for found in forwards]
    return {
        "widths": _WIDTHS,
        "verify_s": verifies[: len(_WIDTHS)],
        "draft_verify_s": verifies[len(_WIDTHS) :],
        "draft_step_s": statistics.median(one.draft_s for one in pair) / 4,
        "rest_s": statistics.median(one.decode_s - one.verify_s - one.draft_s for one in pair),
    }


def summarised(studied: Studied, costs: Mapping[str, Costs]) -> dict[str, Any]:
    """Tokens per round of all arms, and for each cost the best arm of each kind and size, with standard errors."""
    num = len(studied.alphas)
    resampled = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), 2000).astype(float)

    def ratio(above: Floats, below: Floats) -> tuple[float, float]:
        value, error = above.sum() / below.sum(), np.std((resampled @ above) / (resampled @ below))
        return round(float(value), 4), round(float(error), 4)

    def speed_ratio(one: Arm, other: Arm, cost: Costs) -> tuple[float, float]:
        gains = [
            (weights @ one.tokens)
            * (weights @ cost.seconds(other))
            / ((weights @ cost.seconds(one)) * (weights @ other.tokens))
            for weights in (np.ones(num), resampled)
        ]
        return round(float(gains[0]), 4), round(float(np.std(gains[1])), 4)

    tokens = [
        {"kind": one.kind, "size": one.size, "depth": one.depth, "tau": one.tau}
        | dict(zip(("tokens", "error"), ratio(one.tokens, one.rounds), strict=True))
        for one in studied.arms
        if one.tau is None or one.depth in _DEPTHS
    ]
    best: dict[str, list[dict[str, Any]]] = {}
    for name, cost in costs.items():
        fastest: dict[str, tuple[float, Arm]] = {}
        for one in studied.arms:
            speed = one.tokens.sum() / cost.seconds(one).sum()
            key = one.kind if "chain" in one.kind else one.name
            if key not in fastest or speed > fastest[key][0]:
                fastest[key] = speed, one
        chain, gumbel = fastest["block chain"][1], fastest["gumbel chain"][1]
        plain_s = cost.verify[1]
        best[name] = []
        for key, (speed, one) in fastest.items():
            row = {"kind": key, "depth": one.depth, "tau": one.tau, "tokens": ratio(one.tokens, one.rounds)}
            row["speed_up"] = round(speed * plain_s, 4)
            for of, other in (("over_block_chain", chain), ("over_gumbel_chain", gumbel)):
                row[of] = speed_ratio(one, other, cost)
            best[name].append(row)
    return {"alpha": ratio(studied.alphas, np.ones(num)), "tokens": tokens, "best": best}


def report(console: Console, result: Mapping[str, Any]) -> None:
    """Tables of one draft at one temperature."""
    alpha, error = result["alpha"]
    title = f"{result['draft']}, temperature {result['temperature']:g}, alpha {alpha:.3f} +- {error:.3f}"
    table = Table(title=title, caption="tokens per round, standard error")
    table.add_column("drafts")
    for size in SIZES:
        table.add_column(f"N = {size}", justify="right")
    by_kind: dict[tuple[str, float | None], dict[tuple[int, int], str]] = {}
    for one in result["tokens"]:
        cell = f"{one['tokens']:.2f} {one['error']:.2f}"
        by_kind.setdefault((one["kind"], one["tau"]), {})[one["size"], one["depth"]] = cell
    for (kind, tau), cells in by_kind.items():
        if "chain" in kind:
            shown = ", ".join(f"K = {k}: {cells[k, k]}" for k in (2, 4, 8, 12, 16))
            console.print(f"{title}: {kind}, {shown}", soft_wrap=True)
        elif "paths" in kind:
            table.add_row(kind, *(next(cell for (n, _), cell in cells.items() if n == size) for size in SIZES))
        else:
            for depth in _DEPTHS:
                row = [cells[size, min(size, depth)] for size in SIZES]
                table.add_row(f"{kind}, tau = {tau:g}, D <= {depth}", *row)
    console.print(table)
    table = Table(title=title, caption="times the speed of plain decoding (K, or depth); over the best block chain")
    table.add_column("fastest")
    for name in result["best"]:
        table.add_column(name, justify="right")
    for rows in zip(*result["best"].values(), strict=True):
        table.add_row(rows[0]["kind"], *map(_speed, rows))
    console.print(table)


def _speed(one: Mapping[str, Any]) -> str:
    """Speed-up (depth, tau), and gain over the block chain with its standard error."""
    gain, error = one["over_block_chain"]
    shape = str(one["depth"]) if one["tau"] is None else f"{one['depth']}, {one['tau']:g}"
    return f"{one['speed_up']:.2f} ({shape}) {gain - 1:+.0%} +-{error:.0%}"


if __name__ == "__main__":
    main()
