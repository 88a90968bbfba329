"""Tokens per round of look-up drafts, and their time where nothing matches.

    python benchmarks/suffix.py humaneval.jsonl gsm8k_test.jsonl spec_bench.jsonl > benchmarks/results/suffix.txt

Each file has rows with "prompt", "question" or "turns" (the first is taken). The embedded target continues the first N
prompts of each file at temperatures 0 and 1. `ngram`, `suffix` with the sequence alone, and `suffix` with a corpus of
the other N - 1 prompts and outputs are then replayed over the output. Where rows have a "canonical_solution" or an
"answer", so they are over these (as a target that writes them greedily). Then, or if no file is given, rounds of the
loop are timed in which nothing matches. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.decoding.engine import decode
from outrider.drafters.base import Drafter, NoDrafter
from outrider.drafters.corpus import Corpus
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.models.placement import Placement
from outrider.options import Sampling
from outrider.records import Request, Timing
from outrider.replay.log_format import Header, Record
from outrider.replay.record import header_of, record_batch
from outrider.replay.replay import ExpectedRounds, replay, summarise
from outrider.sampling.rules import REJECTION
from outrider.system.provenance import provenance

_KS = (4, 8, 16)
_MIN_PROBS = (0.03, 0.1, 0.3)
_MOST_GIVEN = 300  # tokens of a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("-n", "--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = load("fable", device="cpu")
    console = Console(width=110)
    rows = []
    for path in arguments.files:
        for kind, header, records in _outputs(decoder, path, arguments.num_prompts, arguments.max_new_tokens):
            found = list(_compared(header, records))
            rows += [{"file": path.stem, "texts": kind, **one} for one in found]
            console.print(_table(f"{path.stem}, {kind}, {len(records)} prompts", found))
    times = _times(decoder)
    table = Table(
        title=f"Rounds without a match beside those of the embedded pair, K = 4, {arguments.threads} thread(s)"
    )
    for title in ("draft", "round, ms", "of it drafts, us", "of the pair's round"):
        table.add_column(title, justify="right")
    for one in times:
        share = f"{100 * one['draft_s'] / times[0]['round_s']:.2f}%"
        table.add_row(one["draft"], f"{1e3 * one['round_s']:.2f}", f"{1e6 * one['draft_s']:.0f}", share)
    console.print(table)
    print(json.dumps({"results": {"tokens": rows, "times": times}, "provenance": provenance("cpu")}))


def _outputs(decoder: Decoder, path: Path, num: int, max_new_tokens: int) -> Iterator[tuple[str, Header, list[Record]]]:
    """The target's output at both temperatures, and the file's own answers."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:num]]
    prompts = [_prompt(row) for row in rows]
    given = [decoder.encode(prompt)[-_MOST_GIVEN:] for prompt in prompts]
    labels = [(index, prompt, None, index) for index, prompt in enumerate(prompts)]
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        records, _ = record_batch(decoder, given, labels, options, num_probs=None)
        yield f"output at temperature {temperature:g}", header_of(decoder, options, None), records
    answers = [row.get("canonical_solution") or row.get("answer") for row in rows]
    if all(answers):
        encoded = [tuple(decoder.encode(answer)) for answer in answers]
        led = [
            Record(index, prompt, None, 0, "length", tuple(ids), answer)
            for (index, prompt, *_), ids, answer in zip(labels, given, encoded, strict=True)
        ]
        longest = max(map(len, encoded))
        yield "answers of the file", header_of(decoder, {"temperature": 0.0, "max_new_tokens": longest}, None), led


def _prompt(row: dict[str, Any]) -> str:
    if "turns" in row:
        return str(row["turns"][0])
    return str(row["prompt"]) if "prompt" in row else f"{row['question']}\n"


def _compared(header: Header, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    others = [
        Corpus([(*one.prompt_ids, *one.token_ids) for one in records if one.index != record.index])
        for record in records
    ]
    arms: dict[str, list[Drafter]] = {"ngram": [NgramDrafter()] * len(records)}
    for min_prob in _MIN_PROBS:
        arms[f"suffix, {min_prob}"] = [SuffixDrafter(None, min_prob)] * len(records)
        arms[f"suffix, corpus, {min_prob}"] = [SuffixDrafter(corpus, min_prob) for corpus in others]
    for name, drafters in arms.items():
        parts = (
            replay([record], header, drafter, "block", _KS) for record, drafter in zip(records, drafters, strict=True)
        )
        expected = summarise(chain.from_iterable(parts), _KS).expected
        yield {"draft": name, "by_k": {k: _numbers(expected[k]) for k in _KS}}


def _numbers(one: ExpectedRounds) -> dict[str, Any]:
    assert one.tau is not None
    drafted = one.stats.num_draft_tokens / one.stats.num_rounds
    return {"tau": one.tau.to_json(), "drafted": drafted}


def _table(title: str, found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, caption="tokens per round with 95% interval; drafted tokens per round")
    table.add_column("draft, least probability")
    for k in _KS:
        table.add_column(f"K = {k}", justify="right")
    for one in found:
        cells = []
        for numbers in one["by_k"].values():
            tau = numbers["tau"]
            cells.append(f"{tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]; {numbers['drafted']:.1f}")
        table.add_row(one["draft"], *cells)
    return table


def _times(decoder: Decoder) -> list[dict[str, Any]]:
    """Median times of rounds in which nothing is drafted, and of the pair's, which are not. The tokens of the prompt
    are all different; the corpus is random, so that each of them is found there, and nothing longer."""
    size = decoder.target.vocab_size
    rng = random.Random(0)
    noise = Corpus([[rng.randrange(size) for _ in range(300_000)]])
    drafters: dict[str, Drafter] = {
        "fable-draft": load_drafter(decoder, "fable-draft", placement=Placement("cpu")),
        "none": NoDrafter(),
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
        "suffix, corpus": SuffixDrafter(noise),
    }
    times: dict[str, list[Timing]] = {name: [] for name in drafters}
    for seed in range(12):
        ids = tuple(rng.sample(range(size), 300))
        # No token of the prompt comes again.
        sampling = Sampling(seed=seed, max_new_tokens=40, ignore_eos=True, logit_bias=dict.fromkeys(ids, -30.0))
        for name, drafter in drafters.items():
            for round_ in decode(decoder.target, drafter, [Request(ids, sampling)], REJECTION, num_draft_tokens=4):
                if round_.timing.prefill_s == 0 and (drafter.models or not any(row.num_drafted for row in round_.rows)):
                    times[name].append(round_.timing)
    return [
        {
            "draft": name,
            "draft_s": statistics.median(one.draft_s for one in found),
            "round_s": statistics.median(one.total_s for one in found),
            "num_rounds": len(found),
        }
        for name, found in times.items()
    ]


if __name__ == "__main__":
    main()
