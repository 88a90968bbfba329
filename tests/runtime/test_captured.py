"""Captured steps, without a recording: fixed places give the same tokens, and storage is used again, never shared.

The loop's own tests run with this execution too (see conftest.py).
"""

import warnings

import pytest
import torch

from outrider.decoding.engine import decode
from outrider.drafters.model import ModelDrafter
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime.captured import Captured
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION, RULES, Rule
from toys import as_lm, llama_pair, perturbed, tiny_llama, tokens

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 3], [9]]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_second_run_prepares_nothing(rule: Rule) -> None:
    """Rows end one after the other; the smaller batches take turns on storage too."""
    target, drafter = llama_pair()
    requests = [Request(ids, Sampling(seed=i, max_new_tokens=9 * i + 5)) for i, ids in enumerate(PROMPTS)]
    want = tokens(target, drafter, requests, rule, 2)
    target.execution, drafter.lm.execution = Captured(), Captured()
    assert tokens(target, drafter, requests, rule, 2) == want
    before = target.execution.num_programs, drafter.lm.execution.num_programs
    assert tokens(target, drafter, requests, rule, 2) == want
    assert (target.execution.num_programs, drafter.lm.execution.num_programs) == before


def test_storage_is_used_again_but_not_shared() -> None:
    lm = as_lm(tiny_llama())
    lm.execution = Captured()
    first, second = lm.new_cache(2, 100), lm.new_cache(2, 100)
    addresses = {cache.storage[0].data_ptr() for cache in (first, second)}
    assert len(addresses) == 2
    first.storage[0].fill_(torch.nan)  # as from a model gone wrong
    del first
    third = lm.new_cache(2, 90)  # rounded up to the same capacity
    assert third.storage[0].data_ptr() in addresses - {second.storage[0].data_ptr()}
    assert not any(store.any() for store in third.storage)
    assert lm.new_cache(1, 100).storage[0].data_ptr() not in addresses


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_recorded_steps_say_what_eager_ones_say(rule: Rule) -> None:
    model = tiny_llama()
    drafter = ModelDrafter(as_lm(perturbed(model, 0.1).to("cuda"), "draft"))
    target = as_lm(model.to("cuda"))
    requests = [Request(ids, Sampling(seed=i, max_new_tokens=9 * i + 5)) for i, ids in enumerate(PROMPTS)]
    want = tokens(target, drafter, requests, rule, 2)
    fast, fast_drafter = target.compiled(), drafter.with_models(LM.compiled)
    for _ in range(2):
        assert tokens(fast, fast_drafter, requests, rule, 2) == want


@pytest.mark.gpu
def test_the_host_waits_for_nothing_but_reports() -> None:
    """Three rows of a batch of four, after the first steps of each kind were recorded."""
    target, drafter = (as_lm(tiny_llama(seed).to("cuda")).compiled() for seed in (0, 1))
    requests = [Request(ids, Sampling(seed=i, max_new_tokens=60)) for i, ids in enumerate(PROMPTS)]
    requests.append(Request([5], Sampling(max_new_tokens=1, seed=3)))
    rounds = decode(target, ModelDrafter(drafter), requests, REJECTION, num_draft_tokens=2)
    for _ in range(3):
        next(rounds)
    try:
        with warnings.catch_warnings(action="ignore"):  # it is called a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(8):
            next(rounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
