"""Lossless, by the loop as it is: a thousand seeds, and a chi-square test of what they said against the exact law.

The law is the target's alone, by Hugging Face's processors (reference.py); what the draft does must not show. Rules are
enumerated in tests/sampling, and what every drafter draws in tests/drafters/test_contract.py; this sees the loop that
joins them. The same test finds out every wrong rule of outrider.certify.controls. (By the non-central chi-square law of
what 2,000 seeds showed, 1,000 miss one of them with a probability of 1e-5 at most. Noise keyed by position alone shows
with p = 5e-5 in 2,000 seeds, 8e-19 in 4,000: its toy is tested with so many.)
"""

from collections import Counter

import pytest
import scipy.stats
import torch

from outrider.certify.controls import BLOCK_BY_POSITION, WRONG_RULES, drop_unlikely
from outrider.drafters.base import Drafter
from outrider.drafters.model import model_drafter
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION, RULES, Rule
from reference import Law, table_law
from toys import random_table, request, table_lm, tokens

NUM_SEEDS = 1000
POSITION_SEEDS = 4000
NUM_TOKENS = 4  # that are looked at; two more are generated, so that these come from full rounds
FALSE_ALARM = 1e-6
CAUGHT = 1e-9
PROMPT = (0, 1, 2, 2, 0, 1)
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
ALL_OPTIONS = {
    "temperature": 1.25,
    "top_k": 3,
    "top_p": 0.875,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "min_tokens": 3,
    "stop_token_ids": (1,),
    "logit_bias": {1: -1.0, 3: 0.5},
}

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


def _open_toy(toy: dict) -> tuple[LM, Drafter, Law]:
    tables = {name: torch.tensor(rows, dtype=torch.float64).log() for name, rows in toy.items()}
    law = table_law(tables["target"], PROMPT, Sampling(), NUM_TOKENS)
    return table_lm(tables["target"]), model_drafter(table_lm(tables["draft"], name="draft")), law


@pytest.mark.parametrize("rule", WRONG_RULES.values(), ids=WRONG_RULES)
def test_wrong_rules_are_found_out(rule: Rule) -> None:
    """By as many seeds as the right rules are tested with, but for noise keyed by position."""
    is_by_position = rule is BLOCK_BY_POSITION
    target, drafter, law = _open_toy(POSITION_TOY if is_by_position else SLIP_TOY)
    assert _pvalue(target, drafter, rule, law, POSITION_SEEDS if is_by_position else NUM_SEEDS) < CAUGHT


def test_dropping_unlikely_drafts_is_found_out() -> None:
    """A right rule cannot help it: the drafter shows it only those drafts that the draft model was sure of."""
    target, drafter, law = _open_toy(SLIP_TOY)
    assert _pvalue(target, drop_unlikely(drafter, 0.35), REJECTION, law) < CAUGHT
