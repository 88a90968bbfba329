"""A model with states: speculative over plain, measured and predicted, for several drafts and A (see runtime/cache.py).

    python benchmarks/states.py TARGET DRAFT ... > states.txt

Arms take turns, prompt by prompt: plain decoding, plain decoding by Hugging Face's `generate`, and each draft with each
K at each A, at temperature 0 and 1. (A = 1 is to replay what was accepted after every rejection.) "over plain" is the
ratio of the seconds per token of this package's plain decoding to the arm's, without prompts (for Hugging Face's, with
them), paired by prompt, with its 95% interval. "predicted" is the same from tau and from the costs of rounds, which are
measured on random text before. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

from outrider.api import load
from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER
from outrider.measure.intervals import paired_ratio
from outrider.measure.round_costs import measure_round_costs
from outrider.measure.tables import new_table
from outrider.runtime import cache as cache_module
from outrider.runtime import lm as lm_module
from outrider.runtime.cache import STRIDE
from outrider.sampling.rules import RULES
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_STRIDES, _KS = (1, 2, 4, 8, 16), (2, 4, 8)
_NUM_TOKENS, _NUM_PROMPTS = 96, 6


@dataclass
class _Arm:
    """
    Attributes:
        run: (prompt, temperature, seed) -> rounds, and seconds without the prompt if these are known.
        total_s, decode_s: of each prompt.
    """

    name: str
    run: Callable[[str, float, int], tuple[int, float]]
    decoder: Decoder | None = None
    stride: int = STRIDE
    k: int = 0
    num_rounds: int = 0
    total_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafts", nargs="+", metavar="DRAFT")
    parser.add_argument("--strides", type=int, nargs="*", default=_STRIDES, metavar="A")
    parser.add_argument("--k", type=int, nargs="*", default=_KS)
    arguments = parser.parse_args()
    first = load(arguments.target, draft=arguments.drafts[0], device="cpu")
    decoders = [first]
    for draft in arguments.drafts[1:]:
        decoders.append(replace(first, drafter=load(arguments.target, draft=draft, device="cpu").drafter))
    strides = arguments.strides if first.target.has_states else [STRIDE]
    costs = {
        (i, stride): _costs(decoder, stride) for i, decoder in enumerate(decoders) for stride in sorted(set(strides))
    }
    found = []
    for temperature in (0.0, 1.0):
        arms = [_Arm("Hugging Face", _hugging_face(first)), _Arm("plain", _ours(decoders[0], 0))]
        for i, stride in costs:
            decoder = decoders[i]
            for k in arguments.k:
                name = f"{decoder.drafter.name}, K = {k}"
                arms.append(_Arm(name, _ours(decoder, k), decoder, stride, k))
        for number, prompt in enumerate([PROMPTS[0], *PROMPTS[:_NUM_PROMPTS]]):
            for arm in arms:
                _set_stride(arm.stride)
                begin = time.perf_counter()
                num_rounds, decode_s = arm.run(prompt, temperature, number)
                if number > 0:  # the first is for what happens once
                    arm.total_s.append(time.perf_counter() - begin)
                    arm.decode_s.append(decode_s)
                    arm.num_rounds += num_rounds
        found += _rows(decoders, costs, arms, temperature)
    table = new_table(
        f"{arguments.target}, {decoders[0].target.execution.name}, {torch.get_num_threads()} threads",
        *("arm", "temperature", "A", "tokens/s", "tau", "over plain", "predicted"),
    )
    for row in found:
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.2f}"
        low, high = row["interval"]
        values = f"{row['tokens_per_s']:.1f}", f"{row['tau']:.2f}", f"{row['over_plain']:.2f} ({low:.2f} to {high:.2f})"
        table.add_row(row["arm"], f"{row['temperature']:.0f}", str(row["stride"] or ""), *values, predicted)
    Console(width=100).print(table)
    json.dump({"provenance": provenance("cpu"), "rows": found}, sys.stdout)
    print()


def _set_stride(stride: int) -> None:
    cache_module.STRIDE = lm_module.STRIDE = stride


def _costs(decoder: Decoder, stride: int) -> dict[int, float]:
    _set_stride(stride)
    return measure_round_costs(decoder.target, decoder.drafter, RULES["block"])


def _ours(decoder: Decoder, k: int) -> Callable[[str, float, int], tuple[int, float]]:
    decoder = replace(decoder, num_draft_tokens=k) if k else replace(decoder, drafter=NO_DRAFTER)

    def run(prompt: str, temperature: float, seed: int) -> tuple[int, float]:
        options = {"temperature": temperature, "seed": seed, "max_new_tokens": _NUM_TOKENS, "ignore_eos": True}
        chunks = list(decoder.stream(prompt, **options))
        timings = [chunk.timing for chunk in chunks if chunk.timing.total_s > 0]  # one of each round
        return len(timings), sum(timing.decode_s for timing in timings)

    return run


def _hugging_face(decoder: Decoder) -> Callable[[str, float, int], tuple[int, float]]:
    model: Any = decoder.target.model

    def run(prompt: str, temperature: float, seed: int) -> tuple[int, float]:
        torch.manual_seed(seed)
        ids = torch.tensor([decoder.encode(prompt)])
        options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        new = {"max_new_tokens": _NUM_TOKENS, "min_new_tokens": _NUM_TOKENS}
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **new, **options)
        return _NUM_TOKENS, math.nan

    return run


def _rows(
    decoders: list[Decoder], costs: dict[tuple[int, int], dict[int, float]], arms: list[_Arm], temperature: float
) -> list[dict[str, Any]]:
    plain = next(arm for arm in arms if arm.name == "plain")
    rows = []
    for arm in arms:
        is_other = math.isnan(arm.decode_s[0])
        ratio = paired_ratio(*((plain.total_s, arm.total_s) if is_other else (plain.decode_s, arm.decode_s)))
        tau = _NUM_TOKENS * len(arm.total_s) / arm.num_rounds
        cost = next((costs[i, arm.stride] for i, one in enumerate(decoders) if one is arm.decoder), None)
        rows.append(
            {
                "temperature": temperature,
                "arm": arm.name,
                "stride": arm.stride if decoders[0].target.has_states and arm.k else 0,
                "k": arm.k,
                "tokens_per_s": _NUM_TOKENS * len(arm.total_s) / sum(arm.total_s),
                "tau": tau,
                "over_plain": ratio.value,
                "interval": (ratio.low, ratio.high),
                "predicted": None if cost is None else tau * cost[0] / cost[arm.k],
            }
        )
    return rows


if __name__ == "__main__":
    main()
