"""Rows that draft beyond their end: a smaller limit gives the beginning of what a larger one gives."""

import dataclasses

import pytest

from outrider.drafters.base import Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.records import Request
from outrider.sampling.rules import BLOCK, RULES, Rule
from toys import Output, llama_pair, request, run, table_pair

pytestmark = pytest.mark.each_execution

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
LIMITS = [1, 2, 3, 5, 8, 13]


def _requests(limits: tuple[int, ...], beyond: bool) -> list[Request]:
    return [
        dataclasses.replace(request(ids, seed=10 + i, max_new_tokens=limit), drafts_beyond_end=beyond)
        for i, (ids, limit) in enumerate(zip(PROMPTS, limits, strict=True))
    ]


def _begins(outputs: list[Output], whole: list[Output]) -> bool:
    return all(a.token_ids == b.token_ids[: len(a.token_ids)] for a, b in zip(outputs, whole, strict=True))


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_smaller_limit_gives_a_prefix(rule: Rule) -> None:
    """In rows of different limits, with drafts that are always right too."""
    target, drafter = table_pair(8)
    drafters: list[Drafter] = [drafter, model_drafter(target), ngram_drafter()]
    for one in drafters:
        whole = run(target, one, _requests((20, 20, 20), True), rule, 4)
        for i, limit in enumerate(LIMITS):
            limits = limit, LIMITS[i - 1], LIMITS[i - 2]
            outputs = run(target, one, _requests(limits, True), rule, 4)
            assert [len(output.token_ids) for output in outputs] == list(limits)
            assert all(output.rounds[-1].finish_reason == "length" for output in outputs)
            assert _begins(outputs, whole)


def test_shortened_drafts_do_not() -> None:
    """The control."""
    target, drafter = table_pair(8)
    whole = run(target, drafter, _requests((20, 20, 20), False), BLOCK, 4)
    assert not all(_begins(run(target, drafter, _requests((n, n, n), False), BLOCK, 4), whole) for n in LIMITS)


def test_the_context_shortens_all_alike() -> None:
    """There is no room beyond it; its place does not depend on the limit."""
    target, drafter = llama_pair(context_len=24)
    whole = run(target, drafter, _requests((100, 100, 100), True), BLOCK, 4)
    assert [len(ids) + len(output.token_ids) for ids, output in zip(PROMPTS, whole, strict=True)] == [24] * 3
    for left in (1, 2, 3, 4):
        outputs = run(target, drafter, _requests((17 - left, 23 - left, 14 - left), True), BLOCK, 4)
        assert _begins(outputs, whole)
