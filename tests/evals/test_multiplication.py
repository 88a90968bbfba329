"""Multiplication sheets: the prompt to the letter, the first line as the answer, and the same score in every batch."""

from typing import Any

import pytest

from outrider.evals.multiplication import SheetScore, is_product, mcnemar, problems, prompt_of, score
from outrider.records import Stats, Timing
from pairs import embedded


def test_the_first_line_is_the_product_and_nothing_else() -> None:
    assert prompt_of(6, 17) == "8 * 12 = 96\n25 * 4 = 100\n37 * 85 = 3145\n6 * 17 = "
    assert all(is_product(6, 17, text) for text in ("102", "102\n25 * 4", " 102 \r\n"))
    assert not any(is_product(6, 17, text) for text in ("1024", "", "\n102", "102.", "0102"))
    sheet = problems(300, seed=4)  # a shorter sheet is the beginning of a longer one
    assert sheet != problems(300, seed=5) and problems(10, seed=4) == sheet[:10]


def test_a_score_depends_neither_on_the_batch_nor_on_the_draft() -> None:
    decoder, sheet = embedded("float64"), problems(9, seed=1)
    together = score(decoder, sheet, batch_size=8, seed=0, temperature=0.0)
    plain = score(decoder.plain(), sheet, batch_size=1, seed=0, temperature=0.0)
    assert together.answers == plain.answers and together.is_solved == plain.is_solved
    assert plain.stats.num_draft_tokens == 0 < together.stats.num_draft_tokens
    sampled = score(decoder.plain(), sheet[:3], batch_size=2, seed=40)
    for i, factors in enumerate(sheet[:3]):
        options: dict[str, Any] = {"stop": "\n", "max_new_tokens": 8, "seed": 40 + i}
        assert sampled.answers[i] == decoder.plain().generate(prompt_of(*factors), **options)[0].text


def test_scores_are_compared_problem_by_problem() -> None:
    """Only plain solved 1 of 8 problems, only speculative 7: McNemar's exact p is 2 (1 + 8) / 2^8."""

    def made_up(*is_solved: bool) -> SheetScore:
        return SheetScore(is_solved, ("",) * len(is_solved), Stats(), Timing())

    plain, speculative = made_up(*[True] * 2, *[False] * 7), made_up(True, False, *[True] * 7)
    assert mcnemar(plain, speculative) == (1, 7, pytest.approx(18 / 256))
    assert mcnemar(plain, plain) == (0, 0, 1.0)
