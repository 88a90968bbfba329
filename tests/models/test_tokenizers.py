"""Tokenizers of folders and of the hub's cache: ids, texts and roles are those that Transformers reads in the files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GemmaTokenizer, PreTrainedTokenizerFast

from outrider.errors import ModelCorrupt, ModelNotFound
from outrider.models.reading import load_tokenizer
from outrider.models.registry import ModelSpec
from outrider.models.sampling_defaults import stated_end_ids
from outrider.text.fast_tokenizer import ROLES, FastTokenizer
from pairs import byte_level_tokenizer, embedded_tokenizer, metaspace_tokenizer, word_tokenizer, zoo

SPECIAL = {"content": "<end>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
STATED = {"bos_token": "<s>", "eos_token": "<end>", "unk_token": None, "pad_token": None}
TEXTS = (
    "",
    "w1 w2<end>  x",
    "<s><mask>Grüße <tool> 世界 🙂",
    " a<end> b\n\n",
    "HELLO wörld ÀÉ 北京 don't",
    "<mask> <image>x",
)


def _bytes() -> Tokenizer:
    backend = byte_level_tokenizer(["th", "he", "in"]).backend_tokenizer
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<s>", special=True)])
    return backend


def _bert() -> Tokenizer:
    letters = sorted({letter for text in TEXTS for letter in f"{text}{text.lower()}"})
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    backend.enable_padding(pad_token="[PAD]", pad_id=3)
    backend.enable_truncation(5)
    return backend


def _words() -> Tokenizer:
    return word_tokenizer().backend_tokenizer


BARE = {"tokenizer_class": "PreTrainedTokenizerFast"}
ROLED = {"bos_token": "<s>", "eos_token": "th", "unk_token": "he", "pad_token": "in"}
GEMMA = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad")} | {"tokenizer_class": "GemmaTokenizer"}
CASES: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any], dict[str, Any]]] = {
    "bare": (_words, BARE, {}),
    "roles": (_bytes, BARE | {"eos_token": "th", "bos_token": {"__type": "AddedToken", **SPECIAL}}, {}),
    "new tokens": (
        _bytes,
        {"tokenizer_class": "TokenizersBackend", "eos_token": "<end>", "mask_token": "<mask>", "image_token": "<image>"}
        | {"added_tokens_decoder": {"300": {**SPECIAL, "content": "<mask>"}, "299": SPECIAL | {"normalized": True}}},
        {},
    ),
    "all roles": (
        lambda: metaspace_tokenizer().backend_tokenizer,
        {**STATED, "tokenizer_class": "TokenizersBackend", "add_bos_token": True},
        {},
    ),
    "extra": (_words, BARE | {"additional_special_tokens": ["<tool>", {"__type": "AddedToken", **SPECIAL}]}, {}),
    "named": (_words, BARE | {"extra_special_tokens": {"boi_token": "<image>"}, "pad_token": None}, {}),
    "named, saved": (_words, BARE | {"model_specific_special_tokens": {"image_token": "<image>"}}, {}),
    "prefix": (_bytes, BARE | {"add_prefix_space": False, "split_special_tokens": True, "eos_token": "<end>"}, {}),
    "switches of a bare class": (_bert, BARE | {"do_lower_case": False, "strip_accents": False}, {}),
    "prefix of a bare class": (_bytes, BARE | {"add_prefix_space": True}, {}),
    "prefix, Llama": (_bytes, ROLED | {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": True}, {}),
    "prefix, GPT-2": (_bytes, ROLED | {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}),
    "roles of Cohere": (_bytes, ROLED | {"tokenizer_class": "CohereTokenizerFast"}, {}),
    "roles of Gemma": (lambda: GemmaTokenizer().backend_tokenizer, GEMMA, {}),
    "former files": (
        _bytes,
        BARE | {"eos_token": "th"},
        {
            "special_tokens_map.json": {"eos_token": SPECIAL, "additional_special_tokens": ["<mask>"]},
            "added_tokens.json": {"<end>": 261, "<image>": 262},
        },
    ),
    "bert": (_bert, BARE | {"cls_token": "[CLS]"}, {}),
    "template": (_words, BARE | {"chat_template": "w1"}, {"chat_template.jinja": "w2\n"}),
    "list of templates": (_words, BARE | {"chat_template": [{"name": "default", "template": "w1"}]}, {}),
    "files of templates": (_words, BARE, {"chat_template.jinja": "ü", "additional_chat_templates/rag.jinja": "w3"}),
    "template without a default": (_words, BARE, {"additional_chat_templates/rag.jinja": "w3"}),
    "class of its own": (_bytes, {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>"}, {}),
    "no configuration": (_words, {}, {}),
}


def _saved(folder: Path, case: str) -> Path:
    make, config, files = CASES[case]
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    if config:
        files = {"tokenizer_config.json": config, **files}
    for name, content in {"config.json": {"model_type": "llama"}, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def _check(ours: Any, theirs: Any, text: str) -> None:
    for adds in (True, False):
        ids = ours(text, add_special_tokens=adds).input_ids
        assert ids == theirs(text, add_special_tokens=adds).input_ids, text
        for skips in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skips) == decoded, text


def _facts(tokenizer: Any) -> dict[str, Any]:
    names = [f"{role}{suffix}" for role in (*ROLES, "image_token", "boi_token") for suffix in ("", "_id")]
    facts = ("special_tokens_map", "all_special_tokens", "all_special_ids", "chat_template")
    added = {i: (*sorted(token.__getstate__().items()),) for i, token in tokenizer.added_tokens_decoder.items()}
    ids, tokens = tokenizer.convert_tokens_to_ids(["w1", "nothing"]), tokenizer.convert_ids_to_tokens([0, 3])
    found = {"vocabulary": tokenizer.get_vocab(), "size": len(tokenizer), "added": added, "ids": ids, "tokens": tokens}
    return found | {name: getattr(tokenizer, name, None) for name in (*names, *facts)}


@pytest.mark.parametrize("case", CASES)
def test_tokenizer_files_equal_transformers(case: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "model", case)
    ours, theirs = load_tokenizer(ModelSpec("tiny", folder)), AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, FastTokenizer) and _facts(ours) == _facts(theirs)
    for text in TEXTS:
        _check(ours, theirs, text)
    ours.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.get_vocab() == ours.get_vocab()
    assert again.chat_template == ("w1" if case == "list of templates" else ours.chat_template)
    for text in TEXTS:
        _check(ours, again, text)


@given(st.text(max_size=40) | st.lists(st.sampled_from(("Once", " upon", "<|endoftext|>", "\n", "é"))).map("".join))
def test_texts_of_the_embedded_tokenizer(text: str) -> None:
    _check(embedded_tokenizer(), _embedded_in_transformers(), text)


@cache
def _embedded_in_transformers() -> Any:
    return AutoTokenizer.from_pretrained(zoo("fable"))


def test_the_cache_of_the_hub_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a network, files that the cache does not know are named; those that exist must be there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--tiny--words"
    _saved(repository / "snapshots" / ("0" * 40), "files of templates")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    ours = load_tokenizer(ModelSpec("tiny", hub="tiny/words"))
    assert isinstance(ours, FastTokenizer) and ours.chat_template == {"default": "ü", "rag": "w3"}
    lacking = ["special_tokens_map.json", "added_tokens.json"]
    assert [record.args for record in caplog.records] == [("tiny/words", name) for name in lacking]
    spec, name = ModelSpec("tiny", hub="tiny/words"), "generation_config.json"
    assert spec.file("model.safetensors") is None and len(caplog.records) == 2
    assert spec.file(name) is None and name in caplog.text
    caplog.clear()
    (marks := repository / ".no_exist" / ("0" * 40)).mkdir(parents=True)
    for one in lacking:
        (marks / one).touch()
    load_tokenizer(spec)
    listed = [SimpleNamespace(path=name)]
    monkeypatch.setattr("huggingface_hub.get_cached_repo_tree", lambda *_, **__: listed)
    assert spec.file("adapter_config.json") is None and not caplog.records
    with pytest.raises(ModelNotFound, match=f"the file {name} of the hub model 'tiny/words' is not in the local cache"):
        stated_end_ids(spec)
    with pytest.raises(ModelNotFound, match="the hub model 'tiny/other' cannot be fetched"):
        load_tokenizer(ModelSpec("tiny", hub="tiny/other"))


def test_files_that_are_damaged_or_lack(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "model", "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (damaged := tmp_path / name).mkdir()
        shutil.copytree(folder, damaged, dirs_exist_ok=True)
        (damaged / name).write_text('{"a": ')
        with pytest.raises(ModelCorrupt, match="the tokenizer of .* cannot be loaded"):
            load_tokenizer(ModelSpec("tiny", damaged))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    tokenizer = load_tokenizer(ModelSpec("tiny", folder))
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer("ab").input_ids == [2]


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    """For texts and chats of a folder; and Jinja for chats alone."""
    folder = _saved(tmp_path / "model", "template")
    code = (
        "import sys; from pathlib import Path; from outrider.models.reading import load_tokenizer\n"
        "from outrider.models.registry import ModelSpec; from outrider.text.tokenizer import *\n"
        f"tokenizer = tokenizer_of(load_tokenizer(ModelSpec('tiny', Path({str(folder)!r}))))\n"
        "ids = encode(tokenizer, 'w1 w2'); Detokenizer(tokenizer, ids).push(ids[0]); processor_of(tokenizer)\n"
        "assert not {'jinja2', 'transformers'} & {*sys.modules}, 'text'\n"
        "encode(tokenizer, [{'role': 'user', 'content': 'w1'}]); assert 'jinja2' in sys.modules, 'chats'\n"
        "assert 'transformers' not in sys.modules, 'chats'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
