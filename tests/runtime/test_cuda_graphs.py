"""Captured steps, here without recording; and devices that capture wrongly, of which no text may tell."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrids import hybrid, hybrid_lm
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.model import model_drafter
from outrider.errors import ExecutionError
from outrider.models.executions import capture, choose_execution
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime import cuda_graphs
from outrider.runtime.cache import SlotCache
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.lm import LM, AdvanceStep
from outrider.sampling.rules import REJECTION, RULES, Rule
from toys import as_lm, llama_pair, perturbed, tiny_llama, tokens

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 3], [9]]
REQUESTS = [Request(ids, Sampling(seed=i, max_new_tokens=9 * i + 5)) for i, ids in enumerate(PROMPTS)]
_ADVANCE = AdvanceStep(8, 32, (), is_kept=True)


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


@dataclass(frozen=True)
class _Reading:
    """Fails after a real advance, as where a model reads a value on the host."""

    tried: list[str] = field(default_factory=list, hash=False)

    def __call__(self, lm: LM, cache: SlotCache, lengths: Tensor) -> tuple[Tensor, ...]:
        self.tried.append(lm.name)
        _ADVANCE(lm, cache, lengths)
        raise RuntimeError("a value is read")


def test_a_step_that_cannot_be_captured_is_tried_once_and_leaves_states_alone() -> None:
    lm, step = hybrid_lm(hybrid("qwen3_5_text")), _Reading()
    lm.execution = CapturedExecution()
    cache, ids = lm.new_cache(1, 40), torch.arange(1, 30)[None]
    lm.prefill(ids, torch.tensor([0]), torch.tensor([16]), cache, latest=0, num_columns=16)
    cache.remember(ids[:, 16:], torch.arange(16, 29)[None])
    states = cache.storage[cache.num_token_stores :]
    before, given = [state.clone() for state in states], {"cache": cache, "lengths": torch.tensor([24])}
    for _ in range(2):
        with pytest.raises(ExecutionError, match="^target cannot be captured here: RuntimeError: a value is read"):
            lm.execution.run(step, lm, **given)
    assert step.tried == ["target"] and before
    for state, was in zip(states, before, strict=True):
        assert torch.equal(state, was)
    CapturedExecution().run(_ADVANCE, lm, **given)
    assert cache.anchors.tolist() == [24] and not all(map(torch.equal, states, before))


def _after_replays(program: Any, change: Callable[[], Any]) -> None:
    replay = program.replay

    def wrong() -> None:
        replay()
        change()

    program.replay = wrong


def _with_stale_inputs(program: Any, call: Any) -> None:
    program.inputs = [one.clone() for one in program.inputs]


def _with_a_stale_result(program: Any, call: Any) -> None:
    result = cuda_graphs._tensors(program.results)[0]
    old = result.clone()
    _after_replays(program, lambda: result.copy_(old))


def _failing(program: Any, call: Any) -> None:
    _after_replays(program, [None].pop)  # at the second replay


def _with_other_states(program: Any, call: Any) -> None:
    _, stores = call.args
    _after_replays(program, lambda: stores[-1].add_(1))


def _with_lost_keys(program: Any, call: Any) -> None:
    _, stores = call.args
    _after_replays(program, lambda: [store.zero_() for store in stores[:2]])


def _with_rounding(program: Any, call: Any) -> None:
    numbers = [one for one in cuda_graphs._tensors(program.results) if one.is_floating_point()]
    _after_replays(program, lambda: [one.mul_(1 + 1e-10) for one in numbers])


def _spoil(patch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    called = cuda_graphs._called

    def wrong(inputs: list[Tensor], call: Any) -> Any:
        program = called(inputs, call)
        change(program, call)
        return program

    patch.setattr(cuda_graphs, "_called", wrong)


@pytest.mark.parametrize(
    ("change", "has_states", "message"),
    [
        (_with_stale_inputs, False, "differs when captured: VerifyStep gives other logits"),
        (_with_stale_inputs, True, "differs when captured: (Verify|Advance)Step gives other"),
        (_with_a_stale_result, False, "differs when captured: VerifyStep gives other logits"),
        (_failing, False, "cannot be captured here: IndexError: pop from empty list"),
        (_failing, True, "cannot be captured here: IndexError: pop from empty list"),
        (_with_lost_keys, False, "differs when captured: VerifyStep gives other keys and values"),
        (_with_other_states, True, "differs when captured: (Verify|Advance)Step gives other states"),
    ],
)
def test_a_device_that_captures_wrongly_changes_no_text(
    change: Any, has_states: bool, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each model says so once, and runs eagerly from there on; or fails, if captured execution was asked for."""
    target, drafter = (hybrid_lm(hybrid("qwen3_5_text")), NO_DRAFTER) if has_states else llama_pair()
    want = tokens(target, drafter, REQUESTS, REJECTION, 3)
    _spoil(monkeypatch, change)
    fast, fast_drafter = capture(target), drafter.with_models(capture)
    for _ in range(2):
        assert tokens(fast, fast_drafter, REQUESTS, REJECTION, 3) == want
    assert sorted(line.split()[0] for line in caplog.messages) == sorted(lm.name for lm in (target, *drafter.models))
    assert all(line.endswith(": the model runs eagerly from here on") for line in caplog.messages)
    assert fast.execution.name == "eager"
    with pytest.raises(ExecutionError, match=f"^target {message}"):
        tokens(capture(target, is_required=True), drafter, REQUESTS, REJECTION, 3)


def test_captured_steps_may_round_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = llama_pair()
    want, fast = tokens(target, drafter, REQUESTS, REJECTION, 3), capture(target)
    _spoil(monkeypatch, _with_rounding)
    assert tokens(fast, drafter, REQUESTS, REJECTION, 3) == want and not caplog.messages
    assert {program.num_compared for program in fast.execution._programs.values()} == {1, 2}  # type: ignore[attr-defined]


_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("options", [{}, {"rope_parameters": _DYNAMIC}], ids=["llama", "frequencies by the position"])
def test_recorded_steps_equal_eager_ones(options: dict[str, Any], rule: Rule, caplog: pytest.LogCaptureFixture) -> None:
    """Rotary frequencies may be chosen on the host, by the highest position; within the context they stay the same."""
    model = tiny_llama(**options)
    drafter = model_drafter(as_lm(perturbed(model, 0.1).to("cuda"), "draft"))
    target = as_lm(model.to("cuda"))
    want = tokens(target, drafter, REQUESTS, rule, 2)
    fast, fast_drafter = choose_execution(target), drafter.with_models(choose_execution)
    for _ in range(2):
        assert tokens(fast, fast_drafter, REQUESTS, rule, 2) == want
    assert not caplog.messages  # none of them runs eagerly
    assert not options or model.model.rotary_emb.rope_type == "dynamic"
