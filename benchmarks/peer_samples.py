"""Whether other programs, drafting with a smaller model, sample from the law of their target.

    pip install gguf openvino-genai ctranslate2     # each may be missing; what is, is left out and named
    python benchmarks/peer_samples.py --llama-server llama-build/bin/llama-server \\
        --openvino-target ov-target --openvino-draft ov-draft > peer_samples.txt

Each program writes texts at temperature 1, without filters, with and without its draft (how: peer_arms/; how to get
llama.cpp's server and the OpenVINO folders is said in peers.py). The texts go to ``outrider certify-samples``, as token
ids. Of each: tokens tested, mean of -log p less the entropy with its z, the estimated deviation towards the draft in
total variation (one standard error), the smallest p of the tests, and the verdict at the level of 0.001.

The judge is the target as it is stored, with float32 arithmetic, whatever ``--weights``: rounding counts as deviation.

Programs that forbid end tokens where they are told to go on after them (llama.cpp) are judged with these forbidden. The
last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peer_arms.base import Arm
from peer_arms.programs import add_arguments, find_programs
from peer_arms.worker import Worker
from rich.console import Console

from outrider.api import load
from outrider.bench.tables import new_table
from outrider.models.registry import resolve
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_LEVEL = 1e-3


def write_samples(
    worker: Worker, index: int, prompts: Sequence[Sequence[int]], num_texts: int, num_tokens: int, file: Path
) -> None:
    """Texts of an arm at temperature 1, each with a seed of its own."""
    arm = worker.arms[index]
    options = {"logit_bias": ["0=-inf"]} if arm.package == "llama.cpp" else {}
    with file.open("w") as stream:
        for text in range(num_texts):
            ids = prompts[text % len(prompts)]
            output, _ = worker.run(index, ids, 1.0, text, num_tokens)
            row = {"prompt_ids": list(ids), "token_ids": output.token_ids, "options": options}
            stream.write(json.dumps(row) + "\n")


def judged(target: str, draft: str, file: Path) -> dict[str, Any]:
    """The document of ``outrider certify-samples``."""
    command = [sys.executable, "-m", "outrider", "certify-samples", target, str(file), "--draft", draft, "--json", "-"]
    done = subprocess.run([*command, "--significance", str(_LEVEL)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def row_of(arm: Arm, found: dict[str, Any]) -> tuple[str, ...]:
    likelihood = next(test for test in found["tests"] if test["name"] == "likelihood")
    return (
        arm.name,
        str(found["num_tokens"]),
        f"{found['surprise_excess']:+.3f}",
        f"{likelihood['statistic']:+.1f}",
        f"{found['estimate']:+.1%} +- {found['estimate_std']:.1%}",
        f"{min(test['p'] for test in found['tests']):.1g}",
        "yes" if found["is_ok"] else "NO",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--k", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--num-texts", type=int, default=75)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    target, draft = (str(resolve(name).location) for name in (arguments.target, arguments.draft))
    ks, num_tokens = [arguments.k], arguments.max_new_tokens
    encode = load(target).encode
    prompts = [encode(prompt) for prompt in PROMPTS]
    context_len = max(map(len, prompts)) + num_tokens + arguments.k + 1
    documents: dict[str, Any] = {}
    console = Console(width=110)
    title = f"temperature 1, {arguments.num_texts} texts of {num_tokens} tokens"
    table = new_table(title, "arm", "tokens", "excess, nats", "z", "towards the draft", "least p", "consistent")
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = find_programs(arguments, ks, ks, context_len, folder)
        for make, given in found.makers:
            worker = Worker(make, given, arguments.threads)
            for index, arm in enumerate(worker.arms):
                if arm.is_compiled:
                    continue  # the same law, and minutes of compiling
                file = folder / f"samples-{index}.jsonl"
                write_samples(worker, index, prompts, arguments.num_texts, num_tokens, file)
                documents[arm.name] = judged(target, draft, file)["statistical"]
                table.add_row(*row_of(arm, documents[arm.name]))
                print(arm.name, file=sys.stderr, flush=True)
            worker.stop()
    console.print(table)
    for program, reason in found.left_out.items():
        console.print(f"left out: {program}: {reason}")
    facts = {"weights": arguments.weights, "left_out": found.left_out, "versions": found.versions}
    print(json.dumps({"arms": documents, **facts, "provenance": provenance("cpu")}))


if __name__ == "__main__":
    main()
