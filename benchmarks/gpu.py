"""Big models on a CUDA device: speculative sampling against plain decoding, and that against the memory's bandwidth.

    python benchmarks/gpu.py > benchmarks/results/gpu.txt

The embedded target is grown (see grow.py) to the shapes of the Llama models from 1B to 65B, in bfloat16, and decoded
plainly, captured (docs/internals/architecture.md) and eager, by Hugging Face's ``generate``, and at K = 4, captured,
with the embedded draft, which has real acceptance, and with grown drafts no bigger than the target. A grown draft
computes the same function as its target: they agree but for rounding, acceptance is near 1, and its rows show the
cost of a draft of that size and an upper bound of what it could gain.
Grown models keep the embedded target's vocabulary of 4096.

What does not fit the free memory is left out by name. Where there is no CUDA device, nothing is measured. The last line
of standard output is one JSON document; ``--partial FILE`` has the results after each target, if time should run out.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from grow import grow
from intervals import interval_text
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.errors import ExecutionError
from outrider.measure.arms import Arm, Case, interleave, summarise, warm_up
from outrider.measure.tables import new_table
from outrider.models.registry import Placement, resolve
from outrider.records import Interval
from outrider.runtime.lm import LM
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_K = 4
_WARM_UP = "The rain had stopped by the time they reached the mill."
_SOURCE, _EMBEDDED_DRAFT = "fable", "fable-draft"
_COPY_BYTES = 2**30
_NUM_COPIES = 20
_SPARE_BYTES = 4 * 2**30  # activations, graphs, and what the libraries take


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama model with tied embeddings, in bfloat16."""

    hidden_size: int
    num_layers: int
    intermediate_size: int

    def weight_bytes(self, vocab_size: int) -> int:
        d = self.hidden_size
        return 2 * (self.num_layers * (4 * d * d + 3 * d * self.intermediate_size) + vocab_size * d)

    def cache_bytes(self, length: int) -> int:
        return 2 * 2 * self.num_layers * self.hidden_size * length


SHAPES = {
    "1B": Shape(2048, 22, 5632),
    "7B": Shape(4096, 32, 11008),
    "13B": Shape(5120, 40, 13824),
    "30B": Shape(6656, 60, 17920),
    "65B": Shape(8192, 80, 22016),
}
_DRAFTS = ("1B", "7B")


def weight_bytes(lm: LM) -> int:
    """Weights that every step reads: all but an input embedding that is not the output matrix too."""
    model: Any = lm.model
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    return sum(p.numel() * p.element_size() for p in model.parameters() if is_tied or p is not embedding)


def step_bytes(lm: LM, length: int) -> int:
    """Bytes that a step of one token must move when the text has ``length`` of them in the end."""
    model: Any = lm.model
    row = model.get_input_embeddings().weight[0].nbytes
    view_len = min(lm.execution.round_length(length), lm.context_len)
    return weight_bytes(lm) + row + (view_len + 1) * sum(shape.bytes_per_token for shape in lm.layer_shapes)


def free_bytes(device: torch.device) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0]) - _SPARE_BYTES


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second while copying a big buffer; the best of several."""
    source, target = torch.zeros(2, _COPY_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_NUM_COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * _COPY_BYTES / min(times)


@torch.inference_mode()
def generate_ms_per_token(decoder: Decoder, num_prompts: int, num_tokens: int) -> float:
    """Hugging Face's plain sampling without the prefill, which is timed by itself: it gives the first token."""
    model: Any = decoder.target.model

    def generate_s(prompt: str, n: int) -> float:
        ids = torch.tensor([decoder.encode(prompt)], device=model.device)
        start = time.perf_counter()
        lengths = {"min_new_tokens": n, "max_new_tokens": n, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **lengths)
        out.tolist()  # waits for the device
        return time.perf_counter() - start

    generate_s(_WARM_UP, 8)
    times = [generate_s(prompt, num_tokens) - generate_s(prompt, 1) for prompt in PROMPTS[:num_prompts]]
    return 1e3 * sum(times) / num_prompts / (num_tokens - 1)


def measure_target(
    target: LlamaForCausalLM, drafts: dict[str, Any], bandwidth: float, num_prompts: int, num_tokens: int
) -> dict[str, Any]:
    """All arms of one target, against the plain one. ``drafts``: by label, a known name or a model in memory."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(_SOURCE).location)
    plain, fast = (
        load(target, tokenizer=tokenizer, acceptance="rejection", execution=name) for name in ("eager", "captured")
    )
    arms = [Arm("plain", fast), Arm("plain, eager", plain)]
    for name, draft in drafts.items():
        drafter = load_drafter(fast, draft, placement=Placement(str(target.device), "bfloat16"))
        arms.append(Arm(name, replace(fast, drafter=drafter), name, _K))
    options = {"max_new_tokens": num_tokens, "ignore_eos": True}
    cases = [Case(index, prompt, index) for index, prompt in enumerate(PROMPTS[:num_prompts])]
    warm_up(arms, cases, options)
    measurements = list(interleave(arms, cases, options))
    # Every round of plain decoding gives one token.
    step_s = median(m.timing.verify_s / m.stats.num_generated_tokens for m in measurements if m.arm is arms[0])
    length = len(plain.encode(PROMPTS[0])) + num_tokens // 2
    return {
        "weight_bytes": weight_bytes(plain.target),
        "arms": [summary.to_json() for summary in summarise(measurements, arms)],  # which holds no model
        "generate_ms_per_token": generate_ms_per_token(plain, num_prompts, num_tokens),
        "plain_step_s": step_s,
        "limit_s": step_bytes(plain.target, length) / bandwidth,
    }


def measure_all(
    device: torch.device, names: list[str], num_prompts: int, num_tokens: int, partial: Path | None
) -> tuple[dict[str, Any], list[str], float]:
    """The results of all targets that fit, what did not, and the bandwidth."""
    source = AutoModelForCausalLM.from_pretrained(resolve(_SOURCE).location, dtype=torch.bfloat16).to(device)
    bandwidth = copy_bandwidth(device)
    results: dict[str, Any] = {}
    skipped = []
    for name in names:
        shape = SHAPES[name]
        drafts: dict[str, Any] = {_EMBEDDED_DRAFT: _EMBEDDED_DRAFT}  # and with it go the grown ones of the last target
        num_bytes = shape.weight_bytes(source.config.vocab_size)
        # The probe of a model at loading takes the cache of a full context.
        left = free_bytes(device) - num_bytes - shape.cache_bytes(source.config.max_position_embeddings)
        try:
            if left < 0:
                raise torch.OutOfMemoryError("the weights do not fit")
            for draft in _DRAFTS:
                draft_bytes = SHAPES[draft].weight_bytes(source.config.vocab_size)
                if draft_bytes <= min(num_bytes, left):
                    drafts[f"{draft}, grown"] = grow(source, **asdict(SHAPES[draft]))
                    left -= draft_bytes
                elif draft_bytes <= num_bytes:
                    skipped.append(f"{draft} for {name}")
            results[name] = measure_target(grow(source, **asdict(shape)), drafts, bandwidth, num_prompts, num_tokens)
        except (torch.OutOfMemoryError, ExecutionError) as error:  # what was measured before is not to be lost
            print(f"{name}: {error}", file=sys.stderr)
            skipped.append(name)
        if partial is not None:
            partial.write_text(json.dumps(document(results, skipped, bandwidth)), encoding="utf-8")
    return results, skipped, bandwidth


def document(results: dict[str, Any], skipped: list[str], bandwidth: float) -> dict[str, Any]:
    found = {"measured": True, "results": results, "skipped": skipped, "copy_bytes_per_s": bandwidth}
    return found | {"provenance": provenance("cuda")}


def print_tables(console: Console, results: dict[str, Any], skipped: list[str], bandwidth: float) -> None:
    speeds = new_table(f"grown {_SOURCE}, K = {_K}, bfloat16", "model", "draft", "ms/token", "speed improvement")
    steps = new_table(f"plain step, {bandwidth / 1e9:.0f} GB/s", "model", "measured ms", "limit ms", "achieved")
    for name, result in results.items():
        plain_ms, generate_ms = result["arms"][0]["ms_per_token"]["mean"], result["generate_ms_per_token"]
        for arm in result["arms"]:
            speed_up = arm["speed_up"]
            interval = interval_text(Interval(**speed_up) if speed_up else None)
            speeds.add_row(name, arm["draft"] or arm["name"], f"{arm['ms_per_token']['mean']:.2f}", interval)
        speeds.add_row(name, "plain, Hugging Face", f"{generate_ms:.2f}", f"{plain_ms / generate_ms:.2f}")
        speeds.add_section()
        step_s, limit_s = result["plain_step_s"], result["limit_s"]
        steps.add_row(name, f"{1e3 * step_s:.2f}", f"{1e3 * limit_s:.2f}", f"{limit_s / step_s:.0%}")
    console.print(speeds, steps)
    console.print(f"left out: {', '.join(skipped) or 'nothing'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=5, help=f"at most {len(PROMPTS)}")
    parser.add_argument("--target", action="append", choices=list(SHAPES), help="repeatable; default: all")
    parser.add_argument("--partial", type=Path, help="a file for the results after each target")
    arguments = parser.parse_args()
    console = Console(width=100)
    if not torch.cuda.is_available():
        out = new_table(f"grown {_SOURCE}", "model", "draft", "ms/token", "speed improvement")
        out.add_row(", ".join(SHAPES), *["not measured"] * 3)
        console.print(out)
        print(json.dumps({"measured": False, "provenance": provenance("cpu")}))
        return
    device = torch.device("cuda")
    names = arguments.target or list(SHAPES)
    results = measure_all(device, names, arguments.num_prompts, arguments.max_new_tokens, arguments.partial)
    print_tables(console, *results)
    print(json.dumps(document(*results)))


if __name__ == "__main__":
    main()
