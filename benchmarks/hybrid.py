"""`suffix` before a draft model: tokens per round and time, by how much the suffix must promise.

    python benchmarks/hybrid.py humaneval.jsonl gsm8k_test.jsonl spec_bench.jsonl > benchmarks/results/hybrid.txt

The embedded pair continues N prompts of each file, from the one with index `--first` on, at temperatures 0 and 1, K = 4
and 8. The corpus of each prompt is the other N - 1, with the target's output at the same temperature. The draft model
alone and `suffix` alone run beside the hybrid, whose rival accepts each token with probability a. The last line of
standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.api import load
from outrider.decoder import Decoder
from outrider.decoding.engine import decode
from outrider.drafters.base import Drafter
from outrider.drafters.corpus import Corpus
from outrider.drafters.hybrid import HybridDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.options import Sampling
from outrider.records import Request, Stats, Timing
from outrider.sampling.rules import BLOCK
from outrider.stats.counts import tau_interval
from outrider.system.provenance import provenance

_KS = (4, 8)
_RIVALS = (0.5, 0.7, 0.9)
_MOST_GIVEN = 300  # tokens of a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-n", "--num-prompts", type=int, default=16)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = load("fable", "fable-draft", device="cpu")
    console = Console(width=110)
    rows = []
    for path in arguments.files:
        lines = path.read_text().splitlines()[arguments.first :][: arguments.num_prompts]
        prompts = [tuple(decoder.encode(_prompt(json.loads(line)))[-_MOST_GIVEN:]) for line in lines]
        for temperature in (0.0, 1.0):
            found = list(_compared(decoder, prompts, temperature, arguments.max_new_tokens))
            rows += [{"file": path.stem, "temperature": temperature, **one} for one in found]
            console.print(_table(f"{path.stem}, temperature {temperature:g}, {len(prompts)} prompts", found))
    print(json.dumps({"results": rows, "provenance": provenance("cpu")}))


def _prompt(row: dict[str, Any]) -> str:
    if "turns" in row:
        return str(row["turns"][0])
    return str(row["prompt"]) if "prompt" in row else f"{row['question']}\n"


def _compared(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], temperature: float, max_new_tokens: int
) -> Iterator[dict[str, Any]]:
    options = {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    outputs = decoder.plain().generate(prompts, seed=list(range(1000, 1000 + len(prompts))), **options)
    written = [(*prompt, *output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    suffixes = [SuffixDrafter(Corpus([*written[:i], *written[i + 1 :]])) for i in range(len(written))]
    size = decoder.target.vocab_size
    arms: dict[str, Sequence[Drafter]] = {"fable-draft": [decoder.drafter] * len(prompts), "suffix": suffixes}
    for rival in _RIVALS:
        arms[f"hybrid, a = {rival}"] = [HybridDrafter(one, decoder.drafter, size, rival) for one in suffixes]
    for k in _KS:
        for name, drafters in arms.items():
            stats, times = [], Timing()
            for i, (prompt, drafter) in enumerate(zip(prompts, drafters, strict=True)):
                request = Request(prompt, Sampling(seed=i, **options))
                of_prompt = Stats()
                for round_ in decode(decoder.target, drafter, [request], BLOCK, num_draft_tokens=k):
                    of_prompt += round_.rows[0].stats
                    times += round_.timing
                stats.append(of_prompt)
            tau, num_tokens = tau_interval(stats), sum(one.num_generated_tokens for one in stats)
            assert tau is not None
            yield {"draft": name, "k": k, "tau": tau.to_json(), "tokens_per_s": num_tokens / times.decode_s}


def _table(title: str, found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, caption="tokens per round with 95% interval; tokens per second without prefill")
    table.add_column("draft")
    for k in _KS:
        table.add_column(f"K = {k}", justify="right")
    for name in dict.fromkeys(one["draft"] for one in found):
        cells = []
        for one in found:
            if one["draft"] == name:
                tau = one["tau"]
                cells.append(f"{tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]; {one['tokens_per_s']:.0f}")
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    main()
