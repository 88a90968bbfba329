"""Outrider beside other programs, same weights and same prompts: tokens per second on the CPU.

    pip install gguf openvino-genai ctranslate2
    python benchmarks/grow.py fable grown-110m --hidden-size 768 --num-layers 14 --intermediate-size 2304
    python benchmarks/peers.py --llama-server llama-build/bin/llama-server \\
        --openvino-target ov-fable --openvino-draft ov-draft > peers_fable.txt
    python benchmarks/peers.py --target grown-110m --k 2,3,4,6,8 --own-k 4,7 --max-new-tokens 64 --prompts 5 \\
        --llama-server llama-build/bin/llama-server --openvino-target ov-110m --openvino-draft ov-draft > peers_110m.txt

``--weights bfloat16`` takes a target that is stored in it (grow.py has ``--dtype``; the embedded pair is so), and
OpenVINO's folders in float32; ``--weights int8`` takes the target in 8 bits, by each program's own scheme (for
OpenVINO, ``--weight-format int8``). ``--weights gguf`` takes two GGUF files; OpenVINO reads such files too, or a folder
in ``--weight-format int4``. peer_arms/ describes the arms, and which part of the arithmetic is narrow in each.

Programs that are missing are left out and named. llama.cpp is to be built for the machine, since a build for all
machines is far slower; its source comes with several Python packages, and is the newer in this one:

    pip download --no-deps --no-binary :all: xllamacpp && tar xzf xllamacpp-*.tar.gz
    cmake -S xllamacpp-*/thirdparty/llama.cpp -B llama-build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \\
        -DCMAKE_CXX_FLAGS="-fno-tree-dse -fno-dse"
    cmake --build llama-build --target llama-server

The flags are for GCC 12 and processors with AMX, where the server otherwise crashes with weights of 8 bits: that
compiler takes ``_tile_loadconfig`` to read 8 of its 64 bytes, and removes the code that writes the others. (The
server's ``--no-repack`` would help too, without AMX.)

OpenVINO wants its own format. ``optimum-cli`` makes it, best from another virtual environment (``pip install
optimum-intel nncf``), where each MODEL is a folder:

    optimum-cli export openvino --model MODEL --task text-generation-with-past --weight-format fp32 ov-target

Where it crashes with bfloat16, ``--openvino-isa AVX512_CORE_BF16`` forbids AMX to it. CTranslate2 needs nothing else.

With ``ATEN_CPU_CAPABILITY=avx2 TORCHINDUCTOR_CPP_MARCH=x86-64-v3 ONEDNN_MAX_CPU_ISA=AVX2`` in the environment, a
processor with AVX-512 runs as one with AVX2 (not with PyTorch 2.11, which lacks the second). llama.cpp is to be built
with ``-DGGML_NATIVE=OFF`` and GGML_AVX2, GGML_FMA, GGML_F16C and GGML_BMI2. OpenVINO does not run Q4_K_M so.

Every arm that drafts does so at its own best K: a pilot runs it at each of ``--k`` (Outrider: of ``--own-k``, fewer,
since each takes minutes to compile the first time; then they are kept) on two prompts which are not measured, and the K
that took least time at this temperature takes part in the measurement. There, each prompt is one measurement of each
arm, all arms in turn. A time is the wall clock of one whole call, prefill included; all have the same number of threads
(CTranslate2 also has an arm with one).

"plain / it" is the speed of Outrider's fastest plain arm over the arm's, with its 95% interval: above 1, Outrider is
faster; "best / it" is the same for Outrider's fastest speculative arm. "as HF" counts the prompts whose greedy tokens
are those of Hugging Face's first arm, which computes in bfloat16 if the weights are so: one near-tie changes the rest
of a text. "law" says whether the rule of the arm samples from the distribution of the model as the program has loaded
it: "other" is not the published rule. Who is faster than Outrider's best is said once more below. The last line of
standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peer_arms.base import EXACT, TEMPERATURES, Arm, Output
from peer_arms.programs import add_arguments, find_programs
from peer_arms.worker import Worker
from rich.console import Console

from outrider.api import load
from outrider.bench.report import interval_text
from outrider.bench.tables import new_table
from outrider.options import DEFAULT_ACCEPTANCE
from outrider.sampling.rules import RULES
from outrider.stats.intervals import paired_ratio
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_PAUSE_S = 0.1  # idle threads of one arm spin for a while before they sleep, and would slow the next
_NUM_PILOTS = 2  # prompts
_NUM_WARM_UP_TOKENS = 8

Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Entry:
    """An arm, and where it runs."""

    arm: Arm
    worker: Worker
    index: int

    def run(self, ids: Prompt, temperature: float, seed: int, num_tokens: int) -> tuple[Output, float]:
        time.sleep(_PAUSE_S)
        return self.worker.run(self.index, ids, temperature, seed, num_tokens)


@dataclass(slots=True)
class Record:
    """What was measured of an arm at one temperature, an entry for each prompt."""

    arm: Arm
    seconds: list[float] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(len(o.token_ids) / s for o, s in zip(self.outputs, self.seconds, strict=True))

    @property
    def tau(self) -> float:
        """Tokens per forward of the target."""
        return sum(len(o.token_ids) for o in self.outputs) / sum(o.num_forwards for o in self.outputs)


def measure(entries: Sequence[Entry], prompts: Sequence[Prompt], temperature: float, num_tokens: int) -> list[Record]:
    """Every arm on every prompt, all in turn."""
    records = [Record(entry.arm) for entry in entries]
    for place, ids in enumerate(prompts):
        for turn in range(len(entries)):
            at = (place + turn) % len(entries)
            output, seconds = entries[at].run(ids, temperature, place, num_tokens)
            records[at].seconds.append(seconds)
            records[at].outputs.append(output)
    return records


def warm_up(entries: Sequence[Entry], prompts: Sequence[Prompt], temperature: float, num_tokens: int) -> None:
    """Nothing is to be loaded, compiled or started later: the longest and the shortest prompt meet all sizes."""
    by_length = sorted(prompts, key=len)
    for entry in entries:
        if entry.arm.is_compiled:
            for ids in (by_length[-1], by_length[0]):
                entry.run(ids, temperature, 0, num_tokens)
        else:
            entry.run(by_length[-1], temperature, 0, _NUM_WARM_UP_TOKENS)


def choose_k(
    entries: Sequence[Entry], prompts: Sequence[Prompt], temperature: float, num_tokens: int, console: Console
) -> tuple[list[Entry], dict[str, dict[int, float]]]:
    """Of each family of arms the one whose K took least time, and those without a K.

    Returns:
        They, and what was found: tokens per second by family and K.
    """
    drafting = [entry for entry in entries if entry.arm.k is not None]
    records = measure(drafting, prompts, temperature, num_tokens)
    speeds: dict[str, dict[int, float]] = {}
    for record in records:
        assert record.arm.k is not None
        num_all = sum(len(output.token_ids) for output in record.outputs)
        speeds.setdefault(record.arm.family, {})[record.arm.k] = num_all / sum(record.seconds)
    best = {family: max(by_k, key=lambda k: by_k[k]) for family, by_k in speeds.items()}
    ks = sorted({k for by_k in speeds.values() for k in by_k})
    title = f"temperature {temperature:g}, pilot on {len(prompts)} other prompts: tokens/s at each K, the best marked"
    table = new_table(title, "arm", *(f"K = {k}" for k in ks))
    for family, by_k in speeds.items():
        table.add_row(family, *(_marked(by_k.get(k), k == best[family]) for k in ks))
    console.print(table)
    return [entry for entry in entries if entry.arm.k == best.get(entry.arm.family)], speeds


def _fastest_of_ours(records: Sequence[Record], is_drafting: bool) -> Record:
    ours = (record for record in records if record.arm.package == "outrider")
    return min((one for one in ours if (one.arm.k is not None) == is_drafting), key=lambda one: sum(one.seconds))


def _marked(speed: float | None, is_best: bool) -> str:
    return "- " if speed is None else f"{speed:.1f}{'*' if is_best else ' '}"


def report(records: Sequence[Record], temperature: float, console: Console, num_tokens: int) -> dict[str, Any]:
    """Print a table; the same as a document."""
    plain, best = (_fastest_of_ours(records, is_drafting) for is_drafting in (False, True))
    reference = next(record for record in records if record.arm.package == "transformers")
    title = f"temperature {temperature:g}, each arm at its own best K; best is {best.arm.name}"
    last = "law" if temperature else "as HF"
    table = new_table(title, "arm", "tokens/s", "tau", "plain / it, 95%", "best / it, 95%", last)
    rows = []
    ahead: list[str] = []
    for record in records:
        over_plain, over_best = (paired_ratio(record.seconds, ours.seconds) for ours in (plain, best))
        pairs = list(zip(record.outputs, reference.outputs, strict=True))
        num_same = sum(ours.token_ids == its.token_ids for ours, its in pairs)
        is_exact = record.arm.law == EXACT
        table.add_row(
            record.arm.name,
            f"{record.tokens_per_s:.1f}",
            f"{record.tau:.2f}",
            interval_text(None if record is plain else over_plain),
            interval_text(None if record is best else over_best),
            ("exact" if is_exact else "other") if temperature else f"{num_same}/{len(pairs)}",
        )
        if record.arm.package != "outrider" and (over_best.high or over_best.value) < 1:
            over_ours = interval_text(paired_ratio(best.seconds, record.seconds))
            law = "" if is_exact or not temperature else ", by a rule that changes the distribution"
            ahead.append(f"{record.arm.name} is {over_ours} times as fast as Outrider's best{law}.")
        rows.append(
            {
                "name": record.arm.name,
                "package": record.arm.package,
                "k": record.arm.k,
                "law": record.arm.law,
                "tokens_per_s_median": record.tokens_per_s,
                "mean_acceptance_length": record.tau,
                "outrider_plain_over_it": over_plain.to_json(),
                "outrider_best_over_it": over_best.to_json(),
                "same_tokens_as_hf": None if temperature else num_same,
                "is_full_length": all(len(output.token_ids) == num_tokens for output in record.outputs),
                "seconds": record.seconds,
            }
        )
    console.print(table)
    for line in ahead or ["No arm of another program is faster than Outrider's best, beyond doubt."]:
        console.print(line)
    return {"best": best.arm.name, "arms": rows}


def main() -> None:
    most = len(PROMPTS) - _NUM_PILOTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--k", default="1,2,3,4,6", help="drafted tokens per round to choose among, by commas")
    parser.add_argument("--own-k", default="2,4", help="the same for Outrider")
    parser.add_argument("--acceptance", default=DEFAULT_ACCEPTANCE, choices=RULES, help="Outrider's rule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--prompts", type=int, default=8, help=f"to measure, up to {most}; {_NUM_PILOTS} more are for K"
    )
    arguments = parser.parse_args()
    if not 2 <= arguments.prompts <= most:
        parser.error(f"--prompts {arguments.prompts}: from 2 to {most}")
    begin_s = time.perf_counter()
    num_threads, num_tokens = arguments.threads, arguments.max_new_tokens
    torch.set_num_threads(num_threads)
    ks, own_ks = ([int(k) for k in text.split(",")] for text in (arguments.k, arguments.own_k))
    encode = load(arguments.target).encode
    prompts = [encode(prompt) for prompt in PROMPTS]
    measured, pilots = prompts[: arguments.prompts], prompts[-_NUM_PILOTS:]
    context_len = max(map(len, prompts)) + num_tokens + max(ks) + 1

    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    results = {}
    with TemporaryDirectory() as name:
        found = find_programs(arguments, ks, own_ks, context_len, Path(name), arguments.acceptance)
        workers = [Worker(make, given, num_threads) for make, given in found.makers]
        origin = provenance("cpu")
        vectors = torch.backends.cpu.get_cpu_capability()
        facts = f"{num_threads} threads", f"torch {origin['torch']}", arguments.acceptance, arguments.weights
        console.print(f"{origin['processor']}, {vectors}; {'; '.join(facts)}")
        for program, text in found.versions.items():
            console.print(f"{program}: {text}")
        for program, reason in found.left_out.items():
            console.print(f"left out: {program}: {reason}")
        try:
            entries = [Entry(arm, worker, index) for worker in workers for index, arm in enumerate(worker.arms)]
            for temperature in TEMPERATURES:
                all_here = [entry for entry in entries if temperature in entry.arm.temperatures]
                warm_up(all_here, prompts, temperature, num_tokens)
                chosen, speeds = choose_k(all_here, pilots, temperature, num_tokens, console)
                records = measure(chosen, measured, temperature, num_tokens)
                result = report(records, temperature, console, num_tokens)
                results[f"temperature {temperature:g}"] = {**result, "pilot_tokens_per_s": speeds}
        finally:
            for worker in workers:
                worker.stop()
    document = {
        "results": results,
        "acceptance": arguments.acceptance,
        "weights": arguments.weights,
        "left_out": found.left_out,
        "versions": found.versions,
        "total_s": time.perf_counter() - begin_s,
        "provenance": origin,
    }
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
