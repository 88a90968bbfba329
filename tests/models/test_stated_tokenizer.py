"""Tokenizers of folders: the text goes the way that their own files state."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import golden.vocabularies as golden
from outrider.models.gguf.splitters import SPLITTERS
from outrider.models.reading import as_stated, load_tokenizer
from outrider.models.registry import ModelSpec

_TEXTS = ("Steps:\n\n1.", "2023 a  1", "a<tool>b <tool> c", *(text for text in golden.PAGE if "<|" not in text))


def _backend(splitter: str) -> Tokenizer:
    """A byte-level BPE whose merges cross the bounds of words."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<unk>", "<s>", "</s>", "<pad>"]
    trainer = BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(golden.lessons() * 2, trainer)
    steps: list[Any] = [pre_tokenizers.Split(Regex(step), "isolated") for step in SPLITTERS[splitter].steps]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, tokenizer.pre_tokenizer])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def _saved(folder: Path, backend: Tokenizer, model_type: str, kind: str | None, **config: Any) -> ModelSpec:
    """A folder of a tokenizer, whose class is another one."""
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    document = {**json.loads(file.read_text()), "tokenizer_class": kind, "chat_template": "{{ messages }}", **config}
    file.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return ModelSpec(name="folder", path=folder)


def _ids(tokenizer: Any, text: str) -> list[int]:
    if isinstance(tokenizer, Tokenizer):
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize(
    ("model_type", "kind", "splitter"),
    [
        ("llama", "GPT2Tokenizer", "smollm"),
        ("qwen2", "Qwen2Tokenizer", "llama-bpe"),
        ("qwen3", None, "smollm"),
    ],
)
def test_the_splitter_of_the_file_is_used(tmp_path: Path, model_type: str, kind: str | None, splitter: str) -> None:
    spec = _saved(tmp_path, _backend(splitter), model_type, kind)
    stated, by_class = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), AutoTokenizer.from_pretrained(tmp_path)
    assert any(_ids(by_class, text) != _ids(stated, text) for text in _TEXTS)
    tokenizer = load_tokenizer(spec)
    for text in _TEXTS:
        ids = _ids(tokenizer, text)
        assert ids == _ids(stated, text), text
        assert tokenizer.decode(ids) == stated.decode(ids, skip_special_tokens=False)
    assert (tokenizer.chat_template, tokenizer.eos_token) == ("{{ messages }}", "<|endoftext|>")


@pytest.mark.parametrize(("kind", "adds"), [("GPT2Tokenizer", True), ("PreTrainedTokenizerFast", False)])
def test_a_switch_of_the_configuration_is_stated_too(tmp_path: Path, kind: str, adds: bool) -> None:
    """It is applied to the file's splitter, as Transformers 4 did."""
    backend = _backend("gpt-2")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=not adds)
    tokenizer = load_tokenizer(_saved(tmp_path, backend, "gpt2", kind, add_prefix_space=adds))
    assert (_ids(tokenizer, "Mix") == _ids(tokenizer, " Mix")) == adds


def _by_letters() -> Tokenizer:
    """A vocabulary like that of SentencePiece, which puts a space before each text between added tokens."""
    letters = sorted({letter for text in golden.PAGE for letter in text} | {"▁"})
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "<|endoftext|>", *letters, "▁a"])}
    tokenizer = Tokenizer(BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(joined)
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("adds", [None, True, False])
def test_bos_and_spaces_are_those_of_the_file(tmp_path: Path, adds: bool | None) -> None:
    """Transformers 5 prefers the file's template to the configuration. Llama's class puts a space before the first text
    alone."""
    spec = _saved(tmp_path, _by_letters(), "llama", "LlamaTokenizer", bos_token="<s>", add_bos_token=adds)
    by_class, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(spec)
    assert tokenizer("a").input_ids == by_class("a").input_ids
    assert by_class.tokenize("x</s>a") == ["▁", "x", "</s>", "a"]
    assert tokenizer.tokenize("x</s>a") == ["▁", "x", "</s>", "▁a"]


def test_bos_that_a_class_has_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _saved(tmp_path, _by_letters(), "llama", "LlamaTokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B", [])
    assert tokenizer("a").input_ids[0] != 1
    assert as_stated(tokenizer, str(tmp_path))("a").input_ids[0] == 1
    assert caplog.messages[-1] == f"{tmp_path}: texts begin and end as in tokenizer.json"
