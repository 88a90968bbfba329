"""A verify of several tokens over a plain step, of a model with recurrent layers in the native engine.

    python benchmarks/recurrent_verify.py [--threads 2] [--tokens 1 3 5 9] [--rounds 24] [--weights q4_k|int8]
        [--num-layers 24] > recurrent_verify.txt

The model has the shape of Qwen3.5-0.8B and random weights: matrices in Q4_K with activations of 8 bits, as files have
them, or in int8. A round feeds T tokens, of which about two thirds stay, as after a verify; arms take turns, round by
round. "behind" is the mean number of tokens whose inputs a forward consumes again. A ratio is the median of the
rounds' ratios to the plain step beside them. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.kernels.blocks import BLOCK_TYPES
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.measure.tables import new_table
from outrider.models.families.table import plan_of
from outrider.native.engine import NativeForward
from outrider.runtime.cache import SlotCache
from outrider.system.provenance import provenance

_CAPACITY, _PROMPT, _WARM_UP = 2048, 128, 4
_Q4_K = 12
_SHAPE = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 3, 5, 9])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--weights", choices=["q4_k", "int8"], default="q4_k")
    parser.add_argument("--num-layers", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = _model(arguments.num_layers, arguments.weights)
    native = NativeForward(model, plan_of(model.config))
    taken: dict[int, list[float]] = {width: [] for width in arguments.tokens}
    behind: dict[int, list[int]] = {width: [] for width in arguments.tokens}
    arms = {width: SlotCache.empty(native.layer_shapes, 1, _CAPACITY) for width in arguments.tokens}
    done = dict.fromkeys(arms, _PROMPT)
    with torch.inference_mode():
        prompt = torch.arange(_PROMPT)[None]
        for cache in arms.values():
            native(prompt, prompt, cache, _CAPACITY, num_logits=1)
        for number in range(_WARM_UP + arguments.rounds):
            for width, cache in arms.items():
                ids, places = torch.full((1, width), number), done[width] + torch.arange(width)[None]
                num_behind, begin_s = done[width] - int(cache.anchors[0]), time.perf_counter()
                native(ids, places, cache, _CAPACITY, keeps_finite=True)
                if number >= _WARM_UP:
                    taken[width].append(1e3 * (time.perf_counter() - begin_s))
                    behind[width].append(num_behind)
                done[width] += max(1, 2 * width // 3)
    plain = taken[arguments.tokens[0]]
    rows = [
        {
            "tokens": width,
            "ms": statistics.median(times),
            "over_plain": statistics.median(time / one for time, one in zip(times, plain, strict=True)),
            "least_over_least": min(times) / min(plain),
            "behind": statistics.fmean(behind[width]),
        }
        for width, times in taken.items()
    ]
    title = f"Qwen3.5-0.8B's shape, {arguments.weights}, {arguments.num_layers} layers, {arguments.threads} thread(s)"
    table = new_table(title, "tokens", "ms, median", "over plain", "least over least", "behind")
    for row in rows:
        numbers = row["ms"], row["over_plain"], row["least_over_least"], row["behind"]
        table.add_row(str(row["tokens"]), *(f"{number:.2f}" for number in numbers))
    Console(width=100).print(table)
    print(json.dumps({"provenance": provenance("cpu"), "rows": rows}))


def _model(num_layers: int, weights: str) -> Any:
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=num_layers, **_SHAPE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    made: dict[int, nn.Parameter] = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        if id(old) not in made:
            one = _stored(old.shape, weights) if old.ndim == 2 else 0.1 * torch.randn(old.shape)
            made[id(old)] = nn.Parameter(one, requires_grad=False)
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, made[id(old)])
    return model


def _stored(shape: torch.Size, weights: str) -> Tensor:
    number, width = shape
    if weights == "int8" or width % 256 or number % 16:
        scale = torch.full((number, 1), 1e-3)
        return NarrowWeight(torch.randint(-64, 64, (number, width), dtype=torch.int8), torch.float32, scale)
    form = replace(BLOCK_TYPES[_Q4_K], num_digits=1)
    blocks = torch.randint(0, 256, (number, width // form.num_numbers, form.num_bytes), dtype=torch.uint8)
    blocks[..., :4] = torch.tensor([1e-3, 1e-3], dtype=torch.float16).view(torch.uint8)
    return NarrowWeight.of_blocks(blocks.flatten(1), form)


if __name__ == "__main__":
    main()
