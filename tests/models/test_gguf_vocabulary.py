"""Tokenizers of GGUF files, against llama.cpp's tokens of the same vocabularies (golden/vocabularies.py)."""

from pathlib import Path
from typing import Any

import pytest

import golden.vocabularies as golden
import outrider
from gguf_models import CASES, write_case
from outrider.errors import ModelCorrupt, OutriderError, UnsupportedModel
from outrider.models.gguf.vocabulary import end_ids, gguf_tokenizer

_STATED = golden.stated()
_CASES = golden.cases(_STATED["merges"])
_GPT2, _SCORES = _CASES["splitter gpt-2"], _CASES["scores"]


def _want(case: str) -> list[list[int]]:
    return [[*map(int, line.split())] for line in _STATED["tokens"][_STATED["equal"][case]]]


def _with(metadata: dict[str, Any], **values: Any) -> dict[str, Any]:
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("case", _CASES)
def test_tokens_are_those_of_llama(case: str) -> None:
    assert tuple(_STATED["page"]) == golden.PAGE and _STATED["equal"].keys() == _CASES.keys()
    tokenizer = gguf_tokenizer(_CASES[case], case)
    for text, want in zip(golden.PAGE, _want(case), strict=True):
        assert tokenizer(text).input_ids == want, text


@pytest.mark.oracle
@pytest.mark.parametrize("case", _CASES)
def test_llama_gives_the_golden_tokens(case: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs pip install llama-cpp-python==0.3.36, which takes 12 minutes")
    from golden.make_llama import tokens_of

    assert tokens_of(_CASES[case]) == _want(case)


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
        (_with(_GPT2, model="bert"), UnsupportedModel, "kind 'bert': gpt2, llama, gemma4 are supported"),
        (_with(_GPT2, suppress_tokens=[7]), UnsupportedModel, r"tokenizer.ggml.suppress_tokens = \[7\], which is not"),
        (_GPT2 | {"tokenizer.unheard": "of"}, UnsupportedModel, "tiny states tokenizer.unheard = 'of', which is not"),
        (_with(_GPT2, tokens=["a", "b", "a"]), ModelCorrupt, "has 3 tokens, of which only 2 differ"),
        ({key: _GPT2[key] for key in _GPT2 if "merges" not in key}, ModelCorrupt, "states no tokenizer.ggml.merges"),
        ({key: _SCORES[key] for key in _SCORES if "scores" not in key}, ModelCorrupt, "no tokenizer.ggml.scores"),
        (
            {key: value for key, value in _with(_GPT2, pre="llama3").items() if "bos" not in key},
            ModelCorrupt,
            "adds BOS to texts, but states no tokenizer.ggml.bos_token_id",
        ),
    ],
)
def test_what_is_not_known_is_refused(metadata: dict[str, Any], error: type[OutriderError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        gguf_tokenizer(metadata, "tiny")
    assert "\n" not in str(caught.value)


def test_roles_of_tokens(caplog: pytest.LogCaptureFixture) -> None:
    ids = [f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "unknown")]
    bare = {key: value for key, value in _SCORES.items() if key not in ids}
    tokenizer = gguf_tokenizer(bare, "tiny")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.pad_token is None
    tokenizer = gguf_tokenizer(_with(_SCORES, padding_token_id=0, eos_token_id=10**6), "tiny")
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<unk>", "</s>")
    assert caplog.messages == ["tiny: eos_token_id = 1000000 is no token: it is left out"]
    bare = {key: value for key, value in _GPT2.items() if key not in ids}
    assert gguf_tokenizer(bare, "tiny").eos_token is None  # 11 is a letter here


def test_control_tokens_and_chat_templates() -> None:
    """An end of a turn is, whatever the file says; what a user has defined is text."""
    tokenizer = gguf_tokenizer(_GPT2, "tiny")
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert special == {"<|end|>", "<|endoftext|>", "<|im_end|>"}
    ids = tokenizer("a<|im_end|><tool><|end|>b").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    assert len(tokenizer) == len(_GPT2["tokenizer.ggml.tokens"])
    key = "tokenizer.chat_template"
    assert tokenizer.chat_template is None
    assert gguf_tokenizer(_GPT2 | {key: "one"}, "tiny").chat_template == "one"
    named = {key: "one", f"{key}.tool_use": "two", "tokenizer.chat_templates": ["tool_use"]}
    assert gguf_tokenizer(_GPT2 | named, "tiny").chat_template == {"default": "one", "tool_use": "two"}


def test_a_byte_without_a_token_is_left_out() -> None:
    keys = {"tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]}
    tokenizer = gguf_tokenizer(_with(_GPT2, **keys), "tiny")
    assert tokenizer("ab acb", add_special_tokens=False).input_ids == [2, 0, 1]


@pytest.mark.parametrize(
    ("tokens", "stated", "ends"),
    [
        (["<|endoftext|>", "a", "<|im_end|>"], {"eos": 0}, {0, 2}),
        (["<|endoftext|>", "a", "<|im_end|>"], {}, {0, 2}),
        (["a", "b", "c", "d"], {"eos": 0, "eot": 2, "eom": 3}, {0, 2, 3}),
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1}, {1, 2}),
        (["a", "b"], {"eos": 1, "eot": 7}, {1}),
        (["<|end|>", "<|endoftext|>", "a"], {"eos": 1}, {0, 1}),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos": 1}, {1, 2}),  # Harmony: a channel's end
        (["<|end|>", "<|call|>", "<|flush|>"], {"eos": 2}, {1, 2}),
        (["</s>", "<turn|>", "<|tool_response>", "<eos>"], {"eos": 3}, {1, 2, 3}),
        (["a", "<fim_pad>", "<PAD>", "<|file_sep|>", "<|repo_name|>"], {"eos": 0}, {0, 1, 3, 4}),
        (["a", "<fim_pad>", "<PAD>"], {"eos": 0, "fim_pad": 2}, {0, 2}),
    ],
)
def test_ends(tokens: list[str], stated: dict[str, int], ends: set[int]) -> None:
    keys: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": value for key, value in stated.items()}
    found = end_ids({"tokenizer.ggml.tokens": tokens, **keys}, stated.get("eos"))
    assert set(found) == ends and len(found) == len(ends)
    if "eos" in stated:
        assert found[0] == stated["eos"]


def test_texts_end_at_each(tmp_path: Path) -> None:
    """With eos = 2 and eot = 5, a text ends at both."""
    decoder = outrider.load(write_case(tmp_path / "tiny.gguf", CASES["llama"], keys={"tokenizer.ggml.eot_token_id": 5}))
    assert decoder.eos_ids == {2, 5}
    for end in (2, 5):
        (output,) = decoder.generate([[7, 8]], logit_bias={end: 100.0}, max_new_tokens=4)
        assert (output.finish_reason, output.token_ids) == ("eos", (end,))
