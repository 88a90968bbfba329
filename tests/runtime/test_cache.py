"""The slot cache: random models of many kinds give through it, in float64, what one full forward gives."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from outrider.runtime import lm as lm_module
from outrider.runtime.lm import LM
from outrider.runtime.weight_tensors import move_weights
from toys import as_lm, random_model, tiny_llama


def test_slots_are_views_copies_and_zeros() -> None:
    cache = as_lm(tiny_llama()).new_cache(3, 10)
    for store in cache.storage:
        store.copy_(torch.arange(store.numel()).reshape(store.shape))
    view = cache.rows(1, 3)
    assert view.capacity == cache.capacity
    for part, whole in zip(view.storage, cache.storage, strict=True):
        assert part.data_ptr() == whole[1].data_ptr() and part.is_contiguous()
    before = [store.clone() for store in cache.storage]
    cache.copy(0, 2, 4)
    for store, old in zip(cache.storage, before, strict=True):
        assert torch.equal(store[2, :4], old[0, :4]) and torch.equal(store[2, 4:], old[2, 4:])
        assert torch.equal(store[:2], old[:2])
    cache.erase(1)
    assert all(store[1].abs().sum() == 0 < store[0].abs().sum() for store in cache.storage)


V = 60
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # tied, random models say the same token over and over
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "layer_types": MIXED}


_LLAMA4 = {**GROUPED, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 6} | {
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED}
ARCHITECTURES: dict[str, tuple[type, Callable[..., Any], dict[str, Any]]] = {
    "Llama": (tf.LlamaForCausalLM, tf.LlamaConfig, GROUPED),
    "Mistral": (tf.MistralForCausalLM, tf.MistralConfig, GROUPED | {"sliding_window": 6}),
    "Qwen2 sliding": (tf.Qwen2ForCausalLM, tf.Qwen2Config, GROUPED | _SLIDING),
    "Gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, GEMMA),
    "Gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, GEMMA),
    "Gemma3 all sliding": (
        *(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig),
        GEMMA | {"layer_types": ["sliding_attention"] * 3},
    ),
    "GPT-2": (tf.GPT2LMHeadModel, tf.GPT2Config, SHAPE | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "OPT": (tf.OPTForCausalLM, tf.OPTConfig, SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "Llama 4": (tf.Llama4ForCausalLM, tf.Llama4TextConfig, _LLAMA4),
}


def _model(name: str, seed: int = 3) -> tf.PreTrainedModel:
    model_class, make_config, options = ARCHITECTURES[name]
    return random_model(model_class, make_config(**options), seed=seed)


def _distance(lm: LM, num_tokens: int = 40) -> float:
    ids = torch.randint(V, (3, num_tokens), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        full: Tensor = lm.model(ids).logits
    cache, done, distance = lm.new_cache(3, num_tokens), torch.zeros(3, dtype=torch.long), 0.0
    for widths in torch.tensor([[5, 1, 8], [1, 0, 2], [0, 4, 1], [3, 3, 3], [7, 1, 0], [9, 9, 9], [2, 20, 2]]):
        offsets = torch.arange(int(widths.max()))
        positions = torch.where(offsets < widths[:, None], done[:, None] + offsets, -1)
        logits = lm.forward(
            ids.gather(1, positions.clamp_min(0)), positions, cache, lm.view_len(int(positions.max()) + 1, cache)
        )
        is_there = positions >= 0
        rows = full[torch.arange(3)[:, None], positions.clamp_min(0)]
        distance = max(distance, (logits - rows)[is_there].abs().max().item())
        done = done + widths
    assert done.max() == 38
    return distance


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_blocks_equal_one_full_forward(name: str) -> None:
    """To 1e-10; with one place more or less in the window they differ. (Llama 4 rotates in float32.)"""
    lm = as_lm(_model(name))
    assert _distance(lm) < (1e-5 if name == "Llama 4" else 1e-10)
    for field, size in (("window", 5), ("window", 7), ("chunk", 5), ("chunk", 7)):
        if getattr(lm.backend.visibility, field) == 6:
            lm.backend.visibility, kept = replace(lm.backend.visibility, **{field: size}), lm.backend.visibility
            assert _distance(lm) > 1e-3
            lm.backend.visibility = kept


def _large() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1024, 768), nn.Linear(768, 768), nn.BatchNorm1d(768), nn.Linear(768, 1024))
    model[3].weight = model[0].weight
    return model


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in model.state_dict(keep_vars=True).items()}


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such pages")
def test_weights_in_huge_pages_are_the_same_numbers() -> None:
    """Each in a storage of its own; layers that share a weight still do. Views of common memory stay where they are."""
    model, both = _large(), torch.randn(2, 768, 768)
    model.extend((nn.Linear(768, 768), nn.Linear(768, 768)))
    model[4].weight, model[5].weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters, addresses = dict(model.named_parameters()), _addresses(model)
    move_weights(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(new is parameters[name] for name, new in model.named_parameters())
    after = _addresses(model)
    assert {name for name in after if after[name] == addresses[name]} == {"4.weight", "5.weight"}
    assert model[3].weight is model[0].weight
    moved = [weight for name, weight in parameters.items() if after[name] != addresses[name]]
    assert len({weight.untyped_storage().data_ptr() for weight in moved}) == len(moved)


def test_a_long_prompt_is_fed_in_forwards_that_see_all_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 tokens, which is the step of views."""
    monkeypatch.setattr(lm_module, "PREFILL_TOKENS", 64)
    lm = as_lm(tiny_llama())
    ids = torch.randint(60, (1, 200), generator=torch.Generator().manual_seed(0))
    cache = lm.new_cache(1, 200)
    lm.prefill(ids, torch.tensor([0]), torch.tensor([199]), cache, latest=0, num_columns=199)
    found = lm.forward(ids[:, 199:], torch.tensor([[199]]), cache, lm.view_len(200, cache))[0, -1]
    torch.testing.assert_close(found, lm.model(ids).logits[0, -1], rtol=0, atol=1e-10)
