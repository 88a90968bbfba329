"""Which known models belong together, and which pairs fit into a memory."""

import pytest

from outrider.errors import OptionError
from outrider.models.memory import sizes_of
from outrider.models.pairs import as_known, drafts_of, fitting_pairs, memory_of
from outrider.models.registry import ModelSpec, known_models, resolve

GIB = 2**30
WORK = {"dtype": "bfloat16", "context": 2048, "batch_size": 1}


def names_for(target: str) -> list[str]:
    return [draft.name for draft in drafts_of(resolve(target), known_models())]


def test_drafts_are_heads_and_smaller_models_of_the_family() -> None:
    """A chat model drafts for chat models alone."""
    assert names_for("fable") == ["fable-draft"]
    assert names_for("llama-3.1-8b") == ["llama-3.2-1b"]  # 3B is 0.4 of it or more, the head was trained for chats
    assert names_for("llama-3.1-8b-instruct") == ["llama-3.1-8b-eagle3", "llama-3.2-1b-instruct"]
    assert names_for("llama-30b") == ["llama-7b"]
    assert names_for("qwen3-8b") == ["qwen3-8b-dflash", "qwen3-8b-eagle3", "qwen3-0.6b", "qwen3-1.7b"]
    assert names_for("gemma-4-e2b-it") == ["gemma-4-e2b-assistant"]
    assert names_for("fable-draft") == names_for("mistral-7b-v0.3") == []
    known = known_models()
    assert {spec.head_of for spec in known.values()} - {None} <= known.keys()
    for target in known.values():
        for draft in drafts_of(target, known):
            assert draft.head_of is not None or draft.is_chat == target.is_chat


def test_a_model_is_known_by_its_hub_id() -> None:
    assert as_known(ModelSpec("mine", hub="qwen/qwen3-8b"), known_models()).name == "qwen3-8b"


def test_embeddings_are_counted_in_files_and_stated_otherwise() -> None:
    fable = sizes_of(resolve("fable"))
    assert fable is not None and fable.num_embedding_params == 4096 * 256  # tied
    llama = sizes_of(resolve("llama-3.1-8b-instruct"))
    assert llama == sizes_of(resolve("llama-3.1-8b")) and llama is not None
    assert llama.num_embedding_params == 2 * 128256 * 4096
    quantized = llama.quantized_bytes("bfloat16", 8)
    assert quantized == 2 * llama.num_embedding_params + (llama.num_params - llama.num_embedding_params)


def test_fewer_bits_where_the_memory_is_smaller() -> None:
    """Weights and caches of both, in nine tenths of the memory."""
    target, known = resolve("qwen3-8b"), known_models()
    forms = {}
    for gib in (24, 16, 10, 4):
        pairs = fitting_pairs(target, known, gib * GIB, **WORK)
        assert all(pair.num_bytes <= 0.9 * gib * GIB for pair in pairs)
        forms[gib] = {pair.form for pair in pairs}
    assert forms == {24: {"bfloat16"}, 16: {"int8"}, 10: {"nf4"}, 4: set()}
    small, _ = fitting_pairs(target, known, 24 * GIB, **WORK)
    sizes, own = sizes_of(target), sizes_of(small.draft)
    assert sizes is not None and own is not None
    cache = sizes.cache_bytes("bfloat16", 2048, 1) + own.cache_bytes("bfloat16", 2048, 1)
    assert small.num_bytes == 2 * (sizes.num_params + own.num_params) + cache


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("24GiB", 24 * GIB), ("24 gb", 24 * 10**9), ("1.5G", 3 * GIB // 2), ("800MB", 800 * 10**6)]
)
def test_memory_in_words(text: str, num_bytes: int) -> None:
    assert memory_of(text) == num_bytes


@pytest.mark.parametrize("text", ["24", "0GiB", "-3GiB"])
def test_memory_that_makes_no_sense(text: str) -> None:
    with pytest.raises(OptionError, match="24GiB"):
        memory_of(text)
