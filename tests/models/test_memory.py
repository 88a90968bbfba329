"""Sizes of models, told from their files or stated; and which known models draft for a target."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from outrider.models.memory import BYTES_PER_NUMBER, sizes_of
from outrider.models.pairs import drafts_of
from outrider.models.registry import ModelSpec, known_models, resolve
from pairs import random_llama, save
from toys import random_model


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_folder_has_the_sizes_of_its_model(tmp_path: Path, kind: str) -> None:
    """With other names of fields, and weights in several files. Weights that are there twice (in another type, for
    other programs) count once."""
    gpt2 = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=56)
    model = random_llama() if kind == "llama" else random_model(GPT2LMHeadModel, gpt2, 0)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for name in ("model.fp16", "consolidated"):
        save_file({"w": torch.zeros(9)}, tmp_path / f"{name}.safetensors")
    sizes = sizes_of(ModelSpec(name="tiny", path=tmp_path))
    assert sizes is not None and sizes.context_len == model.config.max_position_embeddings
    assert sizes.num_params == sum(p.numel() for p in model.parameters())
    for dtype, num_bytes in BYTES_PER_NUMBER.items():
        assert sizes.weights_bytes(dtype) == num_bytes * sizes.num_params
        assert getattr(torch, dtype).itemsize == num_bytes


def test_models_of_the_hub_have_stated_sizes() -> None:
    for spec in known_models().values():
        assert (sizes_of(spec) is None) == (spec.path is None and spec.num_params is None), spec.name
    llama = sizes_of(resolve("llama-7b"))
    assert llama is not None and llama.weights_bytes("float16") == 2 * 6_738_415_616


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", b"{"),
        ("model.safetensors", b"\x00\x01"),
        ("model.safetensors", None),
    ],
)
def test_sizes_of_damaged_folders_are_none_rather_than_zero(tmp_path: Path, file: str, content: bytes | None) -> None:
    folder = save(tmp_path, random_llama())
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert sizes_of(ModelSpec(name="tiny", path=folder)) is None


def test_drafts_are_heads_and_smaller_models_of_the_family() -> None:
    """A chat model drafts for chat models alone. A target is known by its hub id, too."""

    def names_for(target: str) -> list[str]:
        return [draft.name for draft in drafts_of(resolve(target), known_models())]

    assert names_for("fable") == ["fable-draft"]
    assert names_for("llama-3.1-8b") == ["llama-3.2-1b"]  # 3B is 0.4 of it or more, the head was trained for chats
    assert names_for("llama-3.1-8b-instruct") == ["llama-3.1-8b-eagle3", "llama-3.2-1b-instruct"]
    assert names_for("qwen3-8b") == ["qwen3-8b-dflash", "qwen3-8b-eagle3", "qwen3-0.6b", "qwen3-1.7b"]
    assert names_for("qwen/qwen3-8b") == names_for("qwen3-8b")
    assert names_for("fable-draft") == names_for("mistral-7b-v0.3") == []
    known = known_models()
    assert {spec.head_of for spec in known.values()} - {None} <= known.keys()
    for target in known.values():
        for draft in drafts_of(target, known):
            assert draft.head_of is not None or draft.is_chat == target.is_chat
