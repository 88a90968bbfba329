"""Loading and generating print nothing of other libraries, nor of exceptions that Python ignores at its end; each model
in a process of its own, with their imports."""

import logging

import pytest

from launch import said_by_loading
from outrider.models.reading import drop_notices


@pytest.mark.slow
@pytest.mark.parametrize("names", [("fable", "fable-draft"), ("fable:int8", "ngram"), ("fable:8bit", "ngram")])
def test_the_embedded_pair(names: tuple[str, str]) -> None:
    assert said_by_loading(*names) == ""


def test_other_messages_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    drop_notices()
    for name, message in (
        ("torchao", "Failed to load "),
        ("bitsandbytes.autograd._functions", "MatMul8bitLt: inputs "),
    ):
        for words in (message, "will be cast here", "another message"):
            logging.getLogger(name).warning(words)
    assert "another message" in caplog.messages and "Failed to load " not in caplog.messages
