"""``outrider eval multiplication``: success rates of plain and speculative decoding, and whether they are the same."""

from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.evals.multiplication import SheetScore, problems, score
from outrider.records import Stats, Timing
from outrider.stats.intervals import paired_difference, wilson
from pairs import embedded


def test_the_document_and_the_table(outrider: Outrider) -> None:
    """The answers are those of the arms with the same prompts, seeds and budget."""
    options = ("--num-prompts", 6, "--seed", 5, "--batch-size", 4, "-k", 3, "--margin", 0.1, "-t", 0.5)
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
    assert document["difference"]["margin"] == 0.1
    settings = document["options"]
    assert (settings["num_draft_tokens"], settings["num_prompts"], settings["batch_size"]) == (3, 6, 4)
    words = [line.split() for line in ended.err.splitlines() if line.split()[2:3] == ["of"]]
    assert [(line[0], line[3]) for line in words] == [("plain", "6"), ("speculative", "6")]
    assert "fable with fable-draft, K = 3, block" in ended.err


@pytest.mark.parametrize(
    ("num_prompts", "only_plain", "only_speculative", "verdict"),
    [
        (100, 0, 0, "equivalent"),
        (100, 15, 0, "not shown to be equivalent (about 787 prompts would decide)"),
        (600, 12, 27, "equivalent"),  # as the embedded pair differed on 200 problems; the default sample decides
        (200, 4, 9, "not shown to be equivalent (about 353 prompts would decide)"),
    ],
)
def test_the_verdict_by_made_up_scores(
    outrider: Outrider,
    monkeypatch: pytest.MonkeyPatch,
    num_prompts: int,
    only_plain: int,
    only_speculative: int,
    verdict: str,
) -> None:
    plain = [True] * only_plain + [False] * (num_prompts - only_plain)
    speculative = [only_plain <= i < only_plain + only_speculative for i in range(num_prompts)]
    outcomes = iter([plain, speculative])

    def made_up(decoder: Any, sheet: Any, **_: Any) -> SheetScore:
        assert len(sheet) == num_prompts
        answers = ("0",) * num_prompts
        return SheetScore(tuple(next(outcomes)), answers, Stats(num_generated_tokens=100), Timing(total_s=1.0))

    monkeypatch.setattr("outrider.evals.multiplication.score", made_up)
    size = () if num_prompts == 600 else ("--num-prompts", num_prompts)
    ended = outrider("eval", "multiplication", *size, "--json", "-")
    difference = only_document(ended.out, "eval-multiplication")["difference"]
    want = paired_difference(plain, speculative, 0.05)
    assert (difference["only_first"], difference["only_second"]) == (only_plain, only_speculative)
    assert difference["tost_p"] == pytest.approx(want.tost_p)
    assert difference["is_equivalent"] == (verdict == "equivalent")
    assert difference["difference"]["value"] == pytest.approx((only_speculative - only_plain) / num_prompts)
    assert f"Within a margin of 5.0% the arms are {verdict}: " in " ".join(ended.err.split())
    shown = f"Speculative minus plain: {(only_speculative - only_plain) / num_prompts:+.1%}"
    assert shown in ended.err.replace("-0.0%", "+0.0%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-prompts", 0), "'--num-prompts': Input should be greater"),
        (("--margin", 2), "'--margin': Input should be less"),
        (("--draft", "none"), "there is nothing to compare"),
        (("--num-prompts", 2, "--seed", 2**63 - 1), "seed"),  # problem i has seed + i
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_bad_options(outrider: Outrider, arguments: tuple[Any, ...], message: str) -> None:
    assert message in outrider("eval", "multiplication", *arguments).error
