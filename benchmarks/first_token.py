"""How long the first token takes where nothing has been compiled before, and how fast a text is until it has.

    python benchmarks/first_token.py [--target fable --draft fable-draft] [--repeats 5]

Each measurement is a process of its own with an empty cache folder, eager and compiled in turn: seconds from the
request to its first token, and from the start of the process. Then one process generates text after text until all
programs are there: tokens per second before, and after. K = 4, no seed, temperature 1. The last line of standard output
is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from outrider.api import load
from outrider.compile.service import CompileService
from outrider.decoder import Decoder
from outrider.stats.intervals import paired_ratio
from outrider.system.provenance import provenance

_PROMPT, _K, _NUM_TOKENS = "Once upon a time", 4, 128
_ARMS = ("eager", "compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable")
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arm", choices=[*_ARMS, "switch"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.arm is not None:
        decoder = load(arguments.target, arguments.draft, device="cpu", dtype="float32", num_draft_tokens=_K)
        print(json.dumps(_switch(decoder) if arguments.arm == "switch" else _first(decoder, arguments.arm)))
        return
    firsts: dict[str, list[dict[str, float]]] = {arm: [] for arm in _ARMS}
    for turn in range(arguments.repeats):
        for arm in _ARMS if turn % 2 == 0 else reversed(_ARMS):
            firsts[arm].append(_in_process(arm))
    for key in ("request_s", "process_s"):
        eager, compiled = ([one[key] for one in firsts[arm]] for arm in _ARMS)
        ratio = paired_ratio(compiled, eager)
        print(
            f"{key}: eager {statistics.median(eager):.3f}, compiled {statistics.median(compiled):.3f}, "
            f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times as long",
            flush=True,
        )
    rates = _in_process("switch")
    print(", ".join(f"{key} {value:.1f}" for key, value in rates.items()))
    body = {"target": arguments.target, "firsts": firsts, "rates": rates, "provenance": provenance("cpu")}
    print(json.dumps(body))


def _in_process(arm: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--arm", arm], env=environment, capture_output=True, check=True
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        if "at_s" in found:
            found["process_s"] = found.pop("at_s") - begin
        return found


def _first(decoder: Decoder, arm: str) -> dict[str, float]:
    if arm == "compiled":
        decoder = decoder.compiled(waits=False)
    begin = time.perf_counter()
    next(decoder.stream(_PROMPT, max_new_tokens=_NUM_TOKENS))
    return {"request_s": time.perf_counter() - begin, "at_s": time.time()}


def _switch(decoder: Decoder) -> dict[str, float]:
    """Tokens per second: eager, while programs are compiled, and when they are there."""
    service = CompileService()
    mixed = decoder.compiled(waits=False, service=service)
    _rate(decoder)
    eager = [_rate(decoder) for _ in range(5)]
    begin, before = time.perf_counter(), []
    while not (before and service.num_open == 0):
        before.append(_rate(mixed))
    compiling_s = time.perf_counter() - begin
    _rate(mixed)
    after = [_rate(mixed) for _ in range(5)]
    names = {"eager": eager, "while_compiling": before, "after": after}
    return {
        **{f"{name}_tokens_per_s": statistics.median(rates) for name, rates in names.items()},
        "num_programs": service.num_orders,
        "compiling_s": compiling_s,
    }


def _rate(decoder: Decoder) -> float:
    begin = time.perf_counter()
    (text,) = decoder.generate(_PROMPT, max_new_tokens=_NUM_TOKENS, ignore_eos=True)
    return len(text.token_ids) / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
