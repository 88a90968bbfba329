"""GGUF files, read back by llama.cpp (its Python package xllamacpp): the same tokens, the same text."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import outrider
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
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, tied, biased, scaled": (
        LlamaForCausalLM,
        LlamaConfig,
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24}),
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


def _tokenizer(split: str = "gpt-2") -> PreTrainedTokenizerFast:
    """A small byte-level BPE, trained on the text that is tokenized here."""
    steps, ignores_merges = SPLITS[split]
    tokenizer = Tokenizer(BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = steps
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT, "12 123 12345 there's said nothing"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _saved(folder: Path, kind: str, split: str = "gpt-2") -> ModelSpec:
    """A random model in float32, with a few rows of the embedding that no token has."""
    tokenizer = _tokenizer(split)
    model_class, config_class, more = MODELS[kind]
    config = config_class(vocab_size=len(tokenizer) + 3, **SIZES | more)
    model = random_model(model_class, config, 3).float()
    save(folder, model, tokenizer)
    return ModelSpec(name=kind, path=folder)


SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def served(file: Path) -> Iterator[Any]:
    """Posts to a server of llama.cpp, with a cache in float32."""
    pytest.importorskip("xllamacpp", reason="needs pip install xllamacpp")
    command = [sys.executable, "-c", SERVER, str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        address = next(line for line in process.stdout if line.startswith("http")).strip()

        def post(path: str, **body: Any) -> Any:
            with urllib.request.urlopen(address + path, json.dumps(body).encode(), timeout=60) as response:
                return json.load(response)

        try:
            yield post
        finally:
            process.kill()


def _greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """By Transformers, up to the first token that is not clearly ahead: another order of sums may change that one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.inference_mode():
            best = model(torch.tensor([ids])).logits[0, -1, 1:].topk(2)  # without the end token
        if best.values[0] - best.values[1] < 1e-3:
            break
        ids.append(1 + int(best.indices[0]))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_tokens_agree(tmp_path: Path, kind: str) -> None:
    spec = _saved(tmp_path / "model", kind)
    write_gguf(spec, tmp_path / "model.gguf")
    prompt = list(range(40, 110, 3)) * 4  # beyond the scaled rotary embedding's first context
    want = _greedy(tmp_path / "model", prompt, 24)
    assert len(want) > 8
    with served(tmp_path / "model.gguf") as post:
        options = {"n_predict": len(want), "temperature": 0, "return_tokens": True, "ignore_eos": True}
        got = post("/completion", prompt=prompt, **options)["tokens"]
    assert got == want


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_written_is_read_as_the_same_model(tmp_path: Path, kind: str) -> None:
    """Llama 3's scaling too, beyond the length that it begins at; the same tokens, and ends."""
    spec = _saved(tmp_path / "model", kind, "smollm")
    file = tmp_path / "model.gguf"
    write_gguf(spec, file, torch.float32)
    folder, read = outrider.load(spec.path), outrider.load(file)
    ids = torch.randint(folder.target.vocab_size, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want, found = (one.target.model(ids).logits for one in (folder, read))
    torch.testing.assert_close(found, want, rtol=0.0, atol=2e-5 * float(want.std()))
    assert read.encode(TEXT) == folder.encode(TEXT)
    assert read.eos_ids >= folder.eos_ids  # and tokens that end texts by their name


def test_the_embedded_pair_in_its_own_type(tmp_path: Path) -> None:
    """bfloat16, as stored; what comes out is compared as text, from text."""
    spec = ModelSpec(name="fable", path=zoo("fable"))
    file = tmp_path / "fable.gguf"
    write_gguf(spec, file)
    assert {tensor.tensor_type.name for tensor in GGUFReader(file).tensors} == {"BF16", "F32"}
    assert file.stat().st_size < 1.05 * (zoo("fable") / "model.safetensors").stat().st_size
    with served(file) as post:
        got = post("/completion", prompt="Once upon a time", n_predict=12, temperature=0)["content"]
    [want] = embedded().plain().generate("Once upon a time", max_new_tokens=12, temperature=0.0)
    assert got == want.text


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


@pytest.mark.parametrize("split", SPLITS)
def test_text_is_split_alike(tmp_path: Path, split: str) -> None:
    spec = _saved(tmp_path / "model", "llama", split)
    write_gguf(spec, tmp_path / "model.gguf", torch.float16)
    tokenizer = _tokenizer(split)
    with served(tmp_path / "model.gguf") as post:
        for text in (TEXT, f"{TEXT}<|end|>{TEXT}"):
            found = post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
            assert found == tokenizer(text).input_ids


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
