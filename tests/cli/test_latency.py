"""``outrider latency``: every target, draft and K, in turn. ``outrider eval multiplication``: success rates."""

import pytest

from commands import Outrider, only_document
from outrider.evals.multiplication import problems, score
from outrider.measure.intervals import wilson
from outrider.text.example_prompts import PROMPTS
from pairs import embedded


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.text.example_prompts.PROMPTS", PROMPTS[:3])


def test_the_document_and_the_table(outrider: Outrider) -> None:
    """All arms measure the same number of tokens on the same prompts, whatever they say: end tokens are ignored."""
    drafts = "--draft", "fable-draft", "--draft", "ngram", "--draft", "none"
    ended = outrider("latency", "-n", 4, "-k", "1-2", *drafts, "--json", "-")
    document = only_document(ended.out, "latency")
    arms = document["arms"]
    drafts = [(None, None), *(("fable-draft", k) for k in (None, 1, 2)), ("ngram", 1), ("ngram", 2)]
    assert [(arm["draft"], arm["k"]) for arm in arms] == drafts
    assert document["baseline"] == arms[0]["name"] and document["num_prompts"] == 3
    assert len({arm["name"] for arm in arms}) == len(arms)
    for arm in arms:
        assert arm["num_cases"] == 3
        assert arm["stats"]["num_generated_tokens"] == 12
        assert (arm["stats"]["num_draft_tokens"] > 0) == (arm["k"] is not None)
        assert len(arm["stats"]["drafted_histogram"]) <= (arm["k"] or 0) + 1
        assert arm["ms_per_token"]["mean"] > 0 and arm["ms_per_token"]["std"] > 0 and arm["prefill_ms"]["mean"] > 0
        assert arm["tokens_per_s"] == pytest.approx(12 / (arm["time_s"]["total"] - arm["time_s"]["prefill"]))


def test_the_document_and_the_scores_of_multiplication(outrider: Outrider) -> None:
    """The answers are those of the arms with the same prompts, seeds and budget; auto chooses the known draft."""
    options = ("--num-prompts", 6, "--seed", 5, "--batch-size", 4, "-k", 3, "-t", 0.5, "--draft", "auto")
    ended = outrider("eval", "multiplication", *options, "--dtype", "float64", "--json", "-")
    document = only_document(ended.out, "eval-multiplication")
    sheet = problems(6, seed=5)
    plain = score(embedded("float64").plain(), sheet, batch_size=1, seed=5, temperature=0.5)
    assert [(item["a"], item["b"], item["plain"]) for item in document["problems"]] == [
        (*factors, answer) for factors, answer in zip(sheet, plain.answers, strict=True)
    ]
    scores, difference = document["scores"], document["difference"]
    assert scores["plain"]["stats"] == plain.stats.to_json()
    assert scores["speculative"]["stats"]["num_draft_tokens"] > 0
    assert scores["plain"]["wilson"] == wilson(plain.num_solved, 6).to_json()
    solved = scores["speculative"]["num_solved"] - plain.num_solved
    assert difference["only_speculative"] - difference["only_plain"] == solved
    assert document["options"]["draft"] == ["fable-draft"] and document["options"]["num_draft_tokens"] == 3
    assert "McNemar's exact test of no difference: p = " in " ".join(ended.err.split())
