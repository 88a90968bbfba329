"""Predictions of memory hold against tensors that are really there."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import outrider
from block_heads import write_block
from heads import write_eagle3
from hybrids import hybrid, hybrid_lm
from outrider.bench.predicted_memory import Memory, Predictor, Workload, head_memory
from outrider.errors import OptionError
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.models.weights import num_bytes
from outrider.runtime.lm import PREFILL_TOKENS
from pairs import zoo

WORK = Workload(context=512, num_rows=4, k=4)


def config(name: str = "fable") -> Any:
    return transformers.AutoConfig.from_pretrained(zoo(name))


def test_weights_and_cache_are_those_of_the_loaded_model() -> None:
    predicted = Predictor(config(), WORK, torch.bfloat16).memory()
    lm = outrider.load("fable", device="cpu", dtype="bfloat16").target
    cache = lm.new_cache(WORK.num_rows, WORK.context)
    assert predicted.weights == num_bytes(lm.model)
    assert predicted.cache == sum(store.nbytes for store in cache.storage)


@pytest.mark.slow
def test_states_are_predicted_too() -> None:
    model = hybrid("qwen3_5_text")
    predicted = Predictor(model.config, Workload(128, 2, 4), torch.float64).memory()
    cache = hybrid_lm(model).new_cache(2, 128)
    assert predicted.cache == sum(store.nbytes for store in cache.storage)
    assert predicted.prefill is not None and predicted.verify is not None
    assert predicted.verify < predicted.prefill


@pytest.mark.slow  # its profile takes seconds
def test_steps_take_what_is_predicted() -> None:
    """By the allocator of torch: the most that is alive while prompts are fed, one or several at a time. (The native
    engine takes less.)"""
    predicted = Predictor(config(), WORK, torch.float32).memory()
    lm = outrider.load("fable", device="cpu", execution="eager").target
    cache = lm.new_cache(WORK.num_rows, WORK.context)
    most = 0
    for num_rows in (1, WORK.num_rows):
        width = min(WORK.context, PREFILL_TOKENS // num_rows)
        positions = torch.arange(WORK.context - width, WORK.context).expand(num_rows, -1)
        rows = cache.rows(0, num_rows)
        with torch.inference_mode(), torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            lm.forward(torch.zeros_like(positions), positions, rows, WORK.context, num_logits=1)
        alive = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                most = max(most, alive)
    assert predicted.prefill == pytest.approx(most, rel=0.05)


def test_processes_share_what_the_plan_says() -> None:
    predictor = Predictor(config(), WORK, torch.float32)
    alone, shared = predictor.memory(), predictor.memory(parallel=2)
    assert shared.cache * 2 == alone.cache
    assert alone.weights / 2 <= shared.weights < 0.51 * alone.weights  # norms and tables of angles are on both


def test_the_total_has_the_larger_step() -> None:
    assert Memory(1000, 100, 10, 20).total == Memory(1000, 100, None, 20).total == 1120
    assert Memory(1000, 100, 30, 20).total == 1130


def test_a_context_that_is_too_long() -> None:
    longest = config().max_position_embeddings
    with pytest.raises(OptionError, match=f"this model accepts {longest} tokens"):
        Predictor(config(), Workload(longest + 1, 1, 4), torch.float32)


@pytest.mark.parametrize("kind", ["eagle3", "block with an embedding"])
def test_a_head_takes_what_is_loaded(kind: str, tmp_path: Path) -> None:
    """Beside its target: no tensor that it borrows, and the cache of its session. (An embedding in its checkpoint
    counts as its own, though here it is the target's, and is shared.)"""
    decoder = outrider.load("fable", device="cpu")
    target, spec = decoder.target, resolve(str(tmp_path), None)
    if kind == "eagle3":
        write_eagle3(tmp_path, target.model, token_ids=[3, 5, 8])
    else:
        write_block(tmp_path, target.model, block_size=8, has_own_tokens=True)
    predicted = head_memory(spec, resolve("fable", None), WORK, torch.float32)
    head = load_head(spec, target)
    borrowed = {id(tensor) for tensor in target.model.parameters()} | {id(tensor) for tensor in target.model.buffers()}
    own = [one for one in (*head.model.parameters(), *head.model.buffers()) if id(one) not in borrowed]
    embedding = target.model.get_input_embeddings().weight.nbytes if kind != "eagle3" else 0
    assert predicted.weights == sum(tensor.nbytes for tensor in own) + embedding
    cache = head.new_cache(WORK.num_rows, WORK.context + (0 if kind == "eagle3" else 8))
    assert predicted.cache == sum(store.nbytes for store in cache.storage) == predicted.total - predicted.weights
