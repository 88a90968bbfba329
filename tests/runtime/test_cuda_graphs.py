"""Captured steps, without a recording: storage is used again, never shared. (See conftest.py for the loop's tests.)"""

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrids import hybrid, hybrid_lm
from outrider.drafters.model import model_drafter
from outrider.errors import ExecutionError
from outrider.models.executions import choose_execution
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime.cache import SlotCache
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.lm import LM, _advance_step
from outrider.sampling.rules import RULES, Rule
from toys import as_lm, perturbed, tiny_llama, tokens

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 3], [9]]


def test_storage_is_used_again_but_not_shared() -> None:
    lm = as_lm(tiny_llama())
    lm.execution = CapturedExecution()
    first, second = lm.new_cache(2, 100), lm.new_cache(2, 100)
    addresses = {cache.storage[0].data_ptr() for cache in (first, second)}
    assert len(addresses) == 2
    first.storage[0].fill_(torch.nan)  # as from a model gone wrong
    del first
    third = lm.new_cache(2, 90)  # rounded up to the same capacity
    assert third.storage[0].data_ptr() in addresses - {second.storage[0].data_ptr()}
    assert not any(store.any() for store in third.storage)
    assert lm.new_cache(1, 100).storage[0].data_ptr() not in addresses


def test_a_step_that_cannot_be_captured_is_tried_once_and_leaves_states_alone() -> None:
    """It fails after a real advance, as where a model reads a value on the host. Other shapes of it may work."""
    lm = hybrid_lm(hybrid("qwen3_5_text"))
    lm.execution = CapturedExecution()
    cache, ids = lm.new_cache(1, 40), torch.arange(1, 30)[None]
    lm.prefill(ids, torch.tensor([0]), torch.tensor([16]), cache, latest=0, num_columns=16)
    cache.remember(ids[:, 16:], torch.arange(16, 29)[None])
    tried: list[int] = []

    def step(lm: LM, width: int, cache: SlotCache, lengths: Tensor) -> tuple[Tensor, ...]:
        tried.append(width)
        result = _advance_step(lm, 8, 32, (), True, cache, lengths)
        if width == 9:
            raise RuntimeError("a value is read")
        return result

    states = cache.storage[cache.num_token_stores :]
    before = [state.clone() for state in states]
    for _ in range(2):
        with pytest.raises(ExecutionError, match="^target cannot be captured here: RuntimeError: a value is read"):
            lm.run(step, (9,), cache, torch.tensor([24]))
    assert tried == [9] and before
    for state, was in zip(states, before, strict=True):
        assert torch.equal(state, was)
    lm.run(step, (8,), cache, torch.tensor([24]))
    assert cache.anchors.tolist() == [24] and not all(map(torch.equal, states, before))


def test_steps_that_cannot_be_captured_run_eagerly_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    lm = as_lm(tiny_llama())
    lm.execution = CapturedExecution(is_required=False)

    tried: list[int] = []

    def step(lm: LM, factor: int, values: Tensor) -> tuple[Tensor, ...]:
        tried.append(factor)
        if factor > 1 and tried.count(factor) == 1:  # while it is captured
            raise RuntimeError("a value is read")
        return (factor * values,)

    for factor in (1, 2, 3, 2):
        (got,) = lm.run(step, (factor,), torch.tensor([1.0, 2.0, 3.0]))
        assert got.sum().item() == 6.0 * factor
    assert lm.execution.num_programs == 3
    assert caplog.messages == ["target cannot be captured here: RuntimeError: a value is read: such steps run eagerly"]


_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("options", [{}, {"rope_parameters": _DYNAMIC}], ids=["llama", "frequencies by the position"])
def test_recorded_steps_say_what_eager_ones_say(options: dict[str, Any], rule: Rule) -> None:
    """Rotary frequencies may be chosen on the host, by the highest position; within the context they stay the same."""
    model = tiny_llama(**options)
    drafter = model_drafter(as_lm(perturbed(model, 0.1).to("cuda"), "draft"))
    target = as_lm(model.to("cuda"))
    requests = [Request(ids, Sampling(seed=i, max_new_tokens=9 * i + 5)) for i, ids in enumerate(PROMPTS)]
    want = tokens(target, drafter, requests, rule, 2)
    fast, fast_drafter = choose_execution(target), drafter.with_models(choose_execution)
    for _ in range(2):
        assert tokens(fast, fast_drafter, requests, rule, 2) == want
    assert not options or model.model.rotary_emb.rope_type == "dynamic"
