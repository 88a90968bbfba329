"""The host's share: microseconds of a round outside the models' steps, and where they go.

    python benchmarks/host_share.py [--against OTHER/src] [-k 4] [--texts 12] [--threads 2]

One row, temperature 1, the embedded pair in float32: plain decoding and K drafted tokens. A round
lasts from one chunk of a stream to the next (the first one of each text, which has the prompt, is left out). Its steps
are what the execution runs. All else is the host's: the loop, text, chunks. Rounds may run several at a time, before
their chunks are made: so numbers are means over the rounds of a text, and medians over texts.

``--against`` also runs another version of the source: each version has a process of its own, and all arms of both take
turns, text by text, with the same prompts and seeds; "ratio" is that of their tokens per second, with its 95% interval,
and "same" whether all tokens are equal.

Then the parts: texts during which some functions of this version note when they begin and end. A part is without the
parts that it calls; "other" is what is in none. The notes cost about a microsecond each, so that the sum is more than
the host's share above. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any

ARMS = ("plain", "drafts")
PARTS = {
    "requests.shared_engine:SharedEngine.step": "stepping the engine",
    "requests.state:RequestState.chunk": "chunk",
    "text.row_text:RowText.push": "text, ends",
    "decoding.engine:Engine.step": "step: all else",
    "decoding.engine:Engine._start_round": "round: all else",
    "decoding.engine:read": "read the report",
    "decoding.engine:report_of": "make the report",
    "decoding.batch:Batch.view": "view of the batch",
    "decoding.batch:Batch.commit": "commit",
    "sampling.noise:NoiseAhead.at": "noise",
    "drafters.model:ModelSession.propose": "draft: all else",
}
STEPS = "steps"


class Parts:
    """Nanoseconds by part, each without the parts that it calls."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)
        self._inner = [0]  # nanoseconds of the parts within each that is running

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter_ns()
            self._inner.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                inner, spent = self._inner.pop(), perf_counter_ns() - begin
                self._inner[-1] += spent
                self.spent[name] += spent - inner

        return wrapper


def work(num_threads: int, k: int) -> None:
    """Serve the driver: a line of JSON asks for a text, another one answers with its tokens and rounds."""
    import torch

    from outrider.api import load
    from outrider.runtime.execution import EagerExecution
    from outrider.system.provenance import provenance
    from outrider.text.example_prompts import PROMPTS

    torch.set_num_threads(num_threads)
    parts = Parts()
    EagerExecution.run = parts.timed(STEPS, EagerExecution.run)  # type: ignore[method-assign]
    pair = load("fable", "fable-draft", device="cpu", dtype="float32", acceptance="rejection", num_draft_tokens=k)
    decoders = {"drafts": pair, "plain": pair.plain()}
    print(json.dumps(provenance("cpu")), flush=True)
    has_notes = False
    for line in sys.stdin:
        order = json.loads(line)
        if order["notes"] and not has_notes:
            has_notes = True
            for place, name in PARTS.items():
                module_name, _, path = place.partition(":")
                owner: Any = importlib.import_module(f"outrider.{module_name}")
                *owners, attribute = path.split(".")
                for one in owners:
                    owner = getattr(owner, one)
                setattr(owner, attribute, parts.timed(name, getattr(owner, attribute)))
        decoder, prompt = decoders[order["arm"]], PROMPTS[order["text"] % len(PROMPTS)]
        options = {"max_new_tokens": order["num_tokens"], "temperature": 1.0, "ignore_eos": True}
        rounds: list[dict[str, int]] = []
        token_ids: list[int] = []
        begin = last = perf_counter_ns()
        for chunk in decoder.stream(prompt, seed=order["text"], **options):
            now = perf_counter_ns()
            rounds.append({"whole": now - last, **parts.spent})
            token_ids += chunk.token_ids
            parts.spent.clear()
            last = perf_counter_ns()
        print(json.dumps({"token_ids": token_ids, "ns": last - begin, "rounds": rounds[1:]}), flush=True)


@dataclass(slots=True)
class Version:
    """A version of the source in a process."""

    name: str
    process: subprocess.Popen[str]
    provenance: Any

    @classmethod
    def start(cls, name: str, source: Path, options: Sequence[str]) -> Version:
        command = [sys.executable, __file__, "--work", *options]
        env = {**os.environ, "PYTHONPATH": str(source.resolve())}
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return cls(name, process, json.loads(process.stdout.readline()))

    def generate(self, arm: str, text: int, num_tokens: int, *, notes: bool = False) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        order = {"arm": arm, "text": text, "num_tokens": num_tokens, "notes": notes}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def _us(texts: Sequence[Sequence[float]]) -> float:
    """Microseconds of a round: the median over texts of the means over their rounds."""
    return round(median(map(fmean, texts)) / 1e3, 1)


def _host_us(texts: Sequence[Sequence[dict[str, int]]]) -> float:
    return _us([[one["whole"] - one.get(STEPS, 0) for one in text] for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the src folder of another version")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arms, num_tokens = arguments.arms.split(","), arguments.max_new_tokens
    if arguments.work:
        work(arguments.threads, arguments.k)
        return
    options = ["--threads", str(arguments.threads), "-k", str(arguments.k), "--arms", arguments.arms]
    versions = [Version.start("this", Path(__file__).parents[1] / "src", options)]
    if arguments.against is not None:
        versions.append(Version.start("other", arguments.against, options))
    lines = [(version, arm) for arm in arms for version in versions]
    for version, arm in lines:
        version.generate(arm, 0, num_tokens)  # what happens once
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for text in range(arguments.texts):
        for version, arm in (lines, lines[::-1])[text % 2]:
            found[version.name, arm].append(version.generate(arm, text, num_tokens))

    from rich.console import Console

    from outrider.bench.report import interval_text
    from outrider.bench.tables import new_table
    from outrider.stats.intervals import paired_ratio

    console, results = Console(width=100), []
    title = f"fable with fable-draft, float32, one row, K = {arguments.k}, {arguments.threads} thread(s)"
    columns = "arm", "version", "round us", "steps us", "host us", "tokens/s", "ratio", "same"
    table = new_table(title, *columns)
    for version, arm in lines:
        texts = found[version.name, arm]
        rounds = [text["rounds"] for text in texts]
        rates = [1e9 * len(text["token_ids"]) / text["ns"] for text in texts]
        result = {
            "arm": arm,
            "version": version.name,
            "round_us": _us([[one["whole"] for one in text] for text in rounds]),
            "steps_us": _us([[one.get(STEPS, 0) for one in text] for text in rounds]),
            "host_us": _host_us(rounds),
            "tokens_per_s": round(median(rates), 1),
        }
        results.append(result)
        shown = ["" if value is None else str(value) for value in result.values()]
        if version.name == "this" and len(versions) > 1:
            others = found["other", arm]
            ratio = paired_ratio(rates, [1e9 * len(text["token_ids"]) / text["ns"] for text in others])
            is_same = all(a["token_ids"] == b["token_ids"] for a, b in zip(texts, others, strict=True))
            result |= {"ratio": [ratio.value, ratio.low, ratio.high], "is_same": is_same}
            shown += [interval_text(ratio), "yes" if is_same else "NO"]
        table.add_row(*shown, *[""] * (8 - len(shown)))
    console.print(table)
    parts: dict[str, dict[str, float]] = {}
    for arm in arms:
        texts = [versions[0].generate(arm, text, num_tokens, notes=True) for text in range(arguments.texts)]
        rounds = [text["rounds"] for text in texts]
        spent = {name: _us([[one.get(name, 0) for one in text] for text in rounds]) for name in PARTS.values()}
        spent["other"] = _us([[2 * one["whole"] - sum(one.values()) for one in text] for text in rounds])
        parts[arm] = spent
    table = new_table("parts of the host's share, us", "part", *arms)
    for name in [*dict.fromkeys(PARTS.values()), "other"]:
        table.add_row(name, *[f"{parts[arm][name]:.1f}" for arm in arms])
    console.print(table)
    made_by = {version.name: version.provenance for version in versions}
    print(json.dumps({"results": results, "parts_us": parts, "provenance": made_by}))


if __name__ == "__main__":
    main()
