"""``outrider eval multiplication``: success rates of plain and speculative decoding, and whether they are the same."""

from commands import Outrider, only_document
from outrider.evals.multiplication import problems, score
from outrider.measure.intervals import wilson
from pairs import embedded


def test_the_document_and_the_table(outrider: Outrider) -> None:
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
    words = [line.split() for line in ended.err.splitlines() if line.split()[2:3] == ["of"]]
    assert [(line[0], line[3]) for line in words] == [("plain", "6"), ("speculative", "6")]
    assert "fable with fable-draft, K = 3, block" in ended.err
