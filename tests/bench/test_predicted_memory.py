"""Predictions of memory hold against tensors that are really there."""

from typing import Any

import pytest
import torch
import transformers

import outrider
from hybrids import hybrid, hybrid_lm
from native_cases import CASES, random_model
from outrider.bench.predicted_memory import Predictor
from outrider.errors import OptionError
from outrider.models.loading import Checkpoint, build_lm
from outrider.models.weights import num_bytes
from pairs import zoo

ROWS, CONTEXT = 4, 512


def config() -> Any:
    return transformers.AutoConfig.from_pretrained(zoo("fable"))


def test_weights_and_cache_are_those_of_the_loaded_model() -> None:
    predicted = Predictor(config(), CONTEXT, ROWS, torch.bfloat16).memory()
    lm = outrider.load("fable", device="cpu", dtype="bfloat16").target
    assert predicted.weights == num_bytes(lm.model)
    assert predicted.cache == sum(store.nbytes for store in lm.new_cache(ROWS, CONTEXT).storage)
    assert predicted.total == predicted.weights + predicted.cache


def test_states_are_predicted_too() -> None:
    model = hybrid("qwen3_5_text")
    predicted = Predictor(model.config, 128, 2, torch.float64).memory()
    assert predicted.cache == sum(store.nbytes for store in hybrid_lm(model).new_cache(2, 128).storage)


def test_states_of_the_native_engine_have_shapes_of_their_own() -> None:
    model = random_model("qwen3_5_text", CASES["qwen3_5_text"]["plain"])
    native = build_lm(Checkpoint("target", model, tokenizer=None, execution="native"), model.config.vocab_size)
    expected = sum(store.nbytes for store in native.new_cache(2, 128).storage)
    assert Predictor(model.config, 128, 2, torch.float32, is_native=True).memory().cache == expected
    assert Predictor(model.config, 128, 2, torch.float32).memory().cache != expected


def test_processes_share_what_the_plan_says() -> None:
    predictor = Predictor(config(), CONTEXT, ROWS, torch.float32)
    alone, shared = predictor.memory(), predictor.memory(parallel=2)
    assert shared.cache * 2 == alone.cache
    assert alone.weights / 2 <= shared.weights < 0.51 * alone.weights  # norms and tables of angles are on both


def test_a_context_that_is_too_long() -> None:
    longest = config().max_position_embeddings
    with pytest.raises(OptionError, match=f"this model accepts {longest} tokens"):
        Predictor(config(), longest + 1, 1, torch.float32)
