"""Speed on published models beside llama.cpp: whole calls, and the steps that they are made of.

    python benchmarks/real_speed.py PROMPTS [--models smollm2 gemma3 FILE.gguf] [--threads 1 2] [--num-prompts 16]
        [--tokens 64] [--categories summarization] [--draft suffix] [--k auto] [--long 2000] [--beside 0]

PROMPTS is spec_bench.jsonl (its first turns, evenly spaced, perhaps of some categories alone; in SmolLM2's chat
template), or a text, from which prompts for Gemma, a base model, are taken. Arms run in turns, prompt by prompt:
Outrider without a draft, Outrider with a draft and adaptive K, and llama-cpp-python (built for the machine:
CMAKE_ARGS=-DGGML_NATIVE=ON); greedy, and at temperature 1 with top-k 50 and top-p 0.95. A call includes its prompt.
Speeds are tokens per second of whole calls; ratios are over llama.cpp's, with an interval over the prompts (95%).

Steps are forwards of 1 and 5 tokens after 128 others, in turns; ``--long`` adds the first forward of so many tokens.
``--beside`` starts so many other busy processes first.
The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llama_cpp import Llama
from real_models import PUBLISHED, real_file

import outrider
from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER
from outrider.measure.intervals import paired_ratio
from outrider.system.provenance import provenance
from outrider.text.tokenizer import encode

_CONTEXT, _PAST, _REPEATS, _FEW = 1024, 128, 20, 3
_PAUSE_S = 0.05  # in which the threads of the other program, which spin at first, go to sleep
_SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
_GREEDY = {"temperature": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--models", nargs="+", default=[*PUBLISHED])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--categories", nargs="*")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--k", default="auto")
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--beside", type=int, default=0)
    arguments = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.beside)]
    try:
        found = [
            _measure(model, threads, sampling, arguments)
            for model in arguments.models
            for threads in arguments.threads
            for sampling in (_GREEDY, _SAMPLED)
        ]
    finally:
        for process in busy:
            process.kill()
    print(json.dumps({"provenance": provenance("cpu"), "beside": arguments.beside, "measured": found}))


def _measure(model: str, threads: int, sampling: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(threads)
    path = real_file(model) if model in PUBLISHED else Path(model)
    decoder = outrider.load(path, arguments.draft)
    plain = replace(decoder, drafter=NO_DRAFTER)
    llama = Llama(
        str(path), n_ctx=max(_CONTEXT, arguments.long + 8), n_threads=threads, n_threads_batch=threads, verbose=False
    )
    prompts = _prompts(decoder.tokenizer, arguments, is_chat=model == "smollm2")
    k = arguments.k if arguments.k == "auto" else int(arguments.k)
    own = dict(max_new_tokens=arguments.tokens, seed=0, **sampling)
    arms: dict[str, Callable[[list[int]], int]] = {
        "plain": lambda ids: _num_generated(plain, ids, own),
        "draft": lambda ids: _num_generated(decoder, ids, own | {"num_draft_tokens": k}),
        "llama.cpp": lambda ids: _num_by_llama(llama, ids, arguments.tokens, sampling),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}  # per token
    for arm in arms.values():
        arm(prompts[0])
    for ids in prompts:
        for name, arm in arms.items():
            begin_s = _begin()
            number = arm(ids)
            seconds[name].append((time.perf_counter() - begin_s) / max(1, number))
    steps = _steps(plain, llama)
    if arguments.long and sampling is _GREEDY:
        steps |= _long(plain, llama, arguments.long)
    kind = "greedy" if sampling is _GREEDY else "sampled"
    row: dict[str, Any] = {"model": model, "threads": threads, "sampling": kind, "steps_ms": steps}
    for name, each in seconds.items():
        ratio = paired_ratio(seconds["llama.cpp"], each)
        row[name] = {"tokens_per_s": 1 / statistics.median(each), "over_llama": [ratio.value, ratio.low, ratio.high]}
    gain = paired_ratio(seconds["plain"], seconds["draft"])
    row["draft"]["over_plain"] = [gain.value, gain.low, gain.high]
    print(json.dumps(row), flush=True)
    return row


def _prompts(tokenizer: Any, arguments: argparse.Namespace, *, is_chat: bool) -> list[list[int]]:
    text = arguments.prompts.read_text(encoding="utf-8")
    if arguments.prompts.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines()]
        categories = arguments.categories
        turns = [row["turns"][0] for row in rows if not categories or row["category"] in categories]
        chosen = turns[:: max(1, len(turns) // arguments.num_prompts)][: arguments.num_prompts]
    else:
        size = len(text) // arguments.num_prompts
        chosen = [text[i * size :][:600] for i in range(arguments.num_prompts)]
    if is_chat:
        chosen = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True
            )
            for one in chosen
        ]
    return [encode(tokenizer, one)[: _CONTEXT - arguments.tokens - 1] for one in chosen]


def _num_generated(decoder: Decoder, ids: Sequence[int], options: dict[str, Any]) -> int:
    result: Any = decoder.generate([list(ids)], **options)
    return len((result[0] if isinstance(result, list) else result).token_ids)


def _num_by_llama(llama: Llama, ids: list[int], num_tokens: int, sampling: dict[str, Any]) -> int:
    llama.reset()
    others = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    number = 0
    for token in llama.generate(
        ids, temp=sampling["temperature"], **(others | {k: v for k, v in sampling.items() if k != "temperature"})
    ):
        number += 1
        if number == num_tokens or token == llama.token_eos():
            break
    return number


def _steps(decoder: Decoder, llama: Llama) -> dict[str, float]:
    """Milliseconds of forwards of 1 and 5 tokens, the medians of some in turns."""
    lm = decoder.target
    ids, places = torch.arange(100, 100 + _PAST + 5)[None], torch.arange(_PAST + 5)[None]
    cache = lm.new_cache(1, _CONTEXT)
    with torch.inference_mode():
        lm.forward(ids[:, :_PAST], places[:, :_PAST], cache, 256, num_logits=1)
    llama.reset()
    llama.eval(ids[0, :_PAST].tolist())
    found: dict[str, list[float]] = {}
    for _ in range(_REPEATS):
        for number in (1, 5):
            tokens = slice(_PAST, _PAST + number)
            begin_s = _begin()
            with torch.inference_mode():
                lm.forward(ids[:, tokens], places[:, tokens], cache, 256)
            found.setdefault(f"own {number}", []).append(time.perf_counter() - begin_s)
            llama.n_tokens = _PAST
            llama._ctx.kv_cache_seq_rm(-1, _PAST, -1)
            begin_s = _begin()
            llama.eval(ids[0, tokens].tolist())
            found.setdefault(f"llama.cpp {number}", []).append(time.perf_counter() - begin_s)
    return {name: 1000 * statistics.median(times) for name, times in found.items()}


def _begin() -> float:
    time.sleep(_PAUSE_S)
    return time.perf_counter()


def _long(decoder: Decoder, llama: Llama, number: int) -> dict[str, float]:
    """Milliseconds of the first forward of many tokens, the medians of a few in turns."""
    lm, found = decoder.target, dict[str, list[float]]()
    ids = torch.randint(100, lm.vocab_size, (1, number), generator=torch.Generator().manual_seed(0))
    starts, ends = torch.zeros(1, dtype=torch.long), torch.full((1,), number)
    for _ in range(_FEW):
        cache = lm.new_cache(1, number + 1)
        begin_s = _begin()
        lm.prefill(ids, starts, ends, cache, latest=0, num_columns=number)
        found.setdefault(f"own {number}", []).append(time.perf_counter() - begin_s)
        llama.reset()
        begin_s = _begin()
        llama.eval(ids[0].tolist())
        found.setdefault(f"llama.cpp {number}", []).append(time.perf_counter() - begin_s)
    return {name: 1000 * statistics.median(times) for name, times in found.items()}


if __name__ == "__main__":
    main()
