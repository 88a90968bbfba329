"""Lossless, by the loop as it is: thousands of seeds, and a chi-square test of what they said against the exact law.

The law is the target's alone, by Hugging Face's processors (reference.py); what the draft does must not show. The same
test, with as many seeds, finds out every wrong rule of outrider.certify.controls. (By the non-central chi-square law of
what 2,000 seeds showed, 1,000 miss one of them with a probability of 1e-5 at most. Noise keyed by position alone shows
with p = 5e-5 in 2,000 seeds, 8e-19 in 4,000: its toy is tested with so many.)
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import scipy.stats
import torch

from outrider.certify.controls import BLOCK_BY_POSITION, WRONG_RULES, drop_unlikely
from outrider.drafters.base import Drafter, NoDrafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, REJECTION, RULES, Rule
from reference import Law, table_law
from toys import request, table_lm, table_pair, tokens

pytestmark = pytest.mark.each_execution

NUM_SEEDS = 1000
POSITION_SEEDS = 4000
NUM_TOKENS = 4  # that are looked at; two more are generated, so that these come from full rounds
FALSE_ALARM = 1e-6
CAUGHT = 1e-9
PROMPT = (0, 1, 2, 2, 0, 1)  # n-grams to look up

SETTINGS = {
    "plain": {},
    "cold top-k": {"temperature": 0.75, "top_k": 2},
    "top-p": {"top_p": 0.75},
    "min-p": {"min_p": 0.25},
    "repetition penalty": {"repetition_penalty": 1.5},
    "counted penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    "min tokens": {"min_tokens": 2, "stop_token_ids": (0, 3)},
    "logit bias": {"logit_bias": {0: 1.0, 2: -0.5}},
    "all": {
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
    },
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


def _pvalue(
    target: LM, drafter: Drafter, rule: Rule, law: Law, k: int = 3, num_seeds: int = NUM_SEEDS, **options: object
) -> float:
    """How probable it is that the law gives sequences as far from it as these. Texts that are expected fewer than
    five times are counted together."""
    requests = [request(PROMPT, seed=seed, max_new_tokens=NUM_TOKENS + 2, **options) for seed in range(num_seeds)]
    counts = Counter(text[:NUM_TOKENS] for text in tokens(target, drafter, requests, rule, k))
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


@cache
def _law(settings: str) -> Law:
    """Output distribution of the target of ``table_pair(4)``."""
    return table_law(table_pair(4)[0].model.table, PROMPT, Sampling(**SETTINGS[settings]), NUM_TOKENS)


@pytest.mark.parametrize("settings", ["plain", "all"])
@pytest.mark.parametrize("drafter", ["model", "ngram", "suffix", "none"])
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_the_output_follows_the_targets_law(rule: Rule, drafter: str, settings: str) -> None:
    """K = 3, four tokens. False alarm: 1e-6 each."""
    target, model_drafter = table_pair(4)
    lookups = {"ngram": NgramDrafter(), "suffix": SuffixDrafter()}
    drafters: dict[str, Drafter] = {"model": model_drafter, **lookups, "none": NoDrafter()}
    assert _pvalue(target, drafters[drafter], rule, _law(settings), **SETTINGS[settings]) > FALSE_ALARM


@pytest.mark.pairwise
@pytest.mark.eager_only
@pytest.mark.parametrize("settings", [name for name in SETTINGS if name not in ("plain", "all")])
@pytest.mark.parametrize("drafter", ["model", "ngram", "suffix", "none"])
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_so_does_it_under_each_option(rule: Rule, drafter: str, settings: str) -> None:
    """False alarm: 1e-6 each."""
    test_the_output_follows_the_targets_law(rule, drafter, settings)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_tokens_drafted_in_one_forward_leave_the_law_alone(rule: Rule) -> None:
    """False alarm: 1e-6 each."""
    target, drafter = table_pair(4)
    parallel = replace(drafter, mask_id=2)
    assert _pvalue(target, parallel, rule, _law("all"), **SETTINGS["all"]) > FALSE_ALARM


@pytest.mark.parametrize("mask_id", [None, 2], ids=["one by one", "in one forward"])
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_ending_drafts_where_the_model_is_unsure_leaves_the_law_alone(rule: Rule, mask_id: int | None) -> None:
    """Unlike dropping tokens that are unlikely (below). False alarm: 1e-6 each."""
    target, drafter = table_pair(4)
    sure = replace(drafter, mask_id=mask_id, options=DraftOptions(min_prob=0.6))
    assert _pvalue(target, sure, rule, _law("all"), **SETTINGS["all"]) > FALSE_ALARM


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_greedy_draft_leaves_the_law_alone(rule: Rule) -> None:
    """False alarm: 1e-6 each."""
    target, drafter = table_pair(4)
    greedy = replace(drafter, options=DraftOptions(is_greedy=True))
    assert _pvalue(target, greedy, rule, _law("all"), **SETTINGS["all"]) > FALSE_ALARM


@pytest.mark.eager_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_narrow_logits_follow_their_own_law(rule: Rule, dtype: torch.dtype) -> None:
    """The law is that of the logits as computed. False alarm: 1e-6 each."""
    tables = [torch.tensor(SLIP_TOY[name]).log().to(dtype) for name in ("target", "draft")]
    target, draft = (table_lm(table) for table in tables)
    law = table_law(tables[0].double(), PROMPT, Sampling(), NUM_TOKENS)
    assert _pvalue(target, ModelDrafter(draft), rule, law) > FALSE_ALARM


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_draft_whose_context_fills_up_leaves_the_law_alone(rule: Rule) -> None:
    """It begins a new window after eight tokens, six of them the prompt's, and then every four. False alarm: 1e-6
    each."""
    target, drafter = table_pair(4, draft_context_len=8)
    assert _pvalue(target, drafter, rule, _law("plain")) > FALSE_ALARM


def _open_toy(toy: dict) -> tuple[LM, ModelDrafter, Law, int]:
    """With the number of seeds that it takes."""
    tables = {name: torch.tensor(rows, dtype=torch.float64).log() for name, rows in toy.items()}
    law = table_law(tables["target"], PROMPT, Sampling(), NUM_TOKENS)
    num_seeds = POSITION_SEEDS if toy is POSITION_TOY else NUM_SEEDS
    return table_lm(tables["target"]), ModelDrafter(table_lm(tables["draft"], name="draft")), law, num_seeds


@pytest.mark.eager_only
@pytest.mark.parametrize(
    ("toy", "k"),
    [(POSITION_TOY, 3), (SLIP_TOY, 1), (SLIP_TOY, 3), (SLIP_TOY, 5)],
    ids=["position toy, K = 3", "slip toy, K = 1", "slip toy, K = 3", "slip toy, K = 5"],
)
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_right_rules_pass_on_the_toys_of_the_wrong_ones(rule: Rule, k: int, toy: dict) -> None:
    """False alarm: 1e-6 each."""
    target, drafter, law, num_seeds = _open_toy(toy)
    assert _pvalue(target, drafter, rule, law, k, num_seeds) > FALSE_ALARM


@pytest.mark.eager_only
@pytest.mark.parametrize("rule", WRONG_RULES.values(), ids=WRONG_RULES)
def test_wrong_rules_are_found_out(rule: Rule) -> None:
    """By as many seeds as the right rules are tested with."""
    target, drafter, law, num_seeds = _open_toy(POSITION_TOY if rule is BLOCK_BY_POSITION else SLIP_TOY)
    assert _pvalue(target, drafter, rule, law, num_seeds=num_seeds) < CAUGHT


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_dropping_unlikely_drafts_is_found_out(rule: Rule) -> None:
    """A right rule cannot help it: the drafter shows it only those drafts that the draft model was sure of."""
    target, drafter, law, _ = _open_toy(SLIP_TOY)
    assert _pvalue(target, drop_unlikely(drafter, 0.35), rule, law) < CAUGHT
