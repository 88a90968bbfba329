"""Architectures: random models of many kinds say through the loop what Hugging Face's `generate` says.

Weights are large, so that attention matters and logits are far from ties; everything is in float64. Where there is a
sliding window it is shorter than the text.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.model import model_drafter
from outrider.errors import UnsupportedModel
from outrider.models.loading import Checkpoint, build_lm
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK
from toys import as_lm, perturbed, random_model, request, run

V = 60
PROMPT = (2, 3, 4) * 5
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
_NEO = {key: value for key, value in SHAPE.items() if key not in ("num_hidden_layers", "num_attention_heads")} | {
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 100,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED}
ARCHITECTURES: dict[str, tuple[type, Callable[..., Any], dict[str, Any]]] = {
    "Llama": (tf.LlamaForCausalLM, tf.LlamaConfig, GROUPED),
    "Mistral": (tf.MistralForCausalLM, tf.MistralConfig, GROUPED | {"sliding_window": 6}),
    "Qwen2 sliding": (tf.Qwen2ForCausalLM, tf.Qwen2Config, GROUPED | _SLIDING),
    "Qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, GROUPED | {"head_dim": 8}),
    "Gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, GEMMA),
    "Gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, GEMMA),
    "Gemma3 all sliding": (
        *(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig),
        GEMMA | {"layer_types": ["sliding_attention"] * 3},
    ),
    "GPT-2": (tf.GPT2LMHeadModel, tf.GPT2Config, SHAPE | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "GPT-NeoX": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, SHAPE),
    "OPT": (tf.OPTForCausalLM, tf.OPTConfig, SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "Llama 4": (tf.Llama4ForCausalLM, tf.Llama4TextConfig, _LLAMA4),
}
# Windows that LM cannot read off the configuration: one in the modelling code alone, one in the configuration alone.
ODD_WINDOWS = {
    "GPT-Neo, whose local layers have a window of their own": (tf.GPTNeoForCausalLM, tf.GPTNeoConfig, _NEO),
    "Llama, whose window is not used": (tf.LlamaForCausalLM, tf.LlamaConfig, GROUPED | {"sliding_window": 100}),
}


def _model(name: str, seed: int = 3) -> tf.PreTrainedModel:
    model_class, make_config, options = (ARCHITECTURES | ODD_WINDOWS)[name]
    return random_model(model_class, make_config(**options), seed=seed)


def test_views_end_with_the_context() -> None:
    """GPT-Neo has a table of its 100 positions, and no view that is rounded up beyond them. The text is that of Hugging
    Face's ``generate``."""
    options = {**SHAPE, "max_position_embeddings": 100, "attention_types": [[["global", "local", "global"], 1]]}
    model = random_model(tf.GPTNeoForCausalLM, tf.GPTNeoConfig(**options), seed=3)
    target, draft = as_lm(model, context_len=100), as_lm(perturbed(model, 0.05), "draft", context_len=100)
    ids = torch.tensor([PROMPT])
    text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=100 - len(PROMPT))
    one = request(PROMPT, temperature=0.0, max_new_tokens=200)
    for drafter in (NO_DRAFTER, model_drafter(draft)):
        output = run(target, drafter, [one], BLOCK, 3)[0]
        assert output.token_ids == tuple(text[0, len(PROMPT) :].tolist())
        assert drafter.name != "draft" or output.stats.num_accepted_draft_tokens > 0


def _distance(lm: LM, num_tokens: int = 40) -> float:
    """How far logits of ragged blocks are from one full forward."""
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
    """Logits to 1e-10, rows each at their own pace. That this sees a difference of one place in the window is shown
    below. (Llama 4 rotates in float32.)"""
    assert _distance(as_lm(_model(name))) < (1e-5 if name == "Llama 4" else 1e-10)


@pytest.mark.parametrize("name", ["Mistral", "Gemma3", "Llama 4"])
def test_a_window_off_by_one_shows(name: str) -> None:
    """The control: one place more or less in the mask."""
    field = "chunk" if name == "Llama 4" else "window"
    for size in (5, 7):
        lm = as_lm(_model(name))
        assert getattr(lm.visibility, field) == 6
        lm.visibility = replace(lm.visibility, **{field: size})
        assert _distance(lm) > 1e-3


@pytest.mark.parametrize("name", ODD_WINDOWS)
def test_a_text_beyond_the_window_is_right_or_the_model_refused(name: str) -> None:
    """The window is longer than the probe at loading, as real ones are; 200 tokens, four at a time."""
    model = _model(name, seed=0)
    try:
        lm = build_lm(Checkpoint("odd", model, tokenizer=None), V)
    except UnsupportedModel:
        return
    ids = torch.randint(V, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        full: Tensor = model(ids).logits
    cache = lm.new_cache(1, 200)
    for begin in range(0, 200, 4):
        positions = torch.arange(begin, begin + 4)[None]
        logits = lm.forward(ids[:, begin : begin + 4], positions, cache, lm.view_len(begin + 4, cache))
        torch.testing.assert_close(logits, full[:, begin : begin + 4], rtol=0.0, atol=1e-10)
