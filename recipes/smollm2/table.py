"""What trained drafts promised, and what they give: acceptance by task, predicted and measured speed.

    python recipes/smollm2/table.py TARGET FOLDER [--drafts model eagle3 suffix] [--k 1 2 3 4]
        [--num-prompts 10] [--tokens 96] [--threads 1] [--larger TARGET DRAFT]

FOLDER is that of ``train.sh``: held-out logs, and drafts. For each draft:

- alpha and tokens per second, which ``distill`` stated before and after training;
- alpha, and tau at the best K, by task, at temperature 0 and 1, on the first prompts of each task that were held out;
- the speed-up over plain decoding that ``plan`` predicts from these counts and from timed rounds, and the one measured
  on the same prompts (arms in turn; the 95% interval is over prompts).

``--larger`` names another target and any model that drafts for it. Its rounds are timed, for the speed-up that the
acceptance measured here would give there: if a drafted token took as many milliseconds as here, and if it took as large
a part of a plain step. The last line of standard output is one JSON document.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.distill.student import TOKENS
from outrider.drafters.base import Drafter
from outrider.measure.arms import Arm, Case, interleave, warm_up
from outrider.measure.intervals import paired_ratio
from outrider.measure.log import Log, Record
from outrider.measure.replay import replay, summarise
from outrider.measure.round_costs import Costs, RoundCost, choices, measure_costs
from outrider.measure.tables import new_table
from outrider.measure.tau import tau_interval
from outrider.options import Sampling
from outrider.records import Stats
from outrider.sampling.rules import BLOCK
from outrider.system.provenance import provenance

KINDS = "chat", "text"
TEMPERATURES = 0, 1
CONTEXT = 256  # tokens of a sequence when rounds are timed

Counts = Mapping[tuple[str, int], Sequence[Stats]]


def name_of(folder: Path, draft: str) -> str:
    """Name that ``--draft`` takes."""
    path = folder / "drafts" / draft
    tokens = f":vocab={path / TOKENS}" if (path / TOKENS).exists() else ""
    return f"{path}{tokens}" if path.exists() else draft


def held_out(folder: Path, temperature: int, num_prompts: int) -> Iterator[tuple[Log, list[Record]]]:
    """Logs, and the first records of each of their tasks."""
    for kind in KINDS:
        log, found = Log.open(folder / "logs" / f"{kind}-held-out-t{temperature}.jsonl"), defaultdict(list)
        for record in log.records:
            found[record.category].append(record)
        yield log, [record for records in found.values() for record in records[:num_prompts]]


def judged(
    decoder: Decoder, draft: str, drafter: Drafter, logs: Sequence[tuple[Log, list[Record]]], ks: Sequence[int]
) -> tuple[dict[str, Any], Counts]:
    """alpha and tau by task, and the expected rounds of all prompts by K."""
    by_task: dict[str, Any] = {}
    counts: dict[tuple[str, int], list[Stats]] = defaultdict(list)
    for log, records in logs:
        groups = defaultdict(list)
        for one in replay(records, log.header, drafter, BLOCK.name, ks, target=decoder.target):
            groups[one.category].append(one)
        for task, group in groups.items():
            expected, alpha = summarise(group, ks)
            taus = {k: tau_interval(expected[k]) for k in ks}
            by_task[str(task)] = {
                "alpha": alpha and alpha.value,
                "tau": {k: tau and tau.value for k, tau in taus.items()},
            }
            for k in ks:
                counts[draft, k] += expected[k]
    return by_task, counts


def elsewhere(costs: Costs, larger: Costs, name: str, *, is_part: bool) -> Costs:
    """Costs of rounds of the larger target with a draft that was timed here.

    Args:
        is_part: its steps take the same part of a plain step, not the same time.
    """
    factor = larger.plain.round_s / costs.plain.round_s if is_part else 1.0
    others = {k: cost.round_s - cost.draft_s for (_, k), cost in larger.rounds.items()}
    rounds = {
        (name, k): RoundCost(factor * cost.draft_s + others[k], factor * cost.draft_s, others[k])
        for (draft, k), cost in costs.rounds.items()
        if draft == name
    }
    return replace(larger, rounds=rounds)


def timed(target: str, draft: str, ks: Sequence[int]) -> Costs:
    """Costs of rounds of another target."""
    decoder = load(target)
    drafts = {draft: load_drafter(decoder, draft)}
    return measure_costs(decoder.target, drafts, {draft: ks}, BLOCK, Sampling(), num_rows=1, context=CONTEXT)


def best(costs: Costs, counts: Counts) -> dict[str, float]:
    """The best K, and its predicted tau and speed-up."""
    first = choices(costs, counts)[0]
    return {"k": first.k, "tau": first.tau.value, "speed_up": first.speed_up.value}


def measured(
    decoder: Decoder, arms: Mapping[str, tuple[Drafter, int]], prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> dict[str, list[float | None]]:
    """Speed-up of each arm over plain decoding, with its interval."""
    plain = Arm("plain", decoder)
    others = [Arm(name, replace(decoder, drafter=one), name, k) for name, (one, k) in arms.items()]
    cases = [Case(i, list(ids), i) for i, ids in enumerate(prompts)]
    warm_up([plain, *others], cases, options)
    seconds = defaultdict(list)
    for one in interleave([plain, *others], cases, options):
        seconds[one.arm.name].append(one.decode_s_per_token)
    found = {name: paired_ratio(seconds["plain"], each) for name, each in seconds.items() if name != "plain"}
    return {name: [one.value, one.low, one.high] for name, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drafts", nargs="+", default=["model", "eagle3", "suffix"])
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--larger", nargs=2, metavar=("TARGET", "DRAFT"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder, folder, console = load(arguments.target), arguments.folder, Console(width=150)
    drafters = {draft: load_drafter(decoder, name_of(folder, draft)) for draft in arguments.drafts}
    ks = {draft: [k for k in arguments.k if k <= (one.most_drafted or k)] for draft, one in drafters.items()}
    document: dict[str, Any] = {"promised": {}, "measured": []}
    for draft in drafters:
        path = folder / "drafts" / draft / "distill.json"
        if path.exists():
            stated = json.loads(path.read_text(encoding="utf-8"))
            document["promised"][draft] = {
                name: {"alphas": [alpha["value"] for alpha in check["alphas"]], "tokens_per_s": check["tokens_per_s"]}
                for name, check in (("before", stated["checks"][0]), ("after", stated["best"]))
            } | {"num_params": stated["num_params"]}
            console.print(draft, document["promised"][draft])
    larger = timed(arguments.larger[0], arguments.larger[1], arguments.k) if arguments.larger else None
    for temperature in TEMPERATURES:
        logs = list(held_out(folder, temperature, arguments.num_prompts))
        sampling = logs[0][0].header.sampling
        costs = measure_costs(decoder.target, drafters, ks, BLOCK, sampling, num_rows=1, context=CONTEXT)
        rows: dict[str, Any] = {}
        for draft, drafter in drafters.items():
            by_task, counts = judged(decoder, draft, drafter, logs, ks[draft])
            rows[draft] = {"tasks": by_task, "predicted": best(costs, counts)}
            rows[draft]["draft_ms"] = 1e3 * costs.draft_step_s(draft)
            if larger is not None:
                rows[draft]["larger"] = {
                    kind: best(elsewhere(costs, larger, draft, is_part=is_part), counts)
                    for kind, is_part in (("same time", False), ("same part", True))
                }
        prompts = [record.prompt_ids for _, records in logs for record in records]
        arms = {draft: (drafters[draft], int(row["predicted"]["k"])) for draft, row in rows.items()}
        options = {"max_new_tokens": arguments.tokens, "temperature": float(temperature)}
        for draft, speed_up in measured(decoder, arms, prompts, options).items():
            rows[draft]["speed_up"] = speed_up
        show(console, temperature, rows, costs)
        document["measured"].append({"temperature": temperature, "drafts": rows, "plain_ms": 1e3 * costs.plain.round_s})
    print(json.dumps(document | {"provenance": provenance("cpu")}))


def show(console: Console, temperature: int, rows: Mapping[str, Any], costs: Costs) -> None:
    tasks = list(next(iter(rows.values()))["tasks"])
    title = f"temperature {temperature}; a plain step takes {1e3 * costs.plain.round_s:.1f} ms"
    table = new_table(f"tau (alpha) by task, {title}", "draft", "ms/token", *tasks)
    for draft, row in rows.items():
        k = row["predicted"]["k"]
        cells = [f"{one['tau'][k] or 1:.2f} ({one['alpha'] or 0:.2f})" for one in row["tasks"].values()]
        table.add_row(f"{draft}, K = {k}", f"{row['draft_ms']:.2f}", *cells)
    console.print(table)
    columns = "predicted", "measured, 95%", "larger, same time", "larger, same part"
    table = new_table("speed-up over plain decoding (K)", "draft", *columns)
    for draft, row in rows.items():
        value, low, high = row["speed_up"]
        cells = [f"{one['speed_up']:.2f} ({one['k']})" for one in (row["predicted"], *row.get("larger", {}).values())]
        table.add_row(draft, cells[0], f"{value:.2f} [{low:.2f}, {high:.2f}]", *cells[1:])
    console.print(table)


if __name__ == "__main__":
    main()
