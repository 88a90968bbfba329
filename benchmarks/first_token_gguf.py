"""How long a GGUF file takes from the start of the process to the first token, and how much memory, beside llama.cpp.

    python benchmarks/first_token_gguf.py FILE.gguf [--llama-server PATH] [--against SRC] [--repeats 5] [--threads 2]

Each measurement is a process of its own, in turns, with the file in the system's cache: `outrider generate` with
activations in float32 (:a32) and in 8 bits, as by default, until the first text is on its standard output; ``import
torch`` until the import is done; llama-server until the first token of a request that is sent when it is ready, with
and without its warm-up. ``--against`` adds another version of Outrider, by its folder of sources. Memory is that of
the process without the pages of files, at its peak (looked at every few milliseconds) and at the first token, and the
peak with them (VmHWM). Linux only. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.measure.intervals import paired_ratio
from outrider.system.provenance import provenance

_PROMPT, _PORT = "Once upon a time", 18197
_LOOK_S = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    arms: dict[str, Callable[[], dict[str, float]]] = {"import torch": _import}
    for name, form in (("float32", ":a32"), ("a8", "")):
        ours = partial(_outrider, f"{arguments.file}{form}", arguments.threads)
        arms[name] = ours
        if arguments.against is not None:
            arms[f"{name}, before"] = partial(ours, arguments.against)
    if arguments.llama_server is not None:
        server = partial(_llama_cpp, arguments.llama_server, arguments.file, arguments.threads)
        arms |= {"llama.cpp": server, "llama.cpp, no warm-up": partial(server, "--no-warmup")}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for run in arms.values():  # once before, for caches of all kinds
        run()
    for turn in range(arguments.repeats):
        for name in arms if turn % 2 == 0 else reversed(arms):
            found[name].append(arms[name]())
    for name, runs in found.items():
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        others = [
            other
            for other in (f"{name}, before", "import torch", "llama.cpp", "llama.cpp, no warm-up")
            if other in found and other != name and name != "import torch"
        ]
        print(
            f"{name}: {median['first_s']:.2f} s ({min(run['first_s'] for run in runs):.2f} at least), without pages of "
            f"files {median['peak_mib']:.0f} MiB at the peak and {median['resident_mib']:.0f} at the first token, with "
            f"them {median['peak_with_files_mib']:.0f}"
        )
        for other in others:
            ratio = paired_ratio(*([run["first_s"] for run in found[one]] for one in (name, other)))
            print(f"    {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] of the time of {other}", flush=True)
    size_mib = arguments.file.stat().st_size / 2**20
    body = {"file": arguments.file.name, "file_mib": size_mib, "runs": found, "provenance": provenance("cpu")}
    body["provenance"]["argv"] = []  # paths of this machine
    print(json.dumps(body))


def _import() -> dict[str, float]:
    command = [sys.executable, "-c", "import torch; print(1, flush=True); import time; time.sleep(60)"]
    return _measured(command, dict(os.environ), _first_byte)


def _first_byte(process: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError: the process says nothing."""
    assert process.stdout is not None
    if not os.read(process.stdout.fileno(), 1):
        raise RuntimeError("the process has said nothing")


def _outrider(target: str, num_threads: int, sources: Path | None = None) -> dict[str, float]:
    options = ["--target", target, "--draft", "none", "--threads", str(num_threads), "-n", "8", "-t", "0"]
    environment = os.environ | ({} if sources is None else {"PYTHONPATH": str(sources)})
    command = [sys.executable, "-m", "outrider", "generate", _PROMPT, *options]
    return _measured(command, environment, _first_byte)


def _llama_cpp(server: Path, file: Path, num_threads: int, *options: str) -> dict[str, float]:
    body = json.dumps({"prompt": _PROMPT, "n_predict": 8, "temperature": 0, "stream": True}).encode()
    address = f"http://127.0.0.1:{_PORT}"

    def first(process: subprocess.Popen[bytes]) -> None:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=60).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError(f"{server} has ended") from None
                time.sleep(_LOOK_S)
        with urllib.request.urlopen(urllib.request.Request(f"{address}/completion", body), timeout=60) as answer:
            answer.readline()

    command = [str(server), "-m", str(file), "--port", str(_PORT), "-t", str(num_threads), "-c", "4096", "-np", "1"]
    return _measured([*command, *options], dict(os.environ), first)


def _measured(
    command: list[str], environment: dict[str, str], first: Callable[[subprocess.Popen[bytes]], None]
) -> dict[str, float]:
    """Seconds and MiB until ``first`` returns. The process is ended then."""
    peak, is_over = 0.0, threading.Event()
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)

        def look() -> None:
            nonlocal peak
            while not is_over.wait(_LOOK_S):
                peak = max(peak, _memory(process.pid).get("RssAnon", 0.0))

        looking = threading.Thread(target=look)
        looking.start()
        try:
            first(process)
            first_s, memory = time.perf_counter() - begin, _memory(process.pid)
        except RuntimeError:
            errors.seek(0)
            print(errors.read().decode(errors="replace")[-2000:], file=sys.stderr)
            raise
        finally:
            is_over.set()
            looking.join()
            process.kill()
            process.communicate()
    resident = memory["RssAnon"]
    return {
        "first_s": first_s,
        "peak_mib": max(peak, resident),
        "resident_mib": resident,
        "peak_with_files_mib": memory["VmHWM"],
    }


def _memory(pid: int) -> dict[str, float]:
    """Sizes in MiB, as the system names them; none at the very end of a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) / 1024 for name, size, _ in pairs}


if __name__ == "__main__":
    main()
