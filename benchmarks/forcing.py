"""Tokens per round predicted by forcing, against those measured on other texts.

Two drafters whose q depends on where the round began, from the tests: a parallel draft (a tiny Llama that reads masks
in place of its own drafts) and a head that reads hidden states of the target, a tiny Llama with random weights. For
each rule and K: the prediction from plain output of some seeds, the mean acceptance length of the real loop with other
seeds, each with its standard error over the texts, and the difference over the standard error of the difference. The
last column is the prediction from one ratio for each place, that of offset 0, which is wrong here.

    python benchmarks/forcing.py [NUM_TEXTS]
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from heads import head, parallel
from outrider.drafters.base import Drafter, NoDrafter
from outrider.options import Sampling
from outrider.records import Stats
from outrider.replay.forced import force_records
from outrider.replay.log_format import Header, Record
from outrider.replay.renewal import RoundDistribution, by_offset, survival
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION, RULES
from toys import as_lm, perturbed, request, run, tiny_llama

NUM_TOKENS = 40
PROMPTS = [(1, 2, 3), (5,) * 9, (7,)]


@dataclass(frozen=True)
class Tau:
    """Tokens per round, and its standard error over texts."""

    value: float
    error: float

    @classmethod
    def of(cls, texts: Sequence[Stats]) -> "Tau":
        rounds = sum(one.num_rounds for one in texts)
        value = 1 + sum(one.num_accepted_draft_tokens for one in texts) / rounds
        rests = [one.num_accepted_draft_tokens - (value - 1) * one.num_rounds for one in texts]
        return cls(value, math.sqrt(sum(rest * rest for rest in rests)) / rounds)

    def __str__(self) -> str:
        return f"{self.value:.3f} +- {self.error:.3f}"


def measure(target: LM, drafter: Drafter, num_texts: int) -> None:
    plain = [request(PROMPTS[i % 3], seed=i, max_new_tokens=NUM_TOKENS) for i in range(num_texts)]
    outputs = run(target, NoDrafter(), plain, REJECTION, 0)
    sampling = Sampling(max_new_tokens=NUM_TOKENS)
    header = Header("target", sampling, None, target.vocab_size, target.context_len, (), None)
    records = [
        Record(i, "", None, i, "length", tuple(one.prompt_ids), output.token_ids)
        for i, (one, output) in enumerate(zip(plain, outputs, strict=True))
    ]
    live = [request(PROMPTS[i % 3], seed=10**6 + i, max_new_tokens=NUM_TOKENS) for i in range(num_texts)]
    for k in (3, 7):
        for rule in ("rejection", "block"):
            forced = force_records(records, header, target, drafter, rule, k)
            predicted, by_place = (
                Tau.of(
                    [
                        RoundDistribution.of(survival(rule, logs), one.num_drafted).expected()
                        for one in forced
                        for logs in [by_offset(one.logs[:, 0], k) if is_by_place else one.logs]
                    ]
                )
                for is_by_place in (False, True)
            )
            real = Tau.of([output.stats for output in run(target, drafter, live, RULES[rule], k)])
            z = (predicted.value - real.value) / math.hypot(predicted.error, real.error)
            wrong_z = (by_place.value - real.value) / math.hypot(by_place.error, real.error)
            row = f"{drafter.name:9} {rule:10} {k:2}  {predicted!s:16} {real!s:16} {z:5.1f}"
            print(f"{row}  {by_place!s:16} {wrong_z:5.1f}")


def main() -> None:
    num_texts = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    model = tiny_llama()
    target = as_lm(model)
    print(f"{num_texts} texts of {NUM_TOKENS} tokens each, to predict from and to measure on")
    print("draft     rule        K  predicted        measured             z  one ratio a place    z")
    for drafter in (parallel(as_lm(perturbed(model, 0.1), "draft")), head(target)):
        measure(target, drafter, num_texts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
