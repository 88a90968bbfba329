"""Tokenizers of GGUF files, against llama.cpp's tokens (golden/vocabularies.json); and of folders, as they state."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import golden.vocabularies as golden
import outrider
from gguf_models import CASES, write_case
from outrider.errors import ModelCorrupt, OutriderError, UnsupportedModel
from outrider.models.gguf.splitters import SPLITTERS
from outrider.models.gguf.vocabulary import end_ids, gguf_tokenizer
from outrider.models.reading import load_tokenizer
from outrider.models.registry import ModelSpec
from outrider.models.tokenizers import restate

_STATED = golden.stated()
_CASES = golden.cases(_STATED["merges"])
_GPT2, _SCORES = _CASES["splitter gpt-2"], _CASES["scores"]


def _with(metadata: dict[str, Any], **values: Any) -> dict[str, Any]:
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("case", _CASES)
def test_tokens_are_those_of_llama(case: str) -> None:
    assert tuple(_STATED["page"]) == golden.PAGE and _STATED["equal"].keys() == _CASES.keys()
    tokenizer = gguf_tokenizer(_CASES[case], case)
    for text, want in zip(golden.PAGE, _STATED["tokens"][_STATED["equal"][case]], strict=True):
        assert tokenizer(text).input_ids == [*map(int, want.split())], text


def test_all_ids_are_texts_again() -> None:
    for case in ("splitter smollm", "gemma4", "scores", "scores, without a space"):
        tokenizer = gguf_tokenizer(_CASES[case], case)
        for text in golden.PAGE:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", ""), (case, text)
            if "<" not in text:  # a space is put before each text between special tokens
                assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (_with(_GPT2, pre="nonsense"), UnsupportedModel, "tiny splits text by the rule 'nonsense'"),
        (_GPT2 | {"tokenizer.unheard": "of"}, UnsupportedModel, "tiny states tokenizer.unheard = 'of', which is not"),
        (_with(_GPT2, add_bos_token="false"), ModelCorrupt, "tokenizer.ggml.add_bos_token = 'false', neither true nor"),
        (_with(_GPT2, tokens=["a", "b", "a"]), ModelCorrupt, "has 3 tokens, of which only 2 differ"),
        ({key: _GPT2[key] for key in _GPT2 if "merges" not in key}, ModelCorrupt, "states no tokenizer.ggml.merges"),
        (
            {key: value for key, value in _with(_GPT2, pre="llama3").items() if "bos" not in key},
            ModelCorrupt,
            "adds BOS to texts, but states no tokenizer.ggml.bos_token_id",
        ),
    ],
)
def test_refusals_of_gguf_vocabulary(metadata: dict[str, Any], error: type[OutriderError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        gguf_tokenizer(metadata, "tiny")
    assert "\n" not in str(caught.value)


def test_roles_of_tokens() -> None:
    ids = [f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "unknown")]
    bare = {key: value for key, value in _SCORES.items() if key not in ids}
    for metadata in (bare, _with(bare, unknown_token_id=-1)):
        tokenizer = gguf_tokenizer(metadata, "tiny")
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
        assert tokenizer.pad_token is None


def test_control_tokens_and_chat_templates() -> None:
    tokenizer = gguf_tokenizer(_GPT2, "tiny")
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert special == {"<|end|>", "<|endoftext|>", "<|im_end|>"}
    ids = tokenizer("a<|im_end|><tool><|end|>b").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    assert len(tokenizer) == len(_GPT2["tokenizer.ggml.tokens"])
    key = "tokenizer.chat_template"
    named = {key: "one", f"{key}.tool_use": "two", "tokenizer.chat_templates": ["tool_use"]}
    assert gguf_tokenizer(_GPT2 | named, "tiny").chat_template == {"default": "one", "tool_use": "two"}


@pytest.mark.parametrize(
    ("tokens", "stated", "ends"),
    [
        (["<|endoftext|>", "a", "<|im_end|>"], {"eos": 0}, {0, 2}),
        (["<|endoftext|>", "a", "<|im_end|>"], {}, {0, 2}),
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1}, {1, 2}),
        (["a", "b"], {"eos": 1, "eot": 7, "eom": -1}, {1}),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos": 1}, {1, 2}),  # Harmony: a channel's end
        (["<|end|>", "<|call|>", "<|flush|>"], {"eos": 2}, {1, 2}),
        (["</s>", "<turn|>", "<|tool_response>", "<eos>"], {"eos": 3}, {1, 2, 3}),
        (["a", "<fim_pad>", "<PAD>", "<|file_sep|>", "<|repo_name|>"], {"eos": 0}, {0, 1, 3, 4}),
    ],
)
def test_gguf_end_tokens(tokens: list[str], stated: dict[str, int], ends: set[int]) -> None:
    keys: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": value for key, value in stated.items()}
    found = end_ids({"tokenizer.ggml.tokens": tokens, **keys}, stated.get("eos"), "tiny")
    assert set(found) == ends and len(found) == len(ends)
    if "eos" in stated:
        assert found[0] == stated["eos"]
    for key, wrong in (("eot_token_id", "x"), ("fim_pad_token_id", 2.5), ("eos_token_ids", ["a"])):
        with pytest.raises(ModelCorrupt, match=f"tiny states tokenizer.ggml.{key} = "):
            end_ids({"tokenizer.ggml.tokens": tokens, f"tokenizer.ggml.{key}": wrong}, None, "tiny")


def test_texts_end_at_each(tmp_path: Path) -> None:
    decoder = outrider.load(write_case(tmp_path / "tiny.gguf", CASES["llama"], keys={"tokenizer.ggml.eot_token_id": 5}))
    assert decoder.eos_ids == {2, 5}
    for end in (2, 5):
        (output,) = decoder.generate([[7, 8]], logit_bias={end: 100.0}, max_new_tokens=4)
        assert (output.finish_reason, output.token_ids) == ("eos", (end,))


_TEXTS = ("Steps:\n\n1.", "2023 a  1", "a<tool>b <tool> c", *(text for text in golden.PAGE if "<|" not in text))


def _backend(splitter: str) -> Tokenizer:
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
    ("model_type", "kind", "splitter", "differs"),
    [
        ("llama", "GPT2Tokenizer", "smollm", True),
        ("qwen3", None, "smollm", True),
        ("gemma2", "GemmaTokenizer", "llama-bpe", True),
        ("llama", "PreTrainedTokenizerFast", "llama-bpe", False),
    ],
)
def test_splitter_of_the_file(tmp_path: Path, model_type: str, kind: str | None, splitter: str, differs: bool) -> None:
    spec = _saved(tmp_path, _backend(splitter), model_type, kind)
    stated, by_class = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), AutoTokenizer.from_pretrained(tmp_path)
    assert any(_ids(by_class, text) != _ids(stated, text) for text in _TEXTS) == differs
    tokenizer = load_tokenizer(spec)
    restate(by_class, tokenizer)
    for text in _TEXTS:
        ids = _ids(tokenizer, text)
        assert ids == _ids(stated, text) == _ids(by_class, text), text
        assert tokenizer.decode(ids) == stated.decode(ids, skip_special_tokens=False)


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
def test_bos_is_as_transformers_reads_it(tmp_path: Path, adds: bool | None) -> None:
    """Transformers 5 prefers the file's template. Llama's class puts a space before the first text alone."""
    spec = _saved(tmp_path, _by_letters(), "llama", "LlamaTokenizer", bos_token="<s>", add_bos_token=adds)
    by_class, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(spec)
    assert tokenizer("a").input_ids == by_class("a").input_ids
    assert by_class.tokenize("x</s>a") == ["▁", "x", "</s>", "a"]
    assert tokenizer.convert_ids_to_tokens(_ids(tokenizer, "x</s>a")) == ["▁", "x", "</s>", "▁a"]
