"""``outrider eval perplexity``."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Outrider, only_document
from pairs import embedded, random_llama, save

TEXT = "Once upon a time there was a king, and he had a daughter.\n" * 5


@pytest.fixture(name="text")
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_table(outrider: Outrider, text: Path) -> None:
    ended = outrider("eval", "perplexity", text, "--context", 16)
    assert (ended.code, ended.err) == (0, "")
    num_tokens = len(embedded().encode(TEXT)) - 1
    first, *_ = ended.out.splitlines()
    windows = math.ceil(num_tokens / 16)
    assert first.split() == f"text.txt: {num_tokens} tokens, {len(TEXT) - 4} bytes, {windows} windows of 16".split()
    rows = {line.split()[0]: line.split() for line in ended.out.splitlines() if line.strip().startswith("fable")}
    assert 1 < float(rows["fable"][1]) < float(rows["fable-draft"][1]) < 4096
    assert "Agreement" in ended.out and "alpha = 1 - TV" in ended.out


def test_the_document(outrider: Outrider, text: Path) -> None:
    """The whole text fits one window: Hugging Face's own loss is the mean of -ln p."""
    document = only_document(
        outrider("eval", "perplexity", text, "--dtype", "float64", "--json", "-").out, "eval-perplexity"
    )
    decoder = embedded("float64")
    ids = torch.tensor([decoder.encode(TEXT)])
    target, draft = document["perplexities"]
    assert (target["model"], draft["model"]) == ("fable", "fable-draft")
    loss = decoder.target.model(ids, labels=ids).loss.item()
    assert target["nats_per_token"]["value"] == pytest.approx(loss, abs=1e-6)
    assert target["perplexity"]["value"] == pytest.approx(math.exp(loss), rel=1e-6)
    bits = loss * document["num_tokens"] / math.log(2) / (len(TEXT) - len("Once"))
    assert target["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-6)
    assert document["num_bytes"] == len(TEXT) - len("Once")
    assert document["num_tokens"] == ids.shape[1] - 1
    assert document["num_windows"] == 1
    assert 0 < document["agreement"]["value"] < 1 and 0 < document["alpha"]["value"] < 1
    options = document["options"]
    assert (options["context"], options["stride"], options["file"]) == (1024, 1024, str(text))


def test_a_stride_judges_the_same_tokens_after_more_text(outrider: Outrider, text: Path) -> None:
    """The text repeats itself, so with more of it in sight the next token is less of a surprise."""
    arguments = ("eval", "perplexity", text, "--context", 24, "--json", "-")
    apart = only_document(outrider(*arguments).out, "eval-perplexity")
    overlapping = only_document(outrider(*arguments, "--stride", 4).out, "eval-perplexity")
    assert apart["num_tokens"] == overlapping["num_tokens"]
    assert apart["num_windows"] < overlapping["num_windows"]
    assert overlapping["perplexities"][0]["perplexity"]["value"] < apart["perplexities"][0]["perplexity"]["value"]


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_the_target_alone(outrider: Outrider, text: Path, draft: str) -> None:
    ended = outrider("eval", "perplexity", text, "--draft", draft, "--json", "-")
    document = only_document(ended.out, "eval-perplexity")
    assert len(document["perplexities"]) == 1
    assert document["agreement"] is document["alpha"] is None
    assert f"The draft '{draft}' has no probabilities of its own: these are the target's." in ended.err


def test_the_context_is_the_shorter_one(outrider: Outrider, tmp_path: Path) -> None:
    target = save(tmp_path / "target", random_llama(context_len=64))
    draft = save(tmp_path / "draft", random_llama(context_len=40, seed=1))
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"w{i % 90}" for i in range(121)))
    arguments: tuple[Any, ...] = ("eval", "perplexity", path, "--target", target, "--draft", draft)
    document = only_document(outrider(*arguments, "--json", "-").out, "eval-perplexity")
    assert (document["options"]["context"], document["num_windows"], document["num_tokens"]) == (40, 3, 120)
    assert "accepts 40 tokens" in outrider(*arguments, "--context", 41).error


def test_bad_input(outrider: Outrider, text: Path, tmp_path: Path) -> None:
    assert "cannot read" in outrider("eval", "perplexity", tmp_path / "missing").error
    latin = tmp_path / "latin"
    latin.write_bytes("Es war einmal ein König\n".encode("latin-1"))
    assert "not UTF-8" in outrider("eval", "perplexity", latin).error
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    assert "contains no text" in outrider("eval", "perplexity", empty).error
    empty.write_text("a")
    assert "only one token" in outrider("eval", "perplexity", empty).error
    assert "--context = 0 is invalid" in outrider("eval", "perplexity", text, "--context", 0).error
    assert "--stride = -1 is invalid" in outrider("eval", "perplexity", text, "--stride", -1).error
    assert "some would be skipped" in outrider("eval", "perplexity", text, "--stride", 9, "--context", 8).error
    assert "another option reads or writes this file" in outrider("eval", "perplexity", text, "--json", text).error
    assert "takes one draft" in outrider("eval", "perplexity", text, "--draft", "ngram", "--draft", "fable").error
    assert text.read_text() == TEXT
