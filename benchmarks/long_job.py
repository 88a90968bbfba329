"""A long job that is killed: ``generate --prompts`` on 20,000 prompts, ended by SIGKILL three times and started again.

    python benchmarks/long_job.py [--prompts 20000] [--kills 3] [--shards 4] [--batch-size 32] [--threads 1]

The embedded pair continues each prompt by 1 to 4 tokens, at temperature 1, in float64, where the text of a row does not
depend on the rows beside it to the last bit. Runs of the command:

- uninterrupted, on all prompts and on a tenth of them: the peak memory of each process (resident set, by wait4);
- killed at random moments (some milliseconds after a random byte of the output), as often as asked for, then left to
  end;
- in shards, each a process of its own; concatenated.

Every index must be there once, and every row must be that of the uninterrupted run; otherwise the exit code is 1. The
last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from outrider.measure.tables import new_table
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_MOST_TOKENS = 4


@dataclass(frozen=True)
class Run:
    """One process of the command."""

    name: str
    seconds: float
    peak_mb: float
    num_rows: int  # in its output when it had ended
    has_half_a_row: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(0)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "outrider",
            "generate",
            "--seed",
            "0",
            "--dtype",
            "float64",
            "--execution",
            "eager",
        ]
        command += ["--batch-size", str(arguments.batch_size), "--threads", str(arguments.threads), "--prompts"]
        few = _write_prompts(folder / "few.jsonl", arguments.prompts // 10)
        many = _write_prompts(folder / "many.jsonl", arguments.prompts)

        runs.append(_run(f"{arguments.prompts // 10} prompts", [*command, str(few)], folder / "few.out"))
        runs.append(_run(f"{arguments.prompts} prompts", [*command, str(many)], folder / "whole.out"))
        whole = _rows(folder / "whole.out")

        killed, num_bytes = folder / "killed.out", (folder / "whole.out").stat().st_size
        for number, share in enumerate(sorted(rng.random() for _ in range(arguments.kills)), start=1):
            runs.append(_run(f"killed {number}", [*command, str(many)], killed, int(share * num_bytes)))
        runs.append(_run("left to end", [*command, str(many)], killed))

        shards = [folder / f"shard{number}.out" for number in range(1, arguments.shards + 1)]
        for number, output in enumerate(shards, start=1):
            shard = f"{number}/{arguments.shards}"
            runs.append(_run(f"shard {shard}", [*command, str(many), "--shard", shard], output))
        found = {"killed": _rows(killed), "shards": [row for output in shards for row in _rows(output)]}

    table = new_table(f"{arguments.prompts} prompts, fable, float64", "run", "seconds", "peak MB", "rows", "half a row")
    for run in runs:
        half = "yes" if run.has_half_a_row else ""
        table.add_row(run.name, f"{run.seconds:.0f}", f"{run.peak_mb:.0f}", str(run.num_rows), half)
    Console(width=100).print(table)
    checks = {"whole": _check(whole, whole, arguments.prompts)}
    checks |= {name: _check(rows, whole, arguments.prompts) for name, rows in found.items()}
    for name, check in checks.items():
        print(f"{name}: {check}")
    print(json.dumps({"runs": [vars(run) for run in runs], "checks": checks, "provenance": provenance("cpu")}))
    if any(check["missing"] or check["twice"] or check["differing"] for check in checks.values()):
        sys.exit(1)


def _write_prompts(path: Path, num_prompts: int) -> Path:
    """Of 4 to 30 words, each with a number of new tokens of its own."""
    rng = random.Random(1)
    words = " ".join(PROMPTS).split()
    with path.open("w") as stream:
        for _ in range(num_prompts):
            start, length = rng.randrange(len(words) - 30), rng.randint(4, 30)
            row = {"prompt": " ".join(words[start : start + length]), "max_new_tokens": rng.randint(1, _MOST_TOKENS)}
            stream.write(json.dumps(row) + "\n")
    return path


def _run(name: str, command: list[str], output: Path, kill_at_byte: int | None = None) -> Run:
    begin = time.perf_counter()
    process = subprocess.Popen([*command, "--output", str(output)], stderr=subprocess.DEVNULL)
    if kill_at_byte is not None:
        while not output.exists() or output.stat().st_size <= kill_at_byte:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == (0 if kill_at_byte is None else -signal.SIGKILL), process.returncode
    data = output.read_bytes() if output.exists() else b""
    seconds = time.perf_counter() - begin
    num_rows, has_half = data.count(b"\n"), bool(data) and not data.endswith(b"\n")
    print(f"{name}: {seconds:.1f} s, {num_rows} rows", file=sys.stderr)
    return Run(name, seconds, usage.ru_maxrss / 1024, num_rows, has_half)


def _rows(path: Path) -> list[dict[str, object]]:
    """Without the counts of rounds and other things beside the text, which take much memory."""
    keys = ("index", "prompt", "token_ids", "text", "seed", "finish_reason")
    with path.open() as stream:
        return [{key: row[key] for key in keys} for row in map(json.loads, stream)]


def _check(rows: list[dict[str, object]], expected: list[dict[str, object]], num_prompts: int) -> dict[str, int]:
    by_index = {row["index"]: row for row in rows}
    theirs = {row["index"]: row for row in expected}
    return {
        "rows": len(rows),
        "missing": num_prompts - len(by_index),
        "twice": len(rows) - len(by_index),
        "differing": sum(theirs.get(index) != row for index, row in by_index.items()),
    }


if __name__ == "__main__":
    main()
