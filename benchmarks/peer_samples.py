"""Whether other programs, drafting with a smaller model, sample from the law of their target.

    pip install gguf openvino-genai     # each may be missing; what is, is left out and named
    python benchmarks/peer_samples.py --llama-server llama-build/bin/llama-server \\
        --openvino-target ov-target --openvino-draft ov-draft > peer_samples.txt

Each program writes texts at temperature 1, without filters, with and without its draft (how: peer_arms.py; how to get
llama.cpp's server and the OpenVINO folders is said in peers.py). The texts go to ``outrider certify-samples``, as token
ids. Of each: tokens tested, mean of -log p less the entropy with its z, the estimated deviation towards the draft in
total variation (one standard error), the smallest p of the tests, and the verdict at the level of 0.001.

Programs that forbid end tokens where they are told to go on after them (llama.cpp) are judged with these forbidden. The
last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peer_arms import Arm, Worker, hf_arms, llama_cpp_arms, llama_cpp_build, openvino_arms, outrider_arms
from rich.console import Console

from outrider.api import load
from outrider.bench.report import new_table
from outrider.evals.prompts import PROMPTS
from outrider.models.registry import resolve
from outrider.options import DEFAULT_ACCEPTANCE
from outrider.system.provenance import provenance

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
    parser.add_argument("--target", default="fable", help="a known name, or a folder")
    parser.add_argument("--draft", default="fable-draft", help="a known name, or a folder")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--num-texts", type=int, default=75)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, built for this machine")
    parser.add_argument("--openvino-target", type=Path, help="folder of the target as OpenVINO wants it")
    parser.add_argument("--openvino-draft", type=Path, help="the same for the draft")
    arguments = parser.parse_args()
    target, draft = (Path(resolve(name).location) for name in (arguments.target, arguments.draft))
    ks, num_tokens, num_threads = [arguments.k], arguments.max_new_tokens, arguments.threads
    encode = load(target).encode
    prompts = [encode(prompt) for prompt in PROMPTS]
    context_len = max(map(len, prompts)) + num_tokens + arguments.k + 1
    common = target, draft, ks
    versions = {name: version(name) for name in ("outrider", "transformers")}
    left_out: dict[str, str] = {}
    documents: dict[str, Any] = {}
    console = Console(width=110)
    title = f"temperature 1, {arguments.num_texts} texts of {num_tokens} tokens"
    table = new_table(title, "arm", "tokens", "excess, nats", "z", "towards the draft", "least p", "consistent")
    with TemporaryDirectory() as name:
        folder = Path(name)
        makers: list[tuple[Any, tuple[Any, ...]]] = [(outrider_arms, (*common, DEFAULT_ACCEPTANCE)), (hf_arms, common)]
        if find_spec("gguf") is None or arguments.llama_server is None:
            left_out["llama.cpp"] = "gguf is not installed, or no --llama-server was given"
        else:
            server = arguments.llama_server.resolve()
            makers.append((llama_cpp_arms, (*common, server, num_threads, context_len, folder)))
            versions |= {"gguf": version("gguf"), "llama.cpp": llama_cpp_build(server)}
        if find_spec("openvino_genai") is None or arguments.openvino_target is None:
            left_out["OpenVINO GenAI"] = "not installed, or no --openvino-target was given"
        else:
            folders = arguments.openvino_target, arguments.openvino_draft
            makers.append((openvino_arms, (*folders, ks, num_threads)))
            versions |= {package: version(package) for package in ("openvino", "openvino-genai")}
        for make, given in makers:
            worker = Worker(make, given, num_threads)
            for index, arm in enumerate(worker.arms):
                if arm.is_compiled:
                    continue  # the same law, and minutes of compiling
                file = folder / f"samples-{index}.jsonl"
                write_samples(worker, index, prompts, arguments.num_texts, num_tokens, file)
                documents[arm.name] = judged(str(target), str(draft), file)["statistical"]
                table.add_row(*row_of(arm, documents[arm.name]))
                print(arm.name, file=sys.stderr, flush=True)
            worker.stop()
    console.print(table)
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}")
    print(json.dumps({"arms": documents, "left_out": left_out, "versions": versions, "provenance": provenance("cpu")}))


if __name__ == "__main__":
    main()
