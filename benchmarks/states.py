"""A pair of models with states: speculative over plain, measured and predicted, for several A (see runtime/cache.py).

    python benchmarks/states.py TARGET DRAFT > states.txt

Arms take turns, prompt by prompt: plain decoding, plain decoding by Hugging Face's `generate`, and each K at each A, at
temperature 0 and 1, eagerly. (A = 1 is to replay what was accepted after every rejection.) "over plain" is the ratio of
tokens per second to plain decoding of this package. "predicted" is the same from tau and from the costs of rounds,
which are measured on random text before. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

from outrider.api import load
from outrider.bench.report import new_table
from outrider.decoder import Decoder
from outrider.decoding.costs import measure_round_costs
from outrider.drafters.base import NoDrafter
from outrider.evals.prompts import PROMPTS
from outrider.runtime import cache as cache_module
from outrider.runtime import lm as lm_module
from outrider.sampling.rules import RULES
from outrider.system.provenance import provenance

_STRIDES, _KS = (1, 2, 4, 8, 16), (2, 4, 8)
_NUM_TOKENS, _NUM_PROMPTS = 96, 6


@dataclass
class _Arm:
    name: str
    stride: int
    k: int
    seconds: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    run: Callable[[str, float, int], tuple[int, int]] = field(repr=False, default=lambda *_: (0, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--strides", type=int, nargs="*", default=_STRIDES, metavar="A")
    parser.add_argument("--k", type=int, nargs="*", default=_KS)
    arguments = parser.parse_args()
    decoder = load(arguments.target, draft=arguments.draft, device="cpu")
    found = []
    for temperature in (0.0, 1.0):
        arms = [_Arm("Hugging Face", 0, 0, run=_hugging_face(decoder))]
        arms += [_Arm("plain", 8, 0, run=_ours(decoder, 0))]
        arms += [_Arm(f"K = {k}", a, k, run=_ours(decoder, k)) for a in arguments.strides for k in arguments.k]
        for number, prompt in enumerate([PROMPTS[0], *PROMPTS[:_NUM_PROMPTS]]):
            for arm in arms:
                _set_stride(arm.stride)
                begin = time.perf_counter()
                num_tokens, num_rounds = arm.run(prompt, temperature, number)
                if number > 0:  # the first is for what happens once
                    arm.seconds += time.perf_counter() - begin
                    arm.num_tokens += num_tokens
                    arm.num_rounds += num_rounds
        found += _rows(decoder, arms, temperature)
    table = new_table(
        f"{arguments.target}, drafts by {arguments.draft}, {torch.get_num_threads()} threads",
        *("arm", "temperature", "A", "tokens/s", "tau", "over plain", "predicted"),
    )
    for row in found:
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.2f}"
        values = f"{row['tokens_per_s']:.1f}", f"{row['tau']:.2f}", f"{row['over_plain']:.2f}", predicted
        table.add_row(row["arm"], f"{row['temperature']:.0f}", str(row["stride"] or ""), *values)
    Console(width=100).print(table)
    json.dump({"provenance": provenance("cpu"), "rows": found}, sys.stdout)
    print()


def _set_stride(stride: int) -> None:
    if stride:
        cache_module.STRIDE = lm_module.STRIDE = stride


def _ours(decoder: Decoder, k: int) -> Callable[[str, float, int], tuple[int, int]]:
    decoder = replace(decoder, num_draft_tokens=k) if k else replace(decoder, drafter=NoDrafter())

    def run(prompt: str, temperature: float, seed: int) -> tuple[int, int]:
        options = {"temperature": temperature, "seed": seed, "max_new_tokens": _NUM_TOKENS, "ignore_eos": True}
        stats = decoder.generate(prompt, **options)[0].stats
        return stats.num_generated_tokens, stats.num_rounds

    return run


def _hugging_face(decoder: Decoder) -> Callable[[str, float, int], tuple[int, int]]:
    model: Any = decoder.target.model

    def run(prompt: str, temperature: float, seed: int) -> tuple[int, int]:
        torch.manual_seed(seed)
        ids = torch.tensor([decoder.encode(prompt)])
        options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        new = {"max_new_tokens": _NUM_TOKENS, "min_new_tokens": _NUM_TOKENS}
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **new, **options)
        return _NUM_TOKENS, _NUM_TOKENS

    return run


def _rows(decoder: Decoder, arms: list[_Arm], temperature: float) -> list[dict[str, Any]]:
    costs: dict[int, dict[int, float]] = {}
    for stride in sorted({arm.stride for arm in arms if arm.stride}):
        _set_stride(stride)
        costs[stride] = measure_round_costs(decoder.target, decoder.drafter, RULES["block"], 1, 256)
    plain = next(arm for arm in arms if arm.name == "plain")
    plain_s = plain.seconds / plain.num_tokens
    rows = []
    for arm in arms:
        tau = arm.num_tokens / arm.num_rounds
        cost = costs.get(arm.stride, {})
        rows.append(
            {
                "temperature": temperature,
                "arm": arm.name,
                "stride": arm.stride,
                "k": arm.k,
                "tokens_per_s": arm.num_tokens / arm.seconds,
                "tau": tau,
                "over_plain": plain_s / (arm.seconds / arm.num_tokens),
                "predicted": tau * cost[0] / cost[arm.k] if arm.k in cost and arm.k else None,
            }
        )
    return rows


if __name__ == "__main__":
    main()
