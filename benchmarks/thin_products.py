"""Products of a few rows with a weight matrix: the matrix library against sums that the compiler fuses (thin.py).

    python benchmarks/thin_products.py [--threads 1]

Both are compiled by Inductor and include the same overhead of a call (about 25 us); they are run in turn. The last line
of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import linear

from outrider.bench.report import new_table
from outrider.runtime.thin_products import MAX_THIN_ROWS, ThinProducts
from outrider.system.provenance import provenance

_SHAPES = [(768, 256), (4096, 256), (2304, 768), (4096, 768)]  # [N, K], as in the embedded target and one of 110M
_NUM_RUNS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    table = new_table("microseconds, medians", "weights", "rows", "library", "sums", "ratio")
    rows = []
    for shape in _SHAPES:
        weight = torch.randn(*shape)
        for num_rows in (1, 2, 5, MAX_THIN_ROWS):
            x = torch.randn(num_rows, shape[1])
            library_us, sums_us = _medians_us([_compiled(False), _compiled(True)], x, weight)
            table.add_row(
                f"{shape[0]} x {shape[1]}",
                str(num_rows),
                f"{library_us:.0f}",
                f"{sums_us:.0f}",
                f"{library_us / sums_us:.2f}",
            )
            rows.append({"shape": shape, "num_rows": num_rows, "library_us": library_us, "sums_us": sums_us})
    Console(width=100).print(table)
    print(json.dumps({"rows": rows, "provenance": provenance("cpu")}))


def _compiled(is_thin: bool) -> Callable[[Tensor, Tensor], Tensor]:
    torch.compiler.reset()
    options = {"post_grad_custom_pre_pass": ThinProducts()} if is_thin else {}
    return torch.compile(lambda x, weight: linear(x, weight), fullgraph=True, dynamic=False, options=options)


def _medians_us(functions: list[Callable[[Tensor, Tensor], Tensor]], x: Tensor, weight: Tensor) -> list[float]:
    taken: list[list[float]] = [[] for _ in functions]
    with torch.no_grad():
        for function in functions:
            torch.testing.assert_close(function(x, weight), linear(x, weight), rtol=1e-3, atol=1e-3)
        for _ in range(_NUM_RUNS):
            for function, times in zip(functions, taken, strict=True):
                begin = time.perf_counter()
                function(x, weight)
                times.append(time.perf_counter() - begin)
    return [1e6 * statistics.median(times) for times in taken]


if __name__ == "__main__":
    main()
