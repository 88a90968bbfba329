"""All products of a forward of few rows: the matrix library against our kernel, for each type of weights.

    python benchmarks/few_row_matmul.py [--threads 2] [--num-layers 14] [--hidden-size 768] [--intermediate-size 2304]
        [--blocks] [--rows 1 5 8]

With --blocks, the weights are in blocks and groups of 4 to 8 bits (kernels/blocks.py) instead, with activations in
float32, and rounded to 8 bits (a8) or 15 (a15). The shapes are those of the targets of benchmarks/grow.py, by default
the one of 110M. All products of a forward are formed in turn, so that the weights come from memory as they do in a
model; attention and the rest are left out. Medians of runs in turn. For the limit, a buffer of the size of the
float32 weights is read in two halves at once. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import linear

from outrider.kernels.blocks import BLOCK_TYPES, GROUP_TYPES, BlockType
from outrider.kernels.library import WEIGHT_TYPES, few_row_matmul
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.measure.tables import new_table
from outrider.system.provenance import provenance

_VOCABULARY = 4096
_ROWS = (1, 5, 8, 12, 16, 32, 48)
_NUM_RUNS = 9
# Places of the scales (and offsets) in a block, numbers of 16 bits (in MXFP4, 39, an exponent).
_PLACES = {8: (0,), 2: (0,), 10: (80, 82), 11: (108,), 12: (0, 2), 20: (0,), 23: (0,), 39: ()}
_HALVES = {BLOCK_TYPES[number]: places for number, places in _PLACES.items()}
_HALVES |= {form: (int(has_zero),) for (size, has_zero), form in GROUP_TYPES.items() if size > 32 or has_zero}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-layers", type=int, default=14)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--intermediate-size", type=int, default=2304)
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    hidden, wide = arguments.hidden_size, arguments.intermediate_size
    layer = [(hidden, hidden)] * 4 + [(wide, hidden)] * 2 + [(hidden, wide)]  # [O, I]
    weights = [torch.randn(shape) for shape in [*layer * arguments.num_layers, (_VOCABULARY, hidden)]]
    forms = {
        "float32": weights,
        "bfloat16": [weight.bfloat16() for weight in weights],
        "float16": [weight.half() for weight in weights],
        "int8": [(30 * weight).clamp(-127, 127).to(torch.int8) for weight in weights],
    }
    form_of: dict[str, BlockType] = {}
    if arguments.blocks:
        forms = {"float32": weights}
        for form in _HALVES:
            for num_digits, ending in enumerate(("", ", a8", ", a15")):
                name = form.name + ending
                form_of[name] = replace(form, num_digits=num_digits)
                forms[name] = [_in_blocks(form_of[name], *weight.shape) for weight in weights]
    num_bytes = sum(weight.nbytes for weight in weights)
    buffer = torch.ones(2, num_bytes // 8)
    arms: dict[tuple[str, int], Callable[[], object]] = {("reading", 0): partial(torch.dot, *buffer)}
    for num_rows in arguments.rows:
        inputs = {width: torch.randn(num_rows, width) for width in (hidden, wide)}
        arms["library, float32", num_rows] = partial(_by_library, inputs, weights)
        for name, matrices in forms.items():
            blocks = form_of.get(name)
            calls = [_by_kernel(inputs, matrix, blocks, arguments.threads) for matrix in matrices]
            arms[name, num_rows] = partial(_all, calls)
    taken: dict[tuple[str, int], list[float]] = {arm: [] for arm in arms}
    with torch.inference_mode():
        for _ in range(_NUM_RUNS):
            for arm, function in arms.items():
                begin = time.perf_counter()
                function()
                taken[arm].append(1e3 * (time.perf_counter() - begin))
    medians = {arm: statistics.median(times) for arm, times in taken.items()}
    reading_ms = medians.pop(("reading", 0))
    table = new_table(f"ms, medians, {arguments.threads} thread(s)", "weights", *(f"{n} rows" for n in arguments.rows))
    for name in dict.fromkeys(name for name, _ in medians):
        table.add_row(name, *(_cell(taken[name, num_rows], arguments.blocks) for num_rows in arguments.rows))
    if arguments.blocks:  # the least too, which other programs disturb less
        table.title = f"ms, medians (and the least), {arguments.threads} thread(s)"
    Console(width=100).print(table, f"  reading {num_bytes / 1e6:.0f} MB: {reading_ms:.1f} ms")
    rows = [
        {"weights": arm[0], "num_rows": arm[1], "ms": ms, "least_ms": min(taken[arm])} for arm, ms in medians.items()
    ]
    print(json.dumps({"reading_ms": reading_ms, "rows": rows, "provenance": provenance("cpu")}))


def _cell(times: list[float], has_least: bool) -> str:
    return f"{statistics.median(times):.1f}" + f" ({min(times):.1f})" * has_least


def _by_library(inputs: dict[int, Tensor], weights: list[Tensor]) -> None:
    for weight in weights:
        linear(inputs[weight.shape[1]], weight)


def _in_blocks(form: BlockType, number: int, width: int) -> Tensor:
    """Any integers, with scales of 0.01. [O, bytes of a row]"""
    blocks = torch.randint(0, 256, (number, width // form.num_numbers, form.num_bytes), dtype=torch.uint8)
    for place in _HALVES[replace(form, num_digits=0)]:
        blocks[..., place : place + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if form.name == "MXFP4":
        blocks[..., 0] = 121
    return NarrowWeight.of_blocks(blocks.flatten(1), form).stored


def _by_kernel(
    inputs: dict[int, Tensor],
    weight: Tensor,
    blocks: BlockType | None,
    num_threads: int,
) -> Callable[[], Tensor]:
    width = weight.shape[1] if blocks is None else blocks.width_of(weight.shape[1])
    x = inputs[width]
    form, num_digits = (WEIGHT_TYPES[weight.dtype], 0) if blocks is None else (blocks.number, blocks.num_digits)
    call = partial(few_row_matmul, x, weight, form, num_threads, num_digits)
    y = call()
    wide = NarrowWeight(weight, torch.float32, None, blocks).wide()
    close = 0.1 if num_digits != 1 else 0.05 * float(wide.norm(dim=-1).amax())
    torch.testing.assert_close(y, linear(x, wide), rtol=1e-3, atol=close)
    return call


def _all(calls: list[Callable[[], Tensor]]) -> None:
    for call in calls:
        call()


if __name__ == "__main__":
    main()
