"""Multiplication sheets: the task of llama-ssp's ``eval``.

A prompt has three solved lines and one to solve; it succeeds if the first output line is the product. The score means
little by itself, but a faulty acceptance rule would change it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scipy import stats as scipy_stats

from outrider.decoder import Decoder
from outrider.measure.intervals import wald, wilson
from outrider.records import Stats, Timing

_SOLVED = ((8, 12), (25, 4), (37, 85))
MAX_ANSWER_TOKENS = 8  # the largest product has four digits; a tokenizer may need more than one token for each


def prompt_of(a: int, b: int) -> str:
    solved = "".join(f"{x} * {y} = {x * y}\n" for x, y in _SOLVED)
    return f"{solved}{a} * {b} = "


def is_product(a: int, b: int, text: str) -> bool:
    """Whether the first generated line is the product, and nothing else."""
    return text.split("\n", 1)[0].strip() == str(a * b)


def problems(num_prompts: int, seed: int) -> list[tuple[int, int]]:
    """Draw pairs of factors from 1 to 99; deterministic for a seed."""
    generator = random.Random(seed)
    return [(generator.randint(1, 99), generator.randint(1, 99)) for _ in range(num_prompts)]


class SheetScore(NamedTuple):
    """Result of one arm. ``is_solved`` has one entry per problem."""

    is_solved: tuple[bool, ...]
    answers: tuple[str, ...]
    stats: Stats
    timing: Timing

    @property
    def num_solved(self) -> int:
        return sum(self.is_solved)

    def to_json(self) -> dict[str, Any]:
        counts = self.num_solved, len(self.is_solved)
        rates = {"wald": wald(*counts).to_json(), "wilson": wilson(*counts).to_json()}
        work = {"stats": self.stats.to_json(), "time_s": self.timing.to_json()}
        return {"num_solved": counts[0], "num_prompts": counts[1], **rates, **work}


def score(
    decoder: Decoder,
    sheet: Sequence[tuple[int, int]],
    *,
    batch_size: int,
    seed: int,
    on_solved: Callable[[int], None] | None = None,
    **options: Any,
) -> SheetScore:
    """Solve the sheet with a decoder. ``seed``: base seed; row i gets seed + i. ``on_solved``: called with the number
    of problems just done, for a progress bar. ``options``: sampling options; the token limit and the stop string are
    set here."""
    answers = [""] * len(sheet)
    stats, timing = Stats(), Timing()
    prompts = [prompt_of(*factors) for factors in sheet]
    options |= {"seed": [seed + i for i in range(len(sheet))], "stop": "\n", "max_new_tokens": MAX_ANSWER_TOKENS}
    for chunk in decoder.stream_many(prompts, num_slots=batch_size, **options):
        answers[chunk.row] += chunk.text
        stats, timing = stats + chunk.stats, timing + chunk.timing
        if on_solved is not None and chunk.finish_reason is not None:
            on_solved(1)
    is_solved = tuple(is_product(*factors, text) for factors, text in zip(sheet, answers, strict=True))
    return SheetScore(is_solved, tuple(answers), stats, timing)


def mcnemar(plain: SheetScore, speculative: SheetScore) -> tuple[int, int, float]:
    """Compare two arms on the same problems: the numbers of problems that only the first and only the second solved,
    and McNemar's exact p-value of no difference between the arms."""
    solved = Counter(zip(plain.is_solved, speculative.is_solved, strict=True))
    only_plain, only_speculative = solved[True, False], solved[False, True]
    num = only_plain + only_speculative
    return only_plain, only_speculative, float(scipy_stats.binomtest(only_plain, num).pvalue) if num else 1.0
