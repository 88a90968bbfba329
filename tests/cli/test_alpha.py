"""``outrider alpha``."""

from pathlib import Path

import pytest

from commands import Outrider, only_document


def test_the_document_the_table_and_the_page(outrider: Outrider, tmp_path: Path) -> None:
    texts, page = tmp_path / "texts.jsonl", tmp_path / "alpha.html"
    texts.write_text('{"prompt": "The king had a horse."}\n{"prompt": "Once upon a time"}\n')
    drafts = "--draft", "fable", "--draft", "fable-draft"
    arguments = "--prompts", texts, *drafts, "-t", "0,1", "--top-p", "0.9,1", "--html", page
    ended = outrider("alpha", *arguments, "--json", "-")
    rows = only_document(ended.out, "alpha")["alphas"]
    assert [(row["draft"], row["temperature"], row["top_p"]) for row in rows] == [
        (draft, *options) for draft in ("fable", "fable-draft") for options in ((0.0, 0.9), (1.0, 0.9), (1.0, 1.0))
    ]
    assert all(row["alpha"]["value"] == pytest.approx(1, abs=1e-5) for row in rows[:3])
    assert all(0.1 < row["alpha"]["value"] < 0.99 for row in rows[3:])
    assert len({row["num_tokens"] for row in rows}) == 1 and rows[0]["num_tokens"] > 6
    lines = [line.split() for line in ended.err.splitlines() if line.split()[:1] == ["fable-draft"]]
    assert [line[1:3] for line in lines] == [["0", "–"], ["1", "0.9"], ["1", "1"]]
    assert "alpha = E[sum min(p, q)] = 1 − TV" in ended.err
    assert page.read_text(encoding="utf-8").count("<svg") == 1


def test_the_draft_that_auto_chose(outrider: Outrider, tmp_path: Path) -> None:
    """It is named, not the word."""
    (tmp_path / "texts").write_text("The king had a horse.\n")
    ended = outrider("alpha", "--draft", "auto", "--prompts", tmp_path / "texts", "-t", 1, "--json", "-")
    document = only_document(ended.out, "alpha")
    assert document["options"]["draft"] == [document["alphas"][0]["draft"]] == ["fable-draft"]
    assert "fable-draft at temperature 1" in ended.err and "auto" not in ended.err.split("draft: fable-draft")[1]


def test_bad_options(outrider: Outrider, tmp_path: Path) -> None:
    assert "like 0,0.5,1" in outrider("alpha", "-t", "warm").error
    assert "replay" in outrider("alpha", "--draft", "ngram").error
    short = tmp_path / "short"
    short.write_text("a\n")
    assert "two tokens or more" in outrider("alpha", "--prompts", short).error


@pytest.mark.filterwarnings("ignore")  # torchao warns of what it will change
def test_a_quantized_target_is_another_target(outrider: Outrider) -> None:
    """alpha tells how far it is from the one in float32."""
    words = ("alpha", "--target", "fable", "--draft", "fable", "--draft-quantize", "int8", "-t", "1", "--json", "-")
    (row,) = only_document(outrider(*words).out, "alpha")["alphas"]
    assert 0.95 < row["alpha"]["value"] < 1
