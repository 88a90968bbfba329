"""All products of a forward of few rows: the matrix library against our kernel, for each type of weights.

    python benchmarks/few_row_matmul.py [--threads 2] [--num-layers 14]

The shapes are those of the 110M target of benchmarks/grow.py. Every product of a forward is formed in turn, so that the
weights come from memory as they do in a model; attention and all else is left out. Medians of runs in turn. For the
limit, a buffer of the size of the float32 weights is read in two halves at once. The last line of standard output is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import linear

from outrider.bench.report import new_table
from outrider.kernels.library import FORMS, into
from outrider.system.provenance import provenance

_LAYER = [(768, 768)] * 4 + [(2304, 768)] * 2 + [(768, 2304)]  # [O, I]
_HEAD = (4096, 768)
_ROWS = (1, 5, 8, 12, 16, 32, 48)
_NUM_RUNS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-layers", type=int, default=14)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    weights = [torch.randn(shape) for shape in [*_LAYER * arguments.num_layers, _HEAD]]
    forms = {
        "float32": weights,
        "bfloat16": [weight.bfloat16() for weight in weights],
        "int8": [(30 * weight).clamp(-127, 127).to(torch.int8) for weight in weights],
    }
    num_bytes = sum(weight.nbytes for weight in weights)
    buffer = torch.ones(2, num_bytes // 8)
    arms: dict[tuple[str, int], Callable[[], object]] = {("reading", 0): partial(torch.dot, *buffer)}
    results = []  # of the kernel, which has their addresses alone
    for num_rows in _ROWS:
        inputs = {width: torch.randn(num_rows, width) for width in (768, 2304)}
        outputs = {number: torch.empty(num_rows, number) for number in (768, 2304, 4096)}
        results.append(outputs)
        arms["library, float32", num_rows] = partial(_by_library, inputs, weights)
        for name, matrices in forms.items():
            calls = [_by_kernel(inputs, outputs, matrix, arguments.threads) for matrix in matrices]
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
    table = new_table(f"ms, medians, {arguments.threads} thread(s)", "weights", *(f"{n} rows" for n in _ROWS))
    for name in dict.fromkeys(name for name, _ in medians):
        table.add_row(name, *(f"{medians[name, num_rows]:.1f}" for num_rows in _ROWS))
    Console(width=100).print(table, f"  reading {num_bytes / 1e6:.0f} MB: {reading_ms:.1f} ms")
    rows = [{"weights": name, "num_rows": num_rows, "ms": ms} for (name, num_rows), ms in medians.items()]
    print(json.dumps({"reading_ms": reading_ms, "rows": rows, "provenance": provenance("cpu")}))


def _by_library(inputs: dict[int, Tensor], weights: list[Tensor]) -> None:
    for weight in weights:
        linear(inputs[weight.shape[1]], weight)


def _by_kernel(
    inputs: dict[int, Tensor], outputs: dict[int, Tensor], weight: Tensor, num_threads: int
) -> Callable[[], None]:
    x, y = inputs[weight.shape[1]], outputs[weight.shape[0]]
    call = into(y, x, [weight], FORMS[weight.dtype], num_threads)
    call()
    torch.testing.assert_close(y, linear(x, weight.float()), rtol=1e-3, atol=0.1)
    return call


def _all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


if __name__ == "__main__":
    main()
