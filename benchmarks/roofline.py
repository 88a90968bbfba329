"""How near each part of a round is to what the machine allows.

    python benchmarks/roofline.py [--target fable] [--draft fable-draft] [-k 4] [--threads 2]

Measured in the loop itself, on the built-in prompts at temperature 1: a step of plain decoding, a draft step, the
verify of K+1 tokens and the whole round, after a run of the same work to warm up. A step
includes what is computed from its logits (probabilities, drawing, acceptance).

The limit of a step is the larger of bytes / bandwidth and operations / rate. The bytes are those that it must move:
each weight once, of an input embedding only the rows of its tokens, the keys and values in view, and those written. The
operations are two for each weight and token. The bandwidth is that of reading a buffer of the size of the model's
weights, in pages of memory as large as theirs: a small model stays in the cache of the processor. Neither probabilities
nor the rest of a round are in any limit. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from outrider.api import load
from outrider.bench.run import Arm, Case, interleave
from outrider.bench.tables import new_table
from outrider.drafters.model import ModelDrafter
from outrider.records import Chunk, Timing
from outrider.runtime import huge_pages
from outrider.runtime.lm import LM
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_LARGE_BUFFER_BYTES = 2**28  # far beyond the caches
_MATRIX_SIZE = 1024


def best_s(function: Callable[[], Any]) -> float:
    """The shortest of all runs within a second. Half of them are on one thread, which a busy core does not hold up."""
    num_threads = torch.get_num_threads()
    best = math.inf
    for threads in (num_threads, 1):
        torch.set_num_threads(threads)
        end = time.perf_counter() + 0.5
        while (start := time.perf_counter()) < end:
            function()
            best = min(best, time.perf_counter() - start)
    torch.set_num_threads(num_threads)
    return best


def look(buffer_sizes: Iterable[int]) -> list[float]:
    """Bytes per second of reading a buffer of each size, and operations per second of a float32 matrix product."""
    bandwidths = [num_bytes / _reading_s(num_bytes) for num_bytes in buffer_sizes]
    a, b = torch.rand(2, _MATRIX_SIZE, _MATRIX_SIZE)
    return [*bandwidths, 2 * _MATRIX_SIZE**3 / best_s(partial(torch.mm, a, b))]


def _reading_s(num_bytes: int) -> float:
    """Of a buffer from end to end, or of its halves at the same time, whichever is faster here."""
    model = nn.Module()
    model.register_buffer("halves", torch.ones(2, num_bytes // 8))
    if huge_pages.are_there():
        huge_pages.move_weights(model)
    halves = model.get_buffer("halves")
    return min(best_s(halves.sum), best_s(partial(torch.dot, *halves)))


def weight_bytes(lm: LM) -> int:
    """Weights that every step reads: all but an input embedding that is not the output matrix too."""
    model: Any = lm.model
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    return sum(p.numel() * p.element_size() for p in model.parameters() if is_tied or p is not embedding)


def step_bytes(lm: LM, num_tokens: int, length: int) -> int:
    """Bytes that a step over ``num_tokens`` must move when the text has ``length`` of them in the end."""
    model: Any = lm.model
    rows = num_tokens * model.get_input_embeddings().weight[0].nbytes
    view_len = min(lm.execution.round_length(length), lm.context_len)
    cache = (view_len + num_tokens) * sum(shape.bytes_per_token for shape in lm.layer_shapes)
    return weight_bytes(lm) + rows + cache


def limit_s(lm: LM, bandwidth: float, rate: float, num_tokens: int, length: int) -> float:
    operations = 2 * num_tokens * weight_bytes(lm) / lm.dtype.itemsize
    return max(step_bytes(lm, num_tokens, length) / bandwidth, operations / rate)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one text, which had ``length`` tokens at its end."""

    length: int
    num_drafted: int
    num_tokens: int
    timing: Timing


def run_rounds(arms: Sequence[Arm], cases: Sequence[Case], options: dict[str, Any]) -> dict[str, list[Round]]:
    """The rounds of each arm over all cases. With one prompt at a time there is a chunk for each."""
    rounds: dict[str, list[Round]] = {arm.name: [] for arm in arms}
    chunks: list[Chunk] = []
    for measurement in interleave(arms, cases, options, lambda arm, case, chunk: chunks.append(chunk)):
        length = len(measurement.arm.decoder.encode(measurement.case.prompt))
        for chunk in chunks:
            length += len(chunk.token_ids)
            num_drafted = chunk.stats.num_draft_tokens
            rounds[measurement.arm.name].append(Round(length, num_drafted, len(chunk.token_ids), chunk.timing))
        chunks.clear()
    return rounds


@dataclass(frozen=True, slots=True)
class Part:
    """A line of the table. ``limit_s`` is 0 for what does not have to be."""

    name: str
    measured_s: float
    limit_s: float


def parts_of(
    plain: list[Round], speculative: list[Round], target: LM, draft: LM, machine: list[float], k: int
) -> list[Part]:
    """The steps, then the round part by part; medians over rounds. ``machine`` is what ``look`` gives."""
    full = [round_ for round_ in speculative if round_.num_drafted == k]  # the last ones of a text draft fewer

    def measured_s(rounds: Sequence[Round], part: str) -> float:
        return median(getattr(round_.timing, part) for round_ in rounds)

    _, target_bandwidth, draft_bandwidth, rate = machine
    length = round(median(round_.length for round_ in full))
    limit_draft = limit_s(draft, draft_bandwidth, rate, 1, length)
    limit_verify = limit_s(target, target_bandwidth, rate, k + 1, length)
    draft_s = measured_s(full, "draft_s")
    return [
        Part("plain step", measured_s(plain, "verify_s"), limit_s(target, target_bandwidth, rate, 1, length)),
        Part("draft step", draft_s / k, limit_draft),
        Part(f"draft, {k} steps", draft_s, k * limit_draft),
        Part(f"verify of {k + 1}", measured_s(full, "verify_s"), limit_verify),
        Part("rest", measured_s(full, "rest_s"), 0.0),
        Part("whole round", measured_s(full, "decode_s"), k * limit_draft + limit_verify),
    ]


def parts_table(parts: list[Part], title: str) -> Table:
    """The parts of the round have their shares of its time, and of what it takes beyond its limit."""
    out = new_table(title, "part", "measured ms", "limit ms", "achieved", "of round", "of gap")
    whole = parts[-1]
    for place, part in enumerate(parts):
        gap = (part.measured_s - part.limit_s) / (whole.measured_s - whole.limit_s)
        shares = [f"{part.measured_s / whole.measured_s:.0%}", f"{gap:.0%}"] if place >= 2 else []
        achieved = f"{part.limit_s / part.measured_s:.0%}" if part.limit_s else "-"
        limit = f"{1e3 * part.limit_s:.3f}" if part.limit_s else "-"
        out.add_row(part.name, f"{1e3 * part.measured_s:.3f}", limit, achieved, *shares, end_section=place == 1)
    return out


def speedup_of(plain: list[Round], speculative: list[Round], k: int) -> tuple[float, float]:
    """How many times as fast speculation was in full rounds, and how many times it is by tau / (K c + v): what the
    models' steps would allow if nothing else took time. Both from medians."""
    full = [round_ for round_ in speculative if round_.num_drafted == k]
    tau = sum(round_.num_tokens for round_ in full) / len(full)

    def ratio(part: Callable[[Round], float]) -> float:
        return tau * median(map(part, plain)) / median(map(part, full))

    return ratio(lambda r: r.timing.decode_s), ratio(lambda r: r.timing.draft_s + r.timing.verify_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft", help="a language model")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=5)
    arguments = parser.parse_args()
    k = arguments.k
    torch.set_num_threads(arguments.threads)
    pair = load(arguments.target, arguments.draft, device="cpu", dtype="float32", acceptance="rejection")
    if not isinstance(pair.drafter, ModelDrafter):
        parser.error(f"{arguments.draft} is not a language model")
    buffers = {"memory": _LARGE_BUFFER_BYTES}
    buffers |= {f"weights of {lm.name}": weight_bytes(lm) for lm in (pair.target, pair.drafter.lm)}
    looks = [look(buffers.values())]
    pairs = {pair.target.execution.name: pair}
    arms = []
    for name, decoder in pairs.items():
        arms += [Arm(f"{name} plain", decoder.plain()), Arm(name, decoder, arguments.draft, k)]
    cases = [Case(index, prompt, index) for index, prompt in enumerate(PROMPTS[: arguments.num_prompts])]
    options = {"max_new_tokens": arguments.max_new_tokens, "ignore_eos": True}
    run_rounds(arms, cases, options)  # the same work unmeasured, so that what happens once has happened
    rounds = run_rounds(arms, cases, options)
    looks.append(look(buffers.values()))
    machine = [max(values) for values in zip(*looks, strict=True)]  # the better moment, since others use it too
    console = Console(width=100)
    best = new_table(f"what the machine allows, {arguments.threads} thread(s)", "reading", "MB", "GB/s")
    bandwidths = dict(zip(buffers, machine[:-1], strict=True))
    for name, bandwidth in bandwidths.items():
        best.add_row(name, f"{buffers[name] / 1e6:.1f}", f"{bandwidth / 1e9:.1f}")
    console.print(best, f"  float32 matrix product: {machine[-1] / 1e9:.0f} GFLOP/s\n")
    results = {}
    for name, decoder in pairs.items():
        assert isinstance(decoder.drafter, ModelDrafter)
        parts = parts_of(rounds[f"{name} plain"], rounds[name], decoder.target, decoder.drafter.lm, machine, k)
        console.print(parts_table(parts, f"{arguments.target} with {arguments.draft}, K = {k}, {name}"))
        achieved, predicted = speedup_of(rounds[f"{name} plain"], rounds[name], k)
        console.print(
            f"  speed-up: {achieved:.2f} achieved, {predicted:.2f} predicted by tau / (K c + v): "
            f"{achieved / predicted:.0%}\n"
        )
        speedup = {"achieved": achieved, "predicted": predicted}
        results[name] = {"parts": [asdict(part) for part in parts], "speedup": speedup}
    limits = {"bytes_per_s": bandwidths, "operations_per_s": machine[-1]}
    print(json.dumps({"machine": limits, "results": results, "provenance": provenance("cpu")}))


if __name__ == "__main__":
    main()
