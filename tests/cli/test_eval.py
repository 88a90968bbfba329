"""``outrider eval multiplication``: success rates of plain and speculative decoding, and whether they are the same."""

import re
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.evals.multiplication import problems, score
from outrider.measure.intervals import wilson
from pairs import embedded


def test_the_document_and_the_table(outrider: Outrider) -> None:
    """The answers are those of the arms with the same prompts, seeds and budget."""
    options = ("--num-prompts", 6, "--seed", 5, "--batch-size", 4, "-k", 3, "-t", 0.5)
    ended = outrider("eval", "multiplication", *options, "--dtype", "float64", "--json", "-")
    document = only_document(ended.out, "eval-multiplication")
    sheet = problems(6, seed=5)
    plain = score(embedded("float64").plain(), sheet, batch_size=1, seed=5, temperature=0.5)
    assert [(item["a"], item["b"]) for item in document["problems"]] == [(problem.a, problem.b) for problem in sheet]
    assert tuple(item["plain"] for item in document["problems"]) == plain.answers
    scores = document["scores"]
    assert scores["plain"]["num_solved"] == plain.num_solved
    assert scores["plain"]["stats"] == plain.stats.to_json()
    assert scores["speculative"]["stats"]["num_draft_tokens"] > 0
    assert scores["plain"]["num_prompts"] == scores["speculative"]["num_prompts"] == 6
    assert scores["plain"]["wilson"] == wilson(plain.num_solved, 6).to_json()
    difference = document["difference"]
    solved = scores["speculative"]["num_solved"] - scores["plain"]["num_solved"]
    assert difference["only_speculative"] - difference["only_plain"] == solved
    assert "McNemar's exact test of no difference: p = " in " ".join(ended.err.split())
    settings = document["options"]
    assert (settings["num_draft_tokens"], settings["num_prompts"], settings["batch_size"]) == (3, 6, 4)
    words = [line.split() for line in ended.err.splitlines() if line.split()[2:3] == ["of"]]
    assert [(line[0], line[3]) for line in words] == [("plain", "6"), ("speculative", "6")]
    assert "fable with fable-draft, K = 3, block" in ended.err


def test_the_draft_that_auto_chose(outrider: Outrider) -> None:
    ended = outrider("eval", "multiplication", "--num-prompts", 1, "--draft", "auto", "-k", 2, "--json", "-")
    assert only_document(ended.out, "eval-multiplication")["options"]["draft"] == ["fable-draft"]
    assert "fable with fable-draft, K = 2, block" in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-prompts", 0), "'--num-prompts': (Input should be greater|0 is not in the range)"),
        (("--draft", "none"), "there is nothing to compare"),
        (("--num-prompts", 2, "--seed", 2**63 - 1), "seed"),  # problem i has seed + i
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_bad_options(outrider: Outrider, arguments: tuple[Any, ...], message: str) -> None:
    assert re.search(message, outrider("eval", "multiplication", *arguments).error)
