"""A pair in float32, bfloat16 and fewer bits: speed, agreement with float32, certificate. "Plain" weights are tensors
of the arithmetic's type; else large matrices stay as the checkpoint has them (``--store``).

    python benchmarks/quantized.py [--target fable] [--draft fable-draft] [-k 3] [--prompts 8]
        [--forms FORM ...] > quantized_fable.txt

Tokens per second of whole calls, plain and with the draft (in the same form as the target), all arms in turn. "alpha"
is 1 - the total variation between the model's next-token law and that of the float32 target, at every token of the
prompts' texts, temperature 1. The certificate is that of ``outrider certify --budget 1m``, for the pair in this
form. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from intervals import interval_text
from rich.console import Console

from outrider.api import load, load_drafter
from outrider.measure.along import measure_alpha
from outrider.measure.arms import Arm, Case, interleave, summarise, warm_up
from outrider.measure.tables import new_table
from outrider.measure.teacher_forcing import Text
from outrider.models.registry import Placement
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS
from weight_bytes import num_bytes

_FORMS = {
    "float32, plain": Placement(dtype="float32", store="plain"),
    "float32": Placement(dtype="float32"),
    "bfloat16": Placement(dtype="bfloat16"),
    "int8": Placement(dtype="float32", quantization="int8"),
    "int4": Placement(dtype="float32", quantization="int4"),
    "nf4": Placement(dtype="float32", quantization="nf4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forms", nargs="+", choices=_FORMS, default=list(_FORMS), metavar="FORM")
    parser.add_argument("--certify", action="store_true", help="also run the certificates")
    parser.add_argument("--budget", default="1m", help="time for each of them")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arms, sizes = [], {}
    for form in arguments.forms:
        placement = _FORMS[form]
        how = {"dtype": placement.dtype, "quantization": placement.quantization, "store": placement.store}
        plain = load(arguments.target, device="cpu", **how)
        pair = replace(plain, drafter=load_drafter(plain, arguments.draft, placement=placement))
        arms += [Arm(f"{form}, plain", plain), Arm(form, pair, arguments.draft, arguments.k)]
        sizes[form] = num_bytes(plain.target.model)
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "ignore_eos": True, "temperature": 1.0}
    encoded = [arms[0].decoder.encode(text) for text in PROMPTS[: arguments.prompts]]
    cases = [Case(index, ids, index) for index, ids in enumerate(encoded)]
    warm_up(arms, cases, options)
    summaries = summarise(list(interleave(arms, cases, options)), arms)
    name, execution = Path(arguments.target).name, arms[0].decoder.target.execution.name
    columns = ("form", "weights MiB", "plain tok/s", f"K = {arguments.k} tok/s", "tau", "/ first row's", "alpha")
    table = new_table(f"{name} with {arguments.draft}, temperature 1, {execution}", *columns, "certificate")
    rows = []
    for form, plain_arm, pair_arm in zip(arguments.forms, summaries[0::2], summaries[1::2], strict=True):
        row: dict[str, Any] = {"form": form, "weights": sizes[form], "plain": plain_arm.to_json()}
        row |= {"pair": pair_arm.to_json(), "alpha": _alpha(arguments, form)}
        row["certificate"] = _certificate(arguments, form) if arguments.certify else None
        rows.append(row)
        tau = pair_arm.stats.mean_acceptance_length or 1.0
        table.add_row(
            form,
            f"{sizes[form] / 2**20:.1f}",
            f"{plain_arm.tokens_per_s:.0f}",
            f"{pair_arm.tokens_per_s:.0f}",
            f"{tau:.2f}",
            "-" if plain_arm.speed_up is None else interval_text(plain_arm.speed_up),
            f"{row['alpha']:.4f}",
            {True: "lossless", False: "FAILED", None: "-"}[row["certificate"]],
        )
    Console(width=120).print(table)
    print(json.dumps({"rows": rows, "provenance": provenance("cpu")}))


def _outrider(command: str, *options: str) -> dict[str, Any]:
    """The document that a command writes."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "document.json"
        words = [sys.executable, "-m", "outrider", command, *options, "--device", "cpu", "--json", str(file)]
        subprocess.run(words, check=command != "certify", stdout=subprocess.DEVNULL)  # which exits with its verdict
        document: dict[str, Any] = json.loads(file.read_text())
    return document


def _words(form: str, prefix: str) -> list[str]:
    placement = _FORMS[form]
    words = [f"--{prefix}dtype", placement.dtype, f"--{prefix}quantize", placement.quantization or "none"]
    return [*words, "--store", placement.store or "auto"]


def _alpha(arguments: argparse.Namespace, form: str) -> float:
    """Of the target in this form as a draft for the one in float32."""
    plain = load(arguments.target, device="cpu", dtype="float32")
    drafter = load_drafter(plain, arguments.target, placement=_FORMS[form])
    texts = [Text(plain.encode(text)) for text in PROMPTS]
    return measure_alpha(plain.target, drafter, texts).value


def _certificate(arguments: argparse.Namespace, form: str) -> bool:
    words = ["--target", arguments.target, "--draft", arguments.draft, "--budget", arguments.budget]
    words += [*_words(form, ""), *_words(form, "draft-")]
    verdict: bool = _outrider("certify", *words)["verdict"] == "passed"
    return verdict


if __name__ == "__main__":
    main()
