"""Predicted memory beside measured, on the CPU: weights, cache and steps of one target.

    python benchmarks/memory.py [--target grown-110m] > memory.txt

Each configuration runs in a process of its own, which loads the target, generates with rows of the full context, and
reads the most memory that it held meanwhile (VmHWM of Linux). The memory of the same process after the embedded draft
generated, before the target is loaded, is taken off: Python, torch and its kernels. While it is loaded, a checkpoint
that is converted or quantized is in memory as well, as pages of its file, which the system takes back when it needs
them; they do not count. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoConfig

from outrider.api import load
from outrider.bench.predicted_memory import Predictor, Workload
from outrider.bench.tables import new_table
from outrider.decoder import Decoder
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.placement import DTYPES
from outrider.models.registry import resolve
from outrider.system.provenance import provenance

# dtype, quantization, rows, tokens in each
_CONFIGURATIONS = [
    ("float32", "none", 1, 512),
    ("float32", "none", 8, 512),
    ("float32", "none", 32, 512),
    ("bfloat16", "none", 8, 512),
    ("bfloat16", "none", 32, 512),
    ("float32", "int8", 32, 512),
]
_K = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        dtype, quantization, rows, context = arguments.measure
        print(_held(arguments.target, dtype, quantization, int(rows), int(context)))
        return
    config = AutoConfig.from_pretrained(resolve(arguments.target).location)
    name = Path(arguments.target).name
    table = new_table(
        f"{name}: MiB on the CPU",
        *("form", "rows x tokens", "weights", "cache", "prefill", "verify", "predicted", "measured", "difference"),
    )
    found = []
    for dtype, quantization, rows, context in _CONFIGURATIONS:
        predicted = Predictor(config, Workload(context, rows, _K), DTYPES[dtype]).memory(quantization)
        command = [sys.executable, __file__, "--target", arguments.target]
        command += ["--measure", dtype, quantization, str(rows), str(context)]
        # Or the C library would keep up to some ten MiB of freed blocks for itself.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        measured = int(done.stdout)
        parts = (predicted.weights, predicted.cache, predicted.prefill or 0, predicted.verify or 0, predicted.total)
        form = dtype if quantization == "none" else f"{dtype}, {quantization}"
        numbers = [f"{part / 2**20:.0f}" for part in (*parts, measured)]
        table.add_row(form, f"{rows} x {context}", *numbers, f"{predicted.total / measured - 1:+.1%}")
        found.append({"form": form, "rows": rows, "context": context, "measured": measured, **asdict(predicted)})
    Console(width=120).print(table)
    print(json.dumps({"target": name, "configurations": found, "provenance": provenance("cpu")}))


def _held(target: str, dtype: str, quantization: str, num_rows: int, context: int) -> int:
    """Bytes that generating needs, above those of the process itself."""
    _run(_loaded("fable-draft", dtype, quantization), 1, 64)
    before = _resting()
    decoder = _loaded(target, dtype, quantization)
    _leave_file(decoder)
    _resting()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    _run(decoder, num_rows, context)
    return _status("VmHWM") - before


def _loaded(target: str, dtype: str, quantization: str) -> Decoder:
    return load(target, "ngram", device="cpu", dtype=dtype, quantization=quantization, num_draft_tokens=_K)


def _leave_file(decoder: Decoder) -> None:
    """Copy the weights that are pages of the checkpoint's file: with them goes the mapping of the whole file."""
    for parameter in decoder.target.model.parameters():
        if type(parameter) in (torch.nn.Parameter, NarrowWeight):
            parameter.data = parameter.data.clone()


def _resting() -> int:
    """Bytes in use when all that was freed has been given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _run(decoder: Decoder, num_rows: int, context: int) -> None:
    """Rows of the full context: prompts, and a few rounds at their end."""
    prompt = [(7 * i) % decoder.target.vocab_size for i in range(context - 16)]
    decoder.generate([prompt] * num_rows, max_new_tokens=16, ignore_eos=True, num_slots=num_rows)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
