"""The loop: speculative output is plain output, whatever the drafter, K, the batch and the neighbours."""

import dataclasses
import itertools
import math

import pytest
import torch

from outrider.decoding.engine import decode
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.records import Request, Stats
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


def _drafters(pair: tuple[LM, Drafter]) -> list[Drafter]:
    return [pair[1], ngram_drafter(), model_drafter(pair[0])]


def _requests(prompts: list[tuple[int, ...]], num_tokens: int = 16, **options: object) -> list[Request]:
    return [request(ids, seed=10 + i, max_new_tokens=num_tokens, **options) for i, ids in enumerate(prompts)]


@ALL_RULES
def test_greedy_output_is_plain_output(pair: tuple[LM, Drafter], rule: Rule) -> None:
    """For each drafter: a row, and a batch of ragged prompts, half of them with a repetition penalty. On the way drafts
    are accepted and rejected."""
    target, _ = pair
    rows = _requests(PROMPTS, temperature=0.0) + _requests(PROMPTS, temperature=0.0, repetition_penalty=1.5)
    plain = tokens(target, NO_DRAFTER, rows, rule, 0)
    assert [len(ids) for ids in plain] == [16] * len(rows)
    for k in (1, 4):
        counts = []
        for drafter in _drafters(pair):
            outputs = run(target, drafter, rows, rule, k)
            assert [output.token_ids for output in outputs] == plain
            counts.append(sum((output.stats for output in outputs), Stats()))
        by_model, by_ngram, by_itself = counts
        assert 0 < by_model.num_accepted_draft_tokens < by_model.num_draft_tokens
        assert by_ngram.num_draft_tokens > 0
        assert 0 < by_itself.num_accepted_draft_tokens == by_itself.num_draft_tokens
    assert tokens(target, pair[1], rows[:1], rule, 3) == plain[:1]


@pytest.mark.parametrize("k", [1, 4])
def test_gumbel_output_is_plain_output_with_the_same_seed(pair: tuple[LM, Drafter], k: int) -> None:
    """For each drafter: ragged prompts with all kinds of options."""
    target, _ = pair
    requests = [
        request(prompt, seed=i, max_new_tokens=16, **options)
        for i, (prompt, options) in enumerate(zip(PROMPTS * 3, OPTIONS, strict=True))
    ]
    plain = tokens(target, NO_DRAFTER, requests, GUMBEL, 0)
    for drafter in _drafters(pair):
        assert tokens(target, drafter, requests, GUMBEL, k) == plain


@ALL_RULES
def test_k_is_0_is_plain_decoding(pair: tuple[LM, Drafter], rule: Rule) -> None:
    """Whatever the drafter: every token is a bonus."""
    target, drafter = pair
    requests = _requests(PROMPTS)
    plain = run(target, NO_DRAFTER, requests, rule, 4)
    assert run(target, drafter, requests, rule, 0) == plain
    for output in plain:
        assert {origin for row in output.rounds for origin in row.origins} == {"bonus"}
        assert output.stats.mean_acceptance_length == 1.0


@ALL_RULES
def test_seeds_matter_and_repeat(pair: tuple[LM, Drafter], rule: Rule) -> None:
    """Equal seeds give equal rounds; another seed gives another sequence."""
    target, drafter = pair
    again = [run(target, drafter, [request((1,), seed=seed, max_new_tokens=16)], rule, 3)[0] for seed in (1, 1, 2)]
    assert again[0] == again[1]
    assert again[0].token_ids != again[2].token_ids


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


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_cut_at_the_end_of_a_round_and_resumed_equals_uncut(pair: tuple[LM, Drafter], rule: Rule) -> None:
    """After every round: prompt and output so far as the new prompt, the same seed."""
    target, drafter = pair
    for one in _requests(PROMPTS):
        (uncut,) = run(target, drafter, [one], rule, 3)
        ends = itertools.accumulate(len(row.token_ids) for row in uncut.rounds[:-1])
        said = [uncut.token_ids[:end] for end in ends]
        rests = tokens(target, drafter, [_resumed(one, output) for output in said], rule, 3)
        assert [output + rest for output, rest in zip(said, rests, strict=True)] == [uncut.token_ids] * len(said)


def test_gumbel_cut_anywhere_and_resumed_equals_uncut(pair: tuple[LM, Drafter]) -> None:
    """After every token, with another K and another drafter."""
    target, drafter = pair
    for one in _requests(PROMPTS):
        (uncut,) = tokens(target, drafter, [one], GUMBEL, 3)
        said = [uncut[:cut] for cut in range(1, len(uncut))]
        rests = tokens(target, ngram_drafter(), [_resumed(one, output) for output in said], GUMBEL, 5)
        assert [output + rest for output, rest in zip(said, rests, strict=True)] == [uncut] * len(said)


def test_a_stream_closed_early_leaves_the_models_usable(pair: tuple[LM, Drafter]) -> None:
    """Closed after one round, or left lying about: what comes next is as if it had never been."""
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
    # The one left lying about can still be finished.
    assert sum(len(row.token_ids) for round_ in left for row in round_.rows) > 0
