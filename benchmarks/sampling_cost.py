"""What it costs to get from logits to the next token: microseconds, full rows in PyTorch and candidates in C++.

    python benchmarks/sampling_cost.py [--vocabularies 49152 262144] [--sequences 1 8] [--seconds 0.3]

One thread, random logits whose probabilities fall with a power of the rank, as those of language models do. "Plain" is
a token without a draft: one row of logits to probabilities, and a draw. "Round" has K = 4: five rows of logits, and the
verdict on four tokens of a draft whose q is given; drawing one of these from the draft's logits costs what a plain
token does. Both ways take turns, call by call; the logits are read before each call, as a model has just written them.
Numbers are lower quintiles of the thread's time on the processor, since other programs only add to it. The old way is
the definition (``to_probs`` and the rules on tensors), with Gumbel noise for all tokens. The last line of standard
output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.options import Sampling
from outrider.records import Draft
from outrider.sampling.candidates import candidate_buffers
from outrider.sampling.probs import Settings, probs_of
from outrider.sampling.rules import RULES, Rule
from outrider.system.provenance import provenance

K = 4
Call = tuple[Callable[[], Draft], Callable[[Draft], None]]  # the draft is made before what is measured
CPU = torch.device("cpu")
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "T = 1": Sampling(),
    "top-k 50, top-p 0.95": Sampling(temperature=0.8, top_k=50, top_p=0.95),
    "top-p 0.95": Sampling(top_p=0.95),
}


@dataclass(frozen=True)
class Case:
    """Sequences with logits of the target [B, K+1, V] and of the draft [B, K, V]."""

    rule: Rule
    target: Tensor
    draft: Tensor
    settings: Settings

    def calls(self) -> dict[str, Call]:
        """A plain token, and a round."""
        num_rows, vocab_size = len(self.target), self.target.shape[-1]
        rows = seeds = torch.arange(num_rows)
        starts = torch.full((num_rows,), 9)
        q, _ = probs_of(self.draft, self.settings)
        noise = self.rule.make_noise(seeds, starts, K, vocab_size)
        ids = torch.stack([self.rule.draw(q[:, i], noise.at(i)) for i in range(K)], dim=1)
        one = self.target[:, :1]
        nothing = Draft(ids[:, :0], None, torch.zeros_like(starts))
        drafted = Draft(ids, q, torch.full_like(starts, K))

        def renewed(draft: Draft) -> Draft:
            """The draft, in buffers without other rows."""
            if self.settings.candidates is None:
                return draft
            self.settings.candidates.clear()
            return draft if draft.probs is None else replace(draft, probs=probs_of(self.draft, self.settings)[0])

        def call(logits: Tensor, draft: Draft) -> None:
            # As in the loop, uniform numbers are made long before, Gumbel noise when it is asked for.
            self.rule.verify(probs_of(logits, self.settings)[0], draft, noise.select(rows, K))

        cases = {"plain": (nothing, one), "round": (drafted, self.target)}
        return {name: (partial(renewed, draft), partial(call, logits)) for name, (draft, logits) in cases.items()}


def logits_like_a_models(num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Logits of a target and of a draft that is a little off."""
    generator = torch.Generator().manual_seed(0)
    falling = -1.5 * torch.arange(1, vocab_size + 1).log()
    shape = num_rows, K + 1, vocab_size
    order = torch.rand(shape, generator=generator).argsort(dim=-1)
    target = falling[order] + 0.5 * torch.randn(shape, generator=generator)
    return target, target[:, :K] + 0.5 * torch.randn(num_rows, K, vocab_size, generator=generator)


def timed(calls: Sequence[Call], logits: Tensor, seconds: float) -> list[float]:
    """Lower quintiles in microseconds, in turns, for about as long."""
    spent: list[list[float]] = [[] for _ in calls]
    for given, call in calls:
        call(given())
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(spent[0]) < 3:
        for (given, call), times in zip(calls, spent, strict=True):
            draft = given()
            logits.sum()
            begin = time.thread_time()
            call(draft)
            times.append(1e6 * (time.thread_time() - begin))
    return [round(sorted(times)[len(times) // 5], 1) for times in spent]


@torch.inference_mode()
def measure(vocabularies: Sequence[int], sequences: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a result for each vocabulary, number of sequences, options and rule."""
    for vocab_size in vocabularies:
        for num_rows in sequences:
            target, draft = logits_like_a_models(num_rows, vocab_size)
            for name, sampling in SETTINGS.items():
                full = Settings.of([sampling] * num_rows, vocab_size, CPU)
                for rule in RULES.values():
                    old, new = (
                        Case(rule, target, draft, replace(full, candidates=buffers)).calls()
                        for buffers in (None, candidate_buffers(vocab_size, CPU))
                    )
                    found = {kind: timed([old[kind], new[kind]], target, seconds) for kind in old}
                    case = {"vocab_size": vocab_size, "num_rows": num_rows, "options": name, "rule": rule.name}
                    yield case | {
                        f"{kind}_us": dict(zip(("old", "new"), us, strict=True)) for kind, us in found.items()
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 49152, 151936, 262144])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each of two ways of each case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for result in measure(arguments.vocabularies, arguments.sequences, arguments.seconds):
        results.append(result)
        head = f"{result['vocab_size']:7} x {result['num_rows']}  {result['options']:21}{result['rule']:10}"
        plain, round_ = result["plain_us"], result["round_us"]
        print(f"{head} plain {plain['old']:9.0f} {plain['new']:7.0f}   round {round_['old']:9.0f} {round_['new']:7.0f}")
    print(json.dumps({"results": results, "provenance": provenance("cpu")}))


if __name__ == "__main__":
    main()
