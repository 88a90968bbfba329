"""Loading and generating print nothing of other libraries, nor of exceptions that Python ignores at its end; each model
in a process of its own, with their imports."""

import logging

import pytest

from launch import said_by_loading
from outrider.models.notices import drop_cast_notices, without_notices


@pytest.mark.slow
@pytest.mark.parametrize("names", [("fable", "fable-draft"), ("fable:int8", "ngram"), ("fable:8bit", "ngram")])
def test_the_embedded_pair(names: tuple[str, str]) -> None:
    assert said_by_loading(*names) == ""


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
