"""Depth against width: drafts of about equal size, distilled equally long, and what each is worth.

    python benchmarks/design_space.py OUT --data CORPUS.txt [--target fable] [--serve GROWN] [--steps 400]

Each shape is trained by ``outrider distill`` into a folder of OUT, on the same sequences; a shape that is there already
is not trained again. Then alpha on the sequences held out, the latency of a drafted token, and the speed-up over plain
decoding at each K, arms in turn, on the target and on others that have its logits at another cost (--serve; see
grow.py). Drawn to OUT/design-space.svg; the last line of standard output is one JSON document.

The question is that of Yan, Agarwal, Venkataraman (2402.01528, section 4): is a shallow and wide draft worth more than
a deep and narrow one of the same number of parameters?
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.api import load, load_drafter
from outrider.bench.report import ArmSummary, interval_text, summarise
from outrider.bench.run import Arm, Case, arms_by_k, interleave, warm_up
from outrider.bench.tables import new_table
from outrider.distill.data import hold_out_written, read_sequences
from outrider.models.placement import Placement
from outrider.options import Sampling
from outrider.scoring.alpha import measure_alpha
from outrider.stats.intervals import Interval
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

# layers, width, feed-forward: 1.82 to 1.86 million parameters each, with the tokens of fable.
SHAPES = ((28, 64, 208), (6, 128, 400), (2, 192, 640), (1, 256, 704))
KS = (1, 2, 4)
LENGTH = 256  # tokens in a training sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--serve", action="append", default=[])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--written", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trained = [distilled(shape, arguments) for shape in SHAPES]
    names = [f"{layers}x{width}" for layers, width, _ in SHAPES]
    drafts = [str(arguments.out / name) for name in names]
    alphas = agreement(drafts, arguments)
    summaries = {target: measured(target, drafts, arguments) for target in (arguments.target, *arguments.serve)}

    targets = [Path(target).name for target in summaries]
    rows: list[dict[str, Any]] = []
    for name, document, draft, alpha in zip(names, trained, drafts, alphas, strict=True):
        arms = {
            target: [one.to_json() for one in found if one.arm.draft == draft]
            for target, found in zip(targets, summaries.values(), strict=True)
        }
        rows.append({"shape": name, "num_params": document["num_params"], "alpha": alpha.to_json(), "targets": arms})
    for target in targets:
        report(rows, target, f"{target}, {arguments.steps} steps each, temperature 1")
    draw(rows, targets, arguments.out / "design-space.svg")
    print(json.dumps({"shapes": rows, "steps": arguments.steps, "provenance": provenance("cpu")}))


def report(rows: list[dict[str, Any]], target: str, title: str) -> None:
    """What each draft is worth to a target."""
    table = new_table(title, "layers x width", "parameters", "alpha", "ms/draft", "tau(4)", "best K", "speed-up, 95%")
    for row in rows:
        arms = row["targets"][target]
        best = fastest(arms)
        tau = next(arm["stats"]["mean_acceptance_length"] for arm in arms if arm["k"] == 4)
        numbers = (
            f"{row['num_params'] / 1e6:.2f} M",
            f"{row['alpha']['value']:.3f}",
            f"{draft_ms(best):.2f}",
            f"{tau:.2f}",
        )
        table.add_row(row["shape"], *numbers, str(best["k"]), interval_text(Interval(**best["speed_up"])))
    Console(width=100).print(table)


def fastest(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """The arm with the largest speed-up."""
    return max(arms, key=lambda arm: float(arm["speed_up"]["value"]))


def draft_ms(arm: dict[str, Any]) -> float:
    """Milliseconds for a drafted token."""
    return float(1e3 * arm["time_s"]["draft"] / arm["stats"]["num_draft_tokens"])


def distilled(shape: tuple[int, int, int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one shape, if it is not there; the document of ``outrider distill``."""
    layers, width, feed_forward = shape
    out = arguments.out / f"{layers}x{width}"
    training = out / "training"
    training.mkdir(parents=True, exist_ok=True)
    for path in arguments.out.glob("*/training/written-*"):  # what the target wrote serves all
        if not (training / path.name).exists():
            shutil.copy(path, training)
    command = [sys.executable, "-m", "outrider", "distill", arguments.target, "--output", str(out)]
    command += ["--layers", str(layers), "--hidden-size", str(width), "--intermediate-size", str(feed_forward)]
    command += ["--data", str(arguments.data), "--steps", str(arguments.steps), "--written", str(arguments.written)]
    command += ["--learning-rate", "3e-3", "--patience", "20", "--length", str(LENGTH)]
    subprocess.run(command, stdout=sys.stderr, check=True)
    document: dict[str, Any] = json.loads((out / "distill.json").read_text(encoding="utf-8"))
    return document


def agreement(drafts: list[str], arguments: argparse.Namespace) -> list[Interval]:
    """alpha of each draft on the texts that none of them was trained on."""
    folder = Path(drafts[0]) / "training"
    texts = hold_out_written(*read_sequences(folder, num_sequences=arguments.written, length=LENGTH))[1]
    target = load(arguments.target, device="cpu", dtype="float32").target
    lms = [load(draft, device="cpu", dtype="float32").target for draft in drafts]
    return [measure_alpha(target, lm, texts, [Sampling()])[0].alpha for lm in lms]


def measured(target: str, drafts: list[str], arguments: argparse.Namespace) -> list[ArmSummary]:
    """Plain decoding, and each draft at each K, at temperature 1."""
    decoder = load(target, device="cpu", dtype="float32", acceptance="rejection")
    arms = [Arm("plain", decoder)]
    for draft in drafts:
        drafter = load_drafter(decoder, draft, placement=Placement("cpu", "float32"))
        arms += arms_by_k(replace(decoder, drafter=drafter), draft, KS)
    options = {"temperature": 1.0, "max_new_tokens": arguments.max_new_tokens, "ignore_eos": True}
    cases = [Case(index, prompt, index) for index, prompt in enumerate(PROMPTS)]
    warm_up(arms, cases, options)
    return summarise(list(interleave(arms, cases, options)), arms)


def draw(rows: list[dict[str, Any]], targets: list[str], path: Path) -> None:
    """alpha, and the best speed-up, against the latency of a drafted token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    first_ms = [draft_ms(fastest(row["targets"][targets[0]])) for row in rows]
    left.plot(first_ms, [row["alpha"]["value"] for row in rows], marker="o")
    left.set_ylabel("alpha, temperature 1")
    left.set_ylim(bottom=0)
    for target in targets:
        best = [fastest(row["targets"][target]) for row in rows]
        speed_ups = [arm["speed_up"]["value"] for arm in best]
        right.plot([draft_ms(arm) for arm in best], speed_ups, marker="o", label=target)
    right.axhline(1.0, color="grey", linestyle="--", linewidth=1, label="plain decoding")
    right.set_ylabel("speed-up over plain decoding, best K")
    right.set_ylim(bottom=0)
    right.legend()
    for row, x in zip(rows, first_ms, strict=True):
        at = (x, row["alpha"]["value"])
        left.annotate(row["shape"], at, textcoords="offset points", xytext=(6, -4), fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("ms for a drafted token")
        axes.set_xlim(left=0)
    figure.savefig(path)


if __name__ == "__main__":
    main()
