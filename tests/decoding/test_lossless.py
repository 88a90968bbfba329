"""Lossless, by the loop as it is: a thousand seeds, and a chi-square test of what they said against the exact law, that
of the target alone (reference.py). Every wrong rule of outrider.certify.controls is found. (By the non-central
chi-square law of what 2,000 seeds showed, 1,000 miss one of them with a probability of 1e-5 at most. Noise keyed by
position alone shows with p = 5e-5 in 2,000 seeds, 8e-19 in 4,000: its toy is tested with so many.)"""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import scipy.stats
import torch

from outrider.certify.controls import BLOCK_BY_POSITION, WRONG_RULES, drop_unlikely
from outrider.decoding.engine import decode
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, RULES, Rule
from reference import Law, table_law
from toys import llama_pair, random_table, request, run, table_lm, tokens

NUM_SEEDS = 1000
POSITION_SEEDS = 4000
NUM_TOKENS = 4  # that are looked at; two more are generated, so that these come from full rounds
FALSE_ALARM = 1e-6
CAUGHT = 1e-9
PROMPT = (0, 1, 2, 2, 0, 1)
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
ALL_OPTIONS = {"temperature": 1.25, "top_k": 3, "top_p": 0.875, "min_p": 0.125, "repetition_penalty": 1.25}
ALL_OPTIONS |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 3, "stop_token_ids": (1,)}
ALL_OPTIONS |= {"logit_bias": {1: -1.0, 3: 0.5}}

# A toy on which noise keyed by position alone shows under `block`: the draft hardly ever says 0, which the target often
# does, so that many drafts fall, and what fell has much to say on the tokens drafted next with the same numbers.
POSITION_TOY = {
    "target": [[0.3, 0.3, 0.4], [0.3, 0.5, 0.2], [0.4, 0.3, 0.3]],
    "draft": [[0.01, 0.29, 0.7], [0.1, 0.2, 0.7], [0.35, 0.35, 0.3]],
}
# A toy for the other slips: what follows depends much on what came before, and the draft knows it only half.
SLIP_TOY = {
    "target": [[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.6, 0.1, 0.3]],
    "draft": [[0.2, 0.5, 0.3], [0.3, 0.2, 0.5], [0.3, 0.4, 0.3]],
}


def _pvalue(target: LM, drafter: Drafter, rule: Rule, law: Law, num_seeds: int = NUM_SEEDS, **options: object) -> float:
    """How probable it is that the law gives sequences as far from it as these, with K = 3. Texts that are expected
    fewer than five times are counted together."""
    requests = [request(PROMPT, seed=seed, max_new_tokens=NUM_TOKENS + 2, **options) for seed in range(num_seeds)]
    counts = Counter(text[:NUM_TOKENS] for text in tokens(target, drafter, requests, rule, 3))
    if not counts.keys() <= law.keys():
        return 0.0
    expected, observed = [0.0], [0]
    for text, prob in law.items():
        if prob * num_seeds >= 5:
            expected.append(prob * num_seeds)
            observed.append(counts[text])
        else:
            expected[0] += prob * num_seeds
            observed[0] += counts[text]
    if expected[0] < 5:  # too few even together: leave them to the last of the others
        expected[-1] += expected.pop(0)
        observed[-1] += observed.pop(0)
    return scipy.stats.chisquare(observed, expected, sum_check=False).pvalue


@pytest.mark.each_execution
@ALL_RULES
def test_the_output_follows_the_targets_law(rule: Rule) -> None:
    """Under all options at once, with rows of candidates (float32). False alarm: 1e-6 each."""
    table, draft = (random_table(4, seed, 1.5).float() for seed in (0, 1))
    law = table_law(table.double(), PROMPT, Sampling(**ALL_OPTIONS), NUM_TOKENS)
    drafter = model_drafter(table_lm(0.5 * table + draft, name="draft"))
    assert _pvalue(table_lm(table), drafter, rule, law, **ALL_OPTIONS) > FALSE_ALARM


@pytest.mark.parametrize("name", [*WRONG_RULES, "drop-unlikely"])
def test_wrong_rules_break_the_output_law(name: str) -> None:
    """By as many seeds as the right rules are tested with, but for noise keyed by position."""
    rule = WRONG_RULES.get(name, REJECTION)
    is_by_position = rule is BLOCK_BY_POSITION
    toy = POSITION_TOY if is_by_position else SLIP_TOY
    tables = {name: torch.tensor(rows, dtype=torch.float64).log() for name, rows in toy.items()}
    law = table_law(tables["target"], PROMPT, Sampling(), NUM_TOKENS)
    target, drafter = table_lm(tables["target"]), model_drafter(table_lm(tables["draft"], name="draft"))
    drafter = drop_unlikely(drafter, 0.35) if name == "drop-unlikely" else drafter
    assert _pvalue(target, drafter, rule, law, POSITION_SEEDS if is_by_position else NUM_SEEDS) < CAUGHT


PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
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
    return llama_pair()


def _requests(prompts: list[tuple[int, ...]], num_tokens: int = 16, **options: object) -> list[Request]:
    return [request(ids, seed=10 + i, max_new_tokens=num_tokens, **options) for i, ids in enumerate(prompts)]


@pytest.mark.each_execution
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


@pytest.mark.each_execution
@ALL_RULES
def test_cut_at_the_end_of_a_round_and_resumed_equals_uncut(pair: tuple[LM, Drafter], rule: Rule) -> None:
    """With the same seed; under ``gumbel`` after every token, with another K and another drafter."""
    target, drafter = pair
    for one in _requests(PROMPTS):
        (uncut,) = run(target, drafter, [one], rule, 3)
        ends = itertools.accumulate(len(row.token_ids) for row in uncut.rounds[:-1])
        said = [uncut.token_ids[:end] for end in (range(1, 16) if rule is GUMBEL else ends)]
        again, k = (ngram_drafter(), 5) if rule is GUMBEL else (drafter, 3)
        rests = tokens(target, again, [_resumed(one, output) for output in said], rule, k)
        assert [output + rest for output, rest in zip(said, rests, strict=True)] == [uncut.token_ids] * len(said)


@pytest.mark.each_execution
def test_a_stream_closed_early_leaves_the_models_usable(pair: tuple[LM, Drafter]) -> None:
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
