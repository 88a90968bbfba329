"""Loading and generating print nothing of other libraries, nor of exceptions that Python ignores at its end; each model
in a process of its own, with their imports."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from launch import said_by_loading
from outrider.models.notices import drop_cast_notices, without_notices
from pairs import word_tokenizer


@pytest.mark.parametrize(
    "names",
    [
        ("fable", "fable-draft"),
        pytest.param(("fable:int8", "ngram"), marks=pytest.mark.slow),
        pytest.param(("fable:8bit", "ngram"), marks=pytest.mark.slow),
    ],
)
def test_the_embedded_pair(names: tuple[str, ...]) -> None:
    assert said_by_loading(*names) == ""


@pytest.mark.slow
def test_another_architecture(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert said_by_loading(str(tmp_path), "ngram") == ""


def test_other_messages_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    """And the same ones, when nothing is being loaded."""
    logger, casts = logging.getLogger("torchao"), logging.getLogger("bitsandbytes.autograd._functions")
    with without_notices():
        logger.warning("Failed to load a kernel")
        logger.warning("something else")
    logger.warning("Failed to load a kernel")
    drop_cast_notices()
    for message in ("MatMul8bitLt: inputs will be cast from here", "another message"):
        casts.warning(message)
    assert caplog.messages == ["something else", "Failed to load a kernel", "another message"]
