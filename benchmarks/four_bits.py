"""How far weights in 4 bits are from the original: our groups, by several rules, beside llama.cpp's own blocks.

    python benchmarks/four_bits.py fable [--ggml LIBRARY] [--texts 12] [--tokens 160]

The linear layers but the last are rounded and widened again; all else stays in float32. Texts are sampled from the
original at temperature 1, and both models are forced along them: perplexity, KL(original, rounded) in nats with its
standard error, and alpha, the probability that a token drawn from one is accepted by the other. LIBRARY is a shared
library that exports ``ggml_quantize_chunk``, as every build of llama.cpp has one; without it Q4_0, Q4_1 and Q4_K are
left out. A layer whose width a form does not divide stays as it is; its share is shown. The last line of standard
output is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.bench.tables import new_table
from outrider.models.group_rounding import rounded_to_groups, widened_groups
from outrider.models.quantize import quantizable
from outrider.models.registry import resolve
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_STEPS = (-1.2, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9, 1.2)  # the range is divided by so many steps more
Rule = Callable[[Tensor], Tensor]  # widened weights of weights [O, I]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ggml")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=160)
    arguments = parser.parse_args()
    location = resolve(arguments.model).location
    model = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(location)
    torch.manual_seed(0)
    with torch.inference_mode():
        texts = [_text(model, tokenizer, prompt, arguments.tokens) for prompt in PROMPTS[: arguments.texts]]
        wants = [model(text).logits.log_softmax(-1) for text in texts]
        rows = [_measured("float32", 32.0, lambda weight: weight, model, texts, wants)]
        for name, bits, rule in _rules(arguments.ggml):
            rows.append(_measured(name, bits, rule, model, texts, wants))
    columns = ("weights", "bits", "perplexity", "KL", "alpha", "not rounded", "s")
    table = new_table(f"{arguments.model}, {sum(text.numel() for text in texts)} tokens", *columns)
    for row in rows:
        kl = f"{row['kl']:.5f} ± {row['kl_error']:.5f}"
        values = f"{row['perplexity']:.3f}", kl, f"{row['alpha']:.4f}", f"{row['plain_share']:.0%}", f"{row['s']:.1f}"
        table.add_row(row["weights"], f"{row['bits']:.3f}", *values)
    Console(width=110).print(table)
    print(json.dumps({"rows": rows, "provenance": provenance("cpu")}))


def _text(model: Any, tokenizer: Any, prompt: str, num_tokens: int) -> Tensor:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    text: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
    )
    return text


def _rules(library: str | None) -> Iterator[tuple[str, float, Rule]]:
    if library is not None:
        for form in ("Q4_0", "Q4_1", "Q4_K"):
            kind = gguf.GGMLQuantizationType[form]
            length, size = gguf.GGML_QUANT_SIZES[kind]
            yield f"llama.cpp {form}", 8 * size / length, _of_ggml(library, kind)
    yield "int4, as it is", 4.75, _as_it_is
    for size in (32, 64, 128):
        for has_zero in (False, True):
            for rule in ("largest", "searched", "searched, weighted"):
                name = f"group of {size}{' with a zero' * has_zero}, {rule}"
                yield name, 4 + (16 + 8 * has_zero) / size, _in_groups(size, has_zero, rule)


def _of_ggml(library: str, kind: gguf.GGMLQuantizationType) -> Rule:
    length, _ = gguf.GGML_QUANT_SIZES[kind]

    def rule(weight: Tensor) -> Tensor:
        if weight.shape[1] % length:
            return weight
        return torch.from_numpy(gguf.dequantize(by_ggml(library, weight.contiguous().numpy(), kind), kind))

    return rule


def by_ggml(library: str, numbers: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Blocks by llama.cpp's own quantizer. float32 [O, I] -> uint8 [O, bytes of a row]"""
    quantize = ctypes.CDLL(library).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.zeros((numbers.shape[0], numbers.shape[1] // length * size), np.uint8)
    places = (ctypes.c_void_p(one.ctypes.data) for one in (numbers, blocks))
    quantize(ctypes.c_int(int(kind)), *places, ctypes.c_int64(0), *map(ctypes.c_int64, numbers.shape), None)
    return blocks


def _as_it_is(weight: Tensor) -> Tensor:
    return widened_groups(*rounded_to_groups(weight))


def _in_groups(size: int, has_zero: bool, rule: str) -> Rule:
    """Of some scales, the one with the least error after a least-squares fit, perhaps weighted by sizes of numbers."""

    def rounded(weight: Tensor) -> Tensor:
        if weight.shape[1] % size:
            return weight
        numbers = weight.unflatten(-1, (-1, size))
        root = numbers.square().mean(-1, keepdim=True).sqrt()
        weights = numbers.abs() + root if "weighted" in rule else torch.ones_like(numbers)
        low, high = numbers.amin(-1, keepdim=True).clamp_max(0), numbers.amax(-1, keepdim=True).clamp_min(0)
        largest = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))
        least, found = torch.full_like(low, torch.inf), torch.zeros_like(numbers)
        for step in _STEPS if "searched" in rule else (0.0,):
            scale = ((high - low) / (15 + step) if has_zero else largest / -(8 + step)).half().float()
            scale = torch.where(scale == 0, 1.0, scale)
            zero = (-low / scale - step / 2).round().clamp(0, 15) if has_zero else 8.0
            wholes = ((numbers / scale).round() + zero).clamp(0, 15) - zero
            if "searched" in rule:
                sizes = (weights * wholes.square()).sum(-1, keepdim=True).clamp_min(1e-30)
                scale = ((weights * numbers * wholes).sum(-1, keepdim=True) / sizes).half().float()
            error = (weights * (numbers - wholes * scale).square()).sum(-1, keepdim=True)
            found = torch.where(error < least, wholes * scale, found)
            least = torch.minimum(error, least)
        return found.flatten(-2)

    return rounded


def _measured(
    name: str, bits: float, rule: Rule, original: Any, texts: list[Tensor], wants: list[Tensor]
) -> dict[str, Any]:
    model = copy.deepcopy(original)
    begin, plain, total = time.perf_counter(), 0, 0
    for layer in quantizable(model).values():
        weight = layer.weight.data
        rounded = rule(weight)
        plain += weight.numel() * (rounded is weight)
        total += weight.numel()
        layer.weight.data = rounded
    taken, divergences, overlaps, losses = time.perf_counter() - begin, [], [], []
    for text, want in zip(texts, wants, strict=True):
        got = model(text).logits.log_softmax(-1)
        divergences.append((want.exp() * (want - got)).sum(-1).flatten())
        overlaps.append(torch.minimum(want.exp(), got.exp()).sum(-1).flatten())
        losses.append(-got[0, :-1].gather(-1, text[0, 1:, None]).flatten())
    kl, alpha, loss = (torch.cat(parts) for parts in (divergences, overlaps, losses))
    return {
        "weights": name,
        "bits": bits,
        "perplexity": float(loss.mean().exp()),
        "kl": float(kl.mean()),
        "kl_error": float(kl.std() / len(kl) ** 0.5),
        "alpha": float(alpha.mean()),
        "plain_share": plain / total,
        "s": taken,
    }


if __name__ == "__main__":
    main()
