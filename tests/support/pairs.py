"""Pairs of models and tokenizers for tests of what sees text; nothing may depend on what the embedded pair says."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outrider.api import load
from outrider.decoder import Decoder
from outrider.models.registry import resolve
from outrider.native.engine import NativeForward
from outrider.options import DEFAULT_ACCEPTANCE
from toys import tiny_llama

NUM_WORDS = 97


@cache
def _loaded(dtype: str) -> Decoder:
    return load("fable", "fable-draft", device="cpu", dtype=dtype)


@cache
def embedded(dtype: str = "float32", acceptance: str = DEFAULT_ACCEPTANCE) -> Decoder:
    """The embedded target with its draft. All rules share one copy of the weights."""
    return replace(_loaded(dtype), acceptance=acceptance)


def depend_on_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the native engine's results depend on the number of columns: a verify forward prefers a token."""
    right = NativeForward.__call__

    def wrong(self: NativeForward, ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        results = right(self, ids, *rest, **more)
        results.logits[..., 40] += 50.0 * (ids.shape[1] > 1)
        return results

    monkeypatch.setattr(NativeForward, "__call__", wrong)


def embedded_tokenizer() -> Any:
    return embedded().tokenizer


def zoo(name: str) -> Path:
    """The folder of an embedded model."""
    path = resolve(name).path
    assert path is not None
    return path


def stating(folder: Path, options: dict[str, Any]) -> Path:
    """The embedded target in a folder, whose ``generation_config.json`` states sampling options."""
    folder.mkdir()
    for file in zoo("fable").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(options))
    return folder


def word_tokenizer(num_words: int = NUM_WORDS, word: str = "w{}") -> PreTrainedTokenizerFast:
    """``w0 w1 w2 ...``; the last word ends a text."""
    vocab = {word.format(i): i for i in range(num_words)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=word.format(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=word.format(num_words - 1))


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama 2's: a leading space is part of a piece, the first one is dropped, and any byte is a token."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Once", "▁upon", "▁a", "▁time", "s", "▁", "."]
    model = BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_level_tokenizer(merged: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Like GPT-2's: a token for each byte (in the letters of byte-level tokenizers), and for each of ``merged``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, *merged])}
    tokenizer = Tokenizer(BPE(vocab, [(pair[0], pair[1]) for pair in merged]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def random_llama(vocab_size: int = NUM_WORDS, seed: int = 0, *, context_len: int = 64, **more: Any) -> PreTrainedModel:
    """A tiny Llama for the tokenizer of words: with an end token, and tied embeddings."""
    own = {"eos_token_id": NUM_WORDS - 1, "tie_word_embeddings": True}
    return tiny_llama(seed, vocab_size=vocab_size, context_len=context_len, **own | more)


def broken_model(folder: Path) -> Path:
    """Its weights hold a NaN, at a token that only some prompts have: ``w7``."""
    save(folder, random_llama(tie_word_embeddings=False))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save(folder: Path, model: PreTrainedModel, tokenizer: Any | None = None) -> Path:
    model.save_pretrained(folder)
    (word_tokenizer(model.config.vocab_size) if tokenizer is None else tokenizer).save_pretrained(folder)
    return folder
