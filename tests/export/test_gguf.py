"""GGUF files, read back by Outrider and by llama.cpp: the same model, the same tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

import outrider
from gguf_models import IDS, PLACES
from outrider.errors import UnsupportedModel
from outrider.export.gguf import obstacle, write_gguf
from outrider.models.registry import ModelSpec
from pairs import embedded, random_llama, save, zoo
from toys import random_model

TEXT = "Once upon a time there were 1234 kings, weren't there?  They'D said:\n\n \tnothing...  at  ALL"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, biased, scaled": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        False,
    ),
    **{
        name: (
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(regex), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
            name == "llama-bpe",
        )
        for regex, name in {WORDS + r"\p{N}{1,3}" + REST: "llama-bpe", WORDS + r"\p{N}" + REST: "qwen2"}.items()
    },
}


def _tokenizer(split: str = "gpt-2") -> tf.PreTrainedTokenizerFast:
    """A small byte-level BPE, trained on the text that is tokenized here."""
    steps, ignores_merges = SPLITS[split]
    tokenizer = Tokenizer(BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = steps
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT, "12 123 12345 there's said nothing"], trainer)
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _saved(folder: Path, kind: str, split: str = "gpt-2") -> ModelSpec:
    """A random model in float32, with a few rows of the embedding that no token has."""
    tokenizer = _tokenizer(split)
    name, more = MODELS[kind]
    config = getattr(tf, f"{name}Config")(vocab_size=len(tokenizer) + 3, **SIZES | more)
    model = random_model(getattr(tf, f"{name}ForCausalLM"), config, 3).float()
    save(folder, model, tokenizer)
    return ModelSpec(name=kind, path=folder)


@pytest.mark.parametrize(("kind", "split"), [*zip(MODELS, SPLITS, strict=False), ("qwen3", "gpt-2")])
def test_what_is_written_is_read_as_the_same_model(tmp_path: Path, kind: str, split: str) -> None:
    """Llama 3's scaling too, beyond the length that it begins at; the same tokens, and ends."""
    spec = _saved(tmp_path / "model", kind, split)
    file = tmp_path / "model.gguf"
    write_gguf(spec, file, torch.float32)
    folder, read = outrider.load(spec.path), outrider.load(file)
    ids = torch.randint(folder.target.vocab_size, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want, found = (one.target.model(ids).logits for one in (folder, read))
    torch.testing.assert_close(found, want, rtol=0.0, atol=2e-5 * float(want.std()))
    assert read.encode(TEXT) == folder.encode(TEXT)
    assert read.eos_ids >= folder.eos_ids  # and tokens that end texts by their name


@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "split"), [*zip(MODELS, SPLITS, strict=False), ("qwen3", "gpt-2")])
def test_llama_reads_the_same_model(tmp_path: Path, kind: str, split: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs pip install llama-cpp-python==0.3.36")
    from golden.make_gguf_logits import logits_of

    spec = _saved(tmp_path / "model", kind, split)
    file = tmp_path / "model.gguf"
    write_gguf(spec, file, torch.float32)
    model = tf.AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32)
    with torch.inference_mode():
        want = model(torch.tensor([IDS])).logits[0, list(PLACES)]
    torch.testing.assert_close(torch.tensor(logits_of(file)), want, rtol=0.0, atol=1e-3 * float(want.std()))
    vocabulary = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    for text in (TEXT, f"{TEXT}<|end|>{TEXT}"):
        assert vocabulary.tokenize(text.encode(), special=True) == _tokenizer(split)(text).input_ids


def test_the_embedded_pair_in_its_own_type(tmp_path: Path) -> None:
    """bfloat16, as stored; what comes out is compared as text, from text."""
    file = tmp_path / "fable.gguf"
    write_gguf(ModelSpec(name="fable", path=zoo("fable")), file)
    assert {tensor.tensor_type.name for tensor in GGUFReader(file).tensors} == {"BF16", "F32"}
    assert file.stat().st_size < 1.05 * (zoo("fable") / "model.safetensors").stat().st_size
    got, want = (
        one.plain().generate("Once upon a time", max_new_tokens=12, temperature=0.0)
        for one in (outrider.load(file), embedded())
    )
    assert got[0].text == want[0].text


def test_eight_bits(tmp_path: Path) -> None:
    """Q8_0: each number within half a step, 1/127 of the largest of its block, which is rounded to float16."""
    file = tmp_path / "fable.gguf"
    write_gguf(ModelSpec(name="fable", path=zoo("fable")), file, torch.int8)
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"Q8_0", "F32"}
    got = torch.tensor(dequantize(tensors["blk.0.ffn_down.weight"].data, GGMLQuantizationType.Q8_0))
    want = embedded().target.model.model.layers[0].mlp.down_proj.weight.detach()
    blocks = want.view(len(want), -1, 32)
    bound = 0.57 * blocks.abs().amax(dim=-1, keepdim=True) / 127
    assert ((got.view_as(blocks) - blocks).abs() <= bound).all()


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    spec = _saved(tmp_path / "model", "llama")
    assert obstacle(spec) is None
    config = json.loads((tmp_path / "model" / "config.json").read_text())

    def with_config(**changes: Any) -> str | None:
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
        return obstacle(spec)

    assert "gelu" in str(with_config(hidden_act="gelu"))
    assert "GemmaForCausalLM is not" in str(with_config(architectures=["GemmaForCausalLM"]))
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert "linear" in str(with_config(rope_parameters=rope))
    assert with_config() is None
    assert obstacle(replace(spec, path=None, hub="org/model")) == "it is on the hub"
    words = ModelSpec(name="words", path=save(tmp_path / "words", random_llama()))
    assert "pre-tokenizer has no known name" in str(obstacle(words))
    with pytest.raises(UnsupportedModel, match="use llama.cpp's converter"):
        write_gguf(words, tmp_path / "words.gguf")
    assert not list(tmp_path.glob("*.gguf*"))
