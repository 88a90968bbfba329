"""The loop: rows do not depend on their neighbours, nor on cuts. (Equality with plain decoding: test_contract.py.)"""

import dataclasses
import itertools
import math

import pytest
import torch

from outrider.decoding.engine import decode
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.records import Request
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, RULES, Rule
from toys import llama_pair, request, run, tokens

pytestmark = pytest.mark.each_execution

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)

# Sampling options that need something of the loop: tokens seen, bias, filters.
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"min_p": 0.1, "logit_bias": {3: 2.0, 5: -math.inf}},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 1.5, "min_tokens": 3, "stop_token_ids": (1, 2)},
    {"min_tokens": 7, "stop_token_ids": (0, 3, 4), "presence_penalty": -2.0, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def pair(_execution: None) -> tuple[LM, Drafter]:
    """A target and a draft that agrees with it now and then, in float64."""
    return llama_pair()


def _requests(prompts: list[tuple[int, ...]], num_tokens: int = 16, **options: object) -> list[Request]:
    return [request(ids, seed=10 + i, max_new_tokens=num_tokens, **options) for i, ids in enumerate(prompts)]


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [*((rule, None) for rule in RULES.values()), (REJECTION, ngram_drafter())],
    ids=[*RULES, "rejection of n-grams"],
)
def test_a_row_does_not_depend_on_its_neighbours(pair: tuple[LM, Drafter], rule: Rule, drafter: Drafter | None) -> None:
    """Rows of all options, prompts and lengths together: each says what it says alone, round by round."""
    target, by_model = pair
    num_tokens = (9, 14, 17, 5, 25, 11, 8, 6, 20, 1)
    requests = [
        request(PROMPTS[i % 3], seed=i, max_new_tokens=n, **options)
        for i, (n, options) in enumerate(zip(num_tokens, [*OPTIONS, {}], strict=True))
    ]
    together = run(target, drafter or by_model, requests, rule, 4)
    for index, one in enumerate(requests):
        (alone,) = run(target, drafter or by_model, [one], rule, 4)
        assert list(together[index].rounds) == [dataclasses.replace(row, row=index) for row in alone.rounds]


def _resumed(one: Request, output: tuple[int, ...]) -> Request:
    left = one.sampling.max_new_tokens - len(output)
    return request((*one.prompt_ids, *output), seed=one.sampling.seed, max_new_tokens=left)


@ALL_RULES
def test_cut_at_the_end_of_a_round_and_resumed_equals_uncut(pair: tuple[LM, Drafter], rule: Rule) -> None:
    """Prompt and output so far as the new prompt, the same seed; under ``gumbel`` after every token, with another K and
    another drafter."""
    target, drafter = pair
    for one in _requests(PROMPTS):
        (uncut,) = run(target, drafter, [one], rule, 3)
        ends = itertools.accumulate(len(row.token_ids) for row in uncut.rounds[:-1])
        said = [uncut.token_ids[:end] for end in (range(1, 16) if rule is GUMBEL else ends)]
        again, k = (ngram_drafter(), 5) if rule is GUMBEL else (drafter, 3)
        rests = tokens(target, again, [_resumed(one, output) for output in said], rule, k)
        assert [output + rest for output, rest in zip(said, rests, strict=True)] == [uncut.token_ids] * len(said)


def test_a_stream_closed_early_leaves_the_models_usable(pair: tuple[LM, Drafter]) -> None:
    """The next one is as if the other had never been; one that is left lying about can still be finished."""
    target, drafter = pair
    requests = _requests(PROMPTS)
    expected = run(target, drafter, requests, BLOCK, 4)
    closed = decode(target, drafter, requests, BLOCK, num_draft_tokens=4)
    next(closed)
    closed.close()
    left = decode(target, drafter, list(reversed(requests)), BLOCK, num_draft_tokens=2)
    next(left)
    assert run(target, drafter, requests, BLOCK, 4) == expected
    assert torch.is_inference_mode_enabled() is False
    assert sum(len(row.token_ids) for round_ in left for row in round_.rows) > 0
    plain = run(target, NO_DRAFTER, requests, BLOCK, 4)
    assert run(target, drafter, requests, BLOCK, 0) == plain
    assert {origin for output in plain for row in output.rounds for origin in row.origins} == {"bonus"}
