"""``outrider alpha``."""

from pathlib import Path

import pytest

from commands import Outrider, only_document


def test_the_table(outrider: Outrider) -> None:
    ended = outrider("alpha", "-t", "0,1", "--top-p", "0.9,1")
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] == ["fable-draft"]]
    assert [row[1:3] for row in rows] == [["0", "-"], ["1", "0.9"], ["1", "1"]]
    assert all(0.3 < float(row[3]) < 0.9 for row in rows)
    assert "alpha = E[sum min(p, q)] = 1 - TV" in ended.out


def test_the_document_and_the_plot(outrider: Outrider, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "The king had a horse."}\n{"prompt": "Once upon a time"}\n')
    plot = tmp_path / "alpha.png"
    arguments = "--prompts", texts, "--draft", "fable", "--draft", "fable-draft", "-t", "1", "--plot", plot
    same, other = only_document(outrider("alpha", *arguments, "--json", "-").out, "alpha")["alphas"]
    assert same["draft"] == "fable" and same["alpha"]["value"] == pytest.approx(1, abs=1e-5)
    assert other["draft"] == "fable-draft" and 0.3 < other["alpha"]["value"] < 0.95
    assert (other["temperature"], other["top_p"]) == (1.0, 1.0)
    assert same["num_tokens"] == other["num_tokens"] > 6
    assert plot.stat().st_size > 5000


def test_bad_options(outrider: Outrider, tmp_path: Path) -> None:
    assert "like 0,0.5,1" in outrider("alpha", "-t", "warm").error
    assert "temperature = -1.0" in outrider("alpha", "-t", "-1").error
    assert "replay" in outrider("alpha", "--draft", "ngram").error
    assert ">= 1" in outrider("alpha", "--batch-size", 0).error
    short = tmp_path / "short"
    short.write_text("a\n")
    assert "two tokens or more" in outrider("alpha", "--prompts", short).error
