"""``outrider divergence``."""

from pathlib import Path

import pytest

from commands import Outrider, only_document
from outrider.certify import controls
from outrider.certify import run as certify


def test_the_same_texts(outrider: Outrider, prompts: Path) -> None:
    """In float64, where rounding moves no token."""
    options = "--prompts", prompts, "-n", 30, "--dtype", "float64"
    ended = outrider("divergence", *options, "-k", 3, "--json", "-")
    assert ended.code == 0 and "2 of 2 outputs the same" in ended.err
    document = only_document(ended.out, "divergence")
    assert document["num_texts"] == 2 and document["num_tokens"] == 60 and not document["differences"]
    sampled = outrider("divergence", *options, "--acceptance", "gumbel", "-t", 0.9)
    assert sampled.code == 0 and "same seed, same text" in sampled.out


def test_a_fault_is_explained(outrider: Outrider, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = certify.generate_texts
    monkeypatch.setattr(
        certify, "generate_texts", lambda job, texts, made=None: correct(job, texts, controls.CONTROLS[1])
    )
    ended = outrider("divergence", "--prompts", prompts, "-n", 30)
    assert ended.code == 1 and "FAILED" in ended.out
    lines = [line for line in ended.out.splitlines() if line.startswith("prompt ")]
    assert lines and "in plain decoding, " in lines[0] and "margin" in lines[0] and ": bug" in ended.out


def test_bad_options(outrider: Outrider) -> None:
    assert "nothing to compare" in outrider("divergence", "--draft", "none").error
    assert "--acceptance gumbel" in outrider("divergence", "-t", 1).error
    assert "--batch-size" in outrider("divergence", "--batch-size", 0).error
