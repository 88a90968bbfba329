"""Architectures: random models of many kinds say through the loop what Hugging Face's `generate` says.

Weights are large, so that attention matters and logits are far from ties; everything is in float64. Where there is a
sliding window it is shorter than the text.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.model import model_drafter
from outrider.errors import UnsupportedModel
from outrider.models.loading import Checkpoint, build_lm
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK
from toys import as_lm, perturbed, random_model, request, run, tokens

V = 60
NUM_TOKENS = 24
PROMPTS = [(5, 6, 7, 8, 9, 5, 6, 7), (1,), (2, 3, 4) * 5]
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


@dataclass(frozen=True)
class Architecture:
    model_class: type
    make_config: Callable[..., Any]
    options: dict[str, Any]


ARCHITECTURES = {
    "Llama": Architecture(tf.LlamaForCausalLM, tf.LlamaConfig, GROUPED),
    "Mistral": Architecture(tf.MistralForCausalLM, tf.MistralConfig, {**GROUPED, "sliding_window": 6}),
    "Qwen2 sliding": Architecture(
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config,
        {**GROUPED, "use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED},
    ),
    "Qwen3": Architecture(tf.Qwen3ForCausalLM, tf.Qwen3Config, {**GROUPED, "head_dim": 8}),
    "Gemma2": Architecture(tf.Gemma2ForCausalLM, tf.Gemma2Config, GEMMA),
    "Gemma3": Architecture(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, GEMMA),
    "Gemma3 all sliding": Architecture(
        tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, {**GEMMA, "layer_types": ["sliding_attention"] * 3}
    ),
    "GPT-2": Architecture(
        tf.GPT2LMHeadModel,
        tf.GPT2Config,
        {**SHAPE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    ),
    "GPT-NeoX": Architecture(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, SHAPE),
    "OPT": Architecture(
        tf.OPTForCausalLM, tf.OPTConfig, {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}
    ),
    "Llama 4": Architecture(
        tf.Llama4ForCausalLM,
        tf.Llama4TextConfig,
        {
            **GROUPED,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 6,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        },
    ),
}


def _model(name: str) -> tf.PreTrainedModel:
    one = ARCHITECTURES[name]
    return random_model(one.model_class, one.make_config(**one.options), seed=3)


def _generated(model: tf.PreTrainedModel, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """Hugging Face's greedy text, with the cache that it takes by default."""
    ids = torch.tensor([prompt])
    text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    return tuple(text[0, len(prompt) :].tolist())


@pytest.mark.parametrize("name", ["Gemma3", "GPT-2", "Llama 4"])
def test_greedy_text_is_that_of_generate(name: str) -> None:
    """Plain, and with a draft that is often right, in a batch of ragged prompts."""
    model = _model(name)
    target, draft = as_lm(model), model_drafter(as_lm(perturbed(model, 0.05), "draft"))
    expected = [_generated(model, prompt) for prompt in PROMPTS]
    assert sum(len(set(text)) for text in expected) > 20, "a text this dull would show no error"
    requests = [request(prompt, temperature=0.0, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]
    assert tokens(target, NO_DRAFTER, requests, BLOCK, 0) == expected
    outputs = run(target, draft, requests, BLOCK, 3)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.stats.num_accepted_draft_tokens for output in outputs) > 0


def test_views_end_with_the_context() -> None:
    """GPT-Neo has a table of its 100 positions, and no view that is rounded up beyond them."""
    options = {**SHAPE, "max_position_embeddings": 100, "attention_types": [[["global", "local", "global"], 1]]}
    model = random_model(tf.GPTNeoForCausalLM, tf.GPTNeoConfig(**options), seed=3)
    target, draft = as_lm(model, context_len=100), as_lm(perturbed(model, 0.05), "draft", context_len=100)
    prompt = PROMPTS[2]
    expected = _generated(model, prompt, 100 - len(prompt))
    one = request(prompt, temperature=0.0, max_new_tokens=200)
    for drafter in (NO_DRAFTER, model_drafter(draft)):
        output = run(target, drafter, [one], BLOCK, 3)[0]
        assert output.token_ids == expected
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


class Wrapper(nn.Module):
    """A model inside another module, as PEFT and `torch.compile` put it."""

    def __init__(self, inner: tf.PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)


def test_a_wrapped_model_keeps_its_window() -> None:
    assert _distance(LM(Wrapper(_model("Gemma3")), name="wrapped", vocab_size=V, context_len=256)) < 1e-10


# Windows that LM cannot read off the configuration: one in the modelling code alone, one in the configuration alone.
ODD_WINDOWS = {
    "GPT-Neo, whose local layers have a window of their own": Architecture(
        tf.GPTNeoForCausalLM,
        tf.GPTNeoConfig,
        {
            **{key: value for key, value in SHAPE.items() if key not in ("num_hidden_layers", "num_attention_heads")},
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 100,
        },
    ),
    "Llama, with a window in its configuration that it does not use": Architecture(
        tf.LlamaForCausalLM, tf.LlamaConfig, {**GROUPED, "sliding_window": 100}
    ),
}


@pytest.mark.parametrize("name", ODD_WINDOWS)
def test_a_text_beyond_the_window_is_right_or_the_model_refused(name: str) -> None:
    """The window is longer than the probe at loading, as real ones are; 200 tokens, four at a time."""
    one = ODD_WINDOWS[name]
    model = random_model(one.model_class, one.make_config(**one.options), seed=0)
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
