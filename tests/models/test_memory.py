"""What a model needs, told from its files, is what the loaded model takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from outrider.models.memory import BYTES_PER_NUMBER, sizes_of
from outrider.models.registry import ModelSpec, known_models, resolve
from outrider.runtime.lm import LM
from outrider.runtime.modules import cache_argument
from pairs import random_llama, save
from toys import random_model


def cache_bytes(model: Any, num_rows: int, num_tokens: int) -> int:
    """Bytes that the cache of rows of tokens takes, and that the model writes into it."""
    lm = LM(model, name="model", vocab_size=2, context_len=num_tokens)
    cache = lm.new_cache(num_rows, num_tokens)
    positions = torch.arange(num_tokens).expand(num_rows, -1)
    cache.at(positions, num_tokens, is_single=False)
    with torch.inference_mode():
        model(
            input_ids=positions % 7, position_ids=positions, use_cache=True, **{cache_argument(model): cache.argument}
        )
    tensors = [tensor for layer in cache.argument.layers for tensor in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def tiny_models() -> dict[str, Any]:
    qwen3 = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,  # not hidden_size / num_attention_heads
        max_position_embeddings=40,
    )
    gpt2 = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=56)
    return {
        "llama": random_llama(),
        "qwen3": random_model(Qwen3ForCausalLM, qwen3, 0),
        "gpt2": random_model(GPT2LMHeadModel, gpt2, 0),
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_folder_takes_what_is_stated(tmp_path: Path, kind: str) -> None:
    """With grouped heads, other names of sizes, and weights in several files."""
    model = tiny_models()[kind]
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    sizes = sizes_of(ModelSpec(name="tiny", path=tmp_path))
    assert sizes is not None
    assert sizes.num_params == sum(p.numel() for p in model.parameters())
    assert sizes.cache_bytes("float64", 24, 2) == cache_bytes(model, 2, 24)
    assert sizes.context_len == model.config.max_position_embeddings
    for dtype, num_bytes in BYTES_PER_NUMBER.items():
        assert sizes.weights_bytes(dtype) == num_bytes * sizes.num_params
        assert getattr(torch, dtype).itemsize == num_bytes


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
def test_weights_that_are_there_twice_count_once(tmp_path: Path, max_shard_size: str) -> None:
    """In another type, or for other programs."""
    model = random_llama()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    want = sizes_of(ModelSpec(name="tiny", path=tmp_path))
    for name in ("model.fp16", "consolidated"):
        save_file({key: one.half() for key, one in model.state_dict().items()}, tmp_path / f"{name}.safetensors")
    assert sizes_of(ModelSpec(name="tiny", path=tmp_path)) == want is not None


def test_models_of_the_hub_have_stated_sizes() -> None:
    """Whole, or none; and known facts: Llama 7B has 2 * 32 * 32 * 128 numbers of cache for each token."""
    for spec in known_models().values():
        assert (sizes_of(spec) is None) == (spec.path is None and spec.num_params is None), spec.name
    llama = sizes_of(resolve("llama-7b"))
    assert llama is not None
    assert llama.cache_bytes("float16", 1, 1) == 2 * 32 * 32 * 128 * 2 * 65
    assert llama.cache_bytes("float16", 2048, 2, is_prepared=True) == 2 * 32 * 32 * 128 * 2 * 2049 * 2
    assert llama.weights_bytes("float16") == 2 * 6_738_415_616
    assert sizes_of(ModelSpec(name="a", hub="x/y", num_params=7)) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", b"{"),
        ("config.json", b'{"num_attention_heads": 4, "hidden_size": 32}'),
        ("model.safetensors", b"\x00\x01"),
        ("model.safetensors", None),
    ],
)
def test_sizes_that_cannot_be_told_are_none(tmp_path: Path, file: str, content: bytes | None) -> None:
    """Rather than zero bytes."""
    folder = save(tmp_path, random_llama())
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert sizes_of(ModelSpec(name="tiny", path=folder)) is None
