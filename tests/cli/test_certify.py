"""``outrider certify``."""

import re
from pathlib import Path

import pytest

from commands import Outrider, only_document
from outrider.certify import controls
from outrider.certify import run as certify


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pilot, and few of everything."""
    monkeypatch.setattr(certify, "NUM_PILOT_TOKENS", 128)
    monkeypatch.setattr(certify, "_NUM_CONTEXTS", 1)
    monkeypatch.setattr(certify, "CONTROLS", controls.CONTROLS[1:4:2])
    monkeypatch.setattr(controls, "CONTROLS", controls.CONTROLS[1:4:2])


def test_certify_repeats(outrider: Outrider, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K is chosen as it goes: not by times here, so that there are drafts to judge wherever the test runs."""
    monkeypatch.setattr("outrider.decoding.schedule.Estimates.choose", lambda self, rows, num_rows: (4, 4))
    file, page = tmp_path / "certificate.json", tmp_path / "certificate.html"
    options = "--num-tokens", 300, "-n", 12, "-k", "auto", "--top-k", 500, "--acceptance", "gumbel"
    ended = outrider("certify", "--prompts", prompts, *options, "--json", file, "--html", page)
    assert ended.code == 0, ended
    for texts in ("greedy", "sampled, with the same seeds"):
        assert re.search(rf"\n {texts} +2 +24 +0 +ok ", ended.out)
    assert "300 tokens in" in ended.out and "caught" in ended.out and "MISSED" not in ended.out
    first = only_document(file.read_text(), "certify")
    text = page.read_text(encoding="utf-8")
    assert "CERTIFIED (a correct system fails 1 run in 1,000)" in ended.out and "CERTIFIED (a correct" in text
    assert "<script" not in text and "href" not in text and "src=" not in text
    assert first["verdict"] == "passed" and len(first["weights"]["target"]) == len(first["weights"]["draft"]) == 64
    assert first["options"]["num_tokens"] == first["statistical"]["num_tokens"] == 300
    again = only_document(outrider("certify", "--prompts", prompts, *options, "--json", "-").out, "certify")
    assert {key for key, value in again.items() if value != first[key]} <= {"provenance"}


def test_a_certificate_of_structured_output(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Texts end where they are complete; the mistakes are caught; and the document alone holds the grammar."""
    grammar, file = tmp_path / "grammar.lark", tmp_path / "certificate.json"
    grammar.write_text('start: (" " /[a-z]{1,8}/){3,6} "."')
    arguments = "--prompts", prompts, "--num-tokens", 300, "-n", 32, "-k", 3, "--grammar", grammar
    ended = outrider("certify", *arguments, "--json", file)
    assert ended.code == 0 and "MISSED" not in ended.out and "caught" in ended.out, ended
    first = only_document(file.read_text(), "certify")
    assert first["options"]["grammar"] == grammar.read_text() and first["options"]["regex"] is None
    assert first["statistical"]["num_forbidden"] == 0 and first["statistical"]["num_texts"] > 300 / 32


def test_a_wrong_loop_is_not_certified(outrider: Outrider, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and the layer is named. The sample is that which a deviation needs."""
    right, accept_all = certify.generate_texts, controls.CONTROLS[0]
    monkeypatch.setattr(certify, "generate_texts", lambda job, texts, made=None: right(job, texts, made or accept_all))
    ended = outrider("certify", "--prompts", prompts, "--detect-tv", 0.2, "-n", 16, "--json", "-")
    assert ended.code == 1 and "NOT CERTIFIED" in ended.err
    failed = [line for line in ended.err.splitlines() if "FAILED" in line]
    assert any("statistical" in line for line in failed) and any(line.startswith(" greedy ") for line in failed)
    assert "differs from token" in ended.err and ": bug" in ended.err
    document = only_document(ended.out, "certify")
    assert document["statistical"]["wanted"] == 0.2 and 200 <= document["options"]["num_tokens"] < 1000
