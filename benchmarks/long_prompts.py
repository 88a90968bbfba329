"""Drafts beside long prompts: acceptance, and the cost of a draft that reads a window of the text.

    PYTHONPATH=src python benchmarks/long_prompts.py FILE ... [--model smollm2] [--lengths 1024 4096 8000] [-n 64]

Prompts are the beginnings of files, of text or of JSON lines, whose strings are joined. The target continues each at
temperature 0 and at 1, with plain decoding; look-ups are replayed on these outputs. The target itself, where it reads
the last tokens only (as a draft of a shorter context does: half to all of a window), is compared with itself token by
token. Forwards of all arms take turns. The last line of standard output is one JSON document.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from real_models import PUBLISHED, real_file

from outrider import load
from outrider.decoder import Decoder
from outrider.drafters.lookups import ngram_drafter, suffix_drafter
from outrider.drafters.model import window_start
from outrider.measure.log import Header, Record
from outrider.measure.replay import replay, summarise
from outrider.runtime.lm import LM
from outrider.text.tokenizer import encode

WINDOWS, KS, ROUNDS = (256, 512, 1024), (4, 8), 15
LOOKUPS = {"ngram": ngram_drafter, "suffix": suffix_drafter}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", choices=PUBLISHED, action="append")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8000])
    parser.add_argument("-n", type=int, default=64, help="tokens of an output")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = []
    for name in options.model or list(PUBLISHED):
        decoder = load(real_file(name), None)
        for length in options.lengths:
            for file in options.files:
                prompt = encode(decoder.tokenizer, _text(file))[:length]
                row = {"model": name, "text": file.stem, "length": len(prompt), **_measure(decoder, prompt, options.n)}
                print(json.dumps(row), file=sys.stderr, flush=True)
                found.append(row)
            found.append({"model": name, "length": length, "costs": _costs(decoder.target, length)})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps(found))


def _text(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        return text[:100_000]
    rows = [json.loads(line) for line in text.splitlines()[:400]]
    return "\n\n".join("\n".join(value for value in row.values() if isinstance(value, str)) for row in rows)[:100_000]


def _measure(decoder: Decoder, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": num_tokens, "ignore_eos": True}
        [done] = decoder.generate([prompt], seed=1, **options)
        record = Record(0, None, 1, "length", tuple(prompt), tuple(done.token_ids))
        header = Header.of(decoder, options, has_probs=False)
        for name, make in LOOKUPS.items():
            expected, _ = summarise(replay([record], header, make(), "rejection", KS), KS)
            found[f"{name}, T={temperature:g}"] = {
                k: [round(one.mean_acceptance_length, 3), round(one.draft_acceptance_rate, 3)]
                for k, (one,) in expected.items()
            }
        if temperature == 1.0:
            found["windows"] = _windows(decoder.target, [*prompt, *done.token_ids], len(prompt))
    return found


@torch.inference_mode()
def _windows(target: LM, ids: list[int], start: int) -> dict[int, list[float]]:
    """Alpha, and how often the most probable token is the target's, for each window shorter than the text."""
    text, length = torch.tensor([ids]), len(ids)
    cache = target.new_cache(1, length)
    target.prefill(text, torch.tensor([0]), torch.tensor([start]), cache, latest=0, num_columns=start)
    given = text[:, start - 1 :], torch.arange(start - 1, length)[None], cache, target.view_len(length, cache)
    probs = target.forward(*given)[0].softmax(-1)
    found = {}
    for window in (one for one in WINDOWS if one < start):
        own, begin, alphas, equals = target.new_cache(1, window + 1), -1, [], []
        for i, place in enumerate(range(start - 1, length)):
            first, inside = window_start(place + 1, window), text[:, window_start(place + 1, window) :]
            if first != begin:
                begin, num = first, place - first
                target.prefill(inside, torch.tensor([0]), torch.tensor([num]), own, latest=0, num_columns=num)
            step = text[:, place, None], torch.tensor([[place - first]]), own, target.view_len(window, own)
            q = target.forward(*step)[0, 0].softmax(-1)
            alphas.append(float(torch.minimum(probs[i], q).sum()))
            equals.append(float(probs[i].argmax() == q.argmax()))
        found[window] = [round(sum(one) / len(one), 3) for one in (alphas, equals)]
    return found


@torch.inference_mode()
def _costs(target: LM, length: int) -> dict[str, float]:
    """Times of forwards over that of a plain step at this length, c of windows and v of columns."""
    cache = target.new_cache(1, length + 8)
    arms = {"plain": (cache, length, 1)} | {f"v of {n} columns": (cache, length, n) for n in (3, 5)}
    for window in (one for one in WINDOWS if one <= length):
        arms[f"c of a window of {window}"] = target.new_cache(1, window), window - 1, 1
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, (one, place, num) in arms.items():
            begin_s = time.perf_counter()
            given = torch.zeros(1, num, dtype=torch.long), torch.arange(place, place + num)[None]
            target.forward(*given, one, target.view_len(place + num, one))
            times[name].append(time.perf_counter() - begin_s)
    ratios = {
        name: [one / whole for one, whole in zip(own, times["plain"], strict=True)] for name, own in times.items()
    }
    return {"ms": round(1e3 * min(times["plain"]), 2)} | {name: round(median(one), 3) for name, one in ratios.items()}


if __name__ == "__main__":
    main()
