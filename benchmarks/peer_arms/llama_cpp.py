"""llama.cpp: its own server.

Files in GGUF are given, or made here, in F32, BF16 (the draft, too) or Q8_0, which has a scale for each 32 numbers.
"f32" and "f16" are the type of its cache, of which the second is its default.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from outrider.export.gguf import write_gguf
from outrider.models.registry import ModelSpec
from peer_arms.base import TEMPERATURES, Arm, Output, Run, Runs, draft_weights


@contextmanager
def llama_cpp_arms(
    target: Path,
    draft: Path,
    ks: Sequence[int],
    server: Path,
    num_threads: int,
    context_len: int,
    folder: Path,
    weights: str = "float32",
) -> Iterator[Runs]:
    """A server for each arm, since it takes K when it starts, and only then."""
    files = (target, draft) if weights == "gguf" else (folder / "target.gguf", folder / "draft.gguf")
    for path, file, dtype in zip((target, draft), files, (weights, draft_weights(weights)), strict=True):
        if path != file:
            write_gguf(ModelSpec(name=path.name, path=path), file, getattr(torch, dtype))
    processes: list[subprocess.Popen[bytes]] = []
    can_sample = can_sample_drafts(server)

    def arm(name: str, cache_type: str, k: int | None = None, drafting: str = "greedy") -> tuple[Arm, Run]:
        threads = str(num_threads)
        command = [str(server), "-m", str(files[0]), "-t", threads, "-tb", threads, "-c", str(context_len), "-np", "1"]
        command += ["-ctk", cache_type, "-ctv", cache_type, "--cache-ram", "0"]
        # On the CPU its flash attention is the slower one with a float32 cache, and the faster one with float16.
        command += ["-fa", "off" if cache_type == "f32" else "auto"]
        if k is not None:
            command += ["-md", str(files[1]), "--spec-type", "draft-simple", "--spec-draft-n-max", str(k)]
            command += ["-td", threads, "-tbd", threads]
            if can_sample:
                command += ["--spec-draft-sampling", drafting]
            command += ["-ctkd", cache_type, "-ctvd", cache_type]

        @cache
        def address() -> str:
            process, address = _start_server(command)
            processes.append(process)
            return address

        def run(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
            options = {"temperature": temperature, "samplers": ["temperature"], "seed": seed, "ignore_eos": True}
            body = {"prompt": list(ids), "n_predict": num_tokens, "cache_prompt": False, "return_tokens": True}
            answer = _answer(f"{address()}/completion", json.dumps(body | options).encode())
            return Output(answer["tokens"], len(answer["tokens"]) - answer["timings"].get("draft_n_accepted", 0))

        # Greedy drafts are the same either way.
        temperatures = (1.0,) if drafting == "probabilistic" else TEMPERATURES
        return Arm(f"llama.cpp {cache_type}, {name}", "llama.cpp", k, temperatures=temperatures), run

    arms = [arm("plain", "f16")] if weights == "gguf" else [arm("plain", "f32"), arm("plain", "f16")]
    arms += [arm("argmax draft", "f16", k) for k in ks]
    arms += [arm("sampled draft", "f16", k, "probabilistic") for k in ks if can_sample]
    try:
        yield arms
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def can_sample_drafts(server: Path) -> bool:
    """Whether the draft may sample; builds before 11549 draft the most probable token only."""
    said = subprocess.run([server, "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    return "--spec-draft-sampling" in said.stdout


def _start_server(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], str]:
    """A server that answers, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    while True:
        try:
            _answer(f"{address}/health")
            return process, address
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None:
                raise RuntimeError(f"this ended at once: {' '.join(command)}") from None
            time.sleep(0.1)


def _answer(address: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def llama_cpp_build(server: Path) -> str:
    """Version, compiler, and what of the processor the build uses, in the program's own words."""
    said = "".join(
        subprocess.run(
            [str(server), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        ).stdout
        for arguments in (["--version"], ["-m", "no-such-model", "-lv", "9"])
    )
    lines = [line.strip() for line in said.splitlines()]
    found = [line for line in lines if line.startswith(("version: ", "built with "))]
    features = re.search(r"system_info: .*?\| (.*\S)", said)
    flags = re.findall(r"(\w+) = 1", features[1]) if features else ["unknown"]
    return f"{', '.join(dict.fromkeys(found))}; {' '.join(flags)}"
