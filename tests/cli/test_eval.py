"""``outrider eval multiplication``: success rates of plain and speculative decoding, and whether they are the same."""

from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.evals.multiplication import SheetScore, problems, score
from outrider.records import Stats, Timing
from outrider.stats.intervals import paired_difference, wilson
from pairs import embedded

QUICK = ("--num-prompts", "6", "--seed", "5", "--batch-size", "4")


def test_the_table_and_the_verdict(outrider: Outrider) -> None:
    ended = outrider("eval", "multiplication", *QUICK)
    assert (ended.code, ended.err) == (0, "")
    words = [line.split() for line in ended.out.splitlines() if line.split()[2:3] == ["of"]]
    assert [line[0] for line in words] == ["plain", "speculative"]
    assert all(line[3] == "6" for line in words)
    assert "fable with fable-draft, K = 4, block" in ended.out
    assert "Speculative minus plain: " in ended.out
    assert "Within a margin of 5.0% the arms are not shown to be equivalent" in ended.out


def test_the_document(outrider: Outrider) -> None:
    """Has the answers; and the same prompts, seeds and budget give the same again."""
    arguments = ("eval", "multiplication", *QUICK, "-k", 3, "--margin", 0.1, "-t", 0.5, "--dtype", "float64")
    document = only_document(outrider(*arguments, "--json", "-").out, "eval-multiplication")
    sheet = problems(6, seed=5)
    decoder = embedded("float64")
    options: dict[str, Any] = {"batch_size": 1, "seed": 5, "temperature": 0.5}
    plain = score(decoder.plain(), sheet, **options)
    assert [(item["a"], item["b"]) for item in document["problems"]] == [(problem.a, problem.b) for problem in sheet]
    assert tuple(item["plain"] for item in document["problems"]) == plain.answers
    scores = document["scores"]
    assert scores["plain"]["num_solved"] == plain.num_solved
    assert scores["plain"]["stats"] == plain.stats.to_json()
    assert scores["speculative"]["stats"]["num_draft_tokens"] > 0
    assert scores["plain"]["num_prompts"] == scores["speculative"]["num_prompts"] == 6
    assert scores["plain"]["wilson"] == wilson(plain.num_solved, 6).to_json()
    assert document["difference"]["margin"] == 0.1
    options = document["options"]
    assert (options["num_draft_tokens"], options["num_prompts"], options["batch_size"]) == (3, 6, 4)


@pytest.mark.parametrize(("num_differing", "verdict"), [(0, "equivalent"), (15, "not shown to be equivalent")])
def test_the_verdict_by_made_up_scores(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, num_differing: int, verdict: str
) -> None:
    """100 problems that plain solves all, and speculative all but some."""
    outcomes = iter([(True,) * 100, (False,) * num_differing + (True,) * (100 - num_differing)])

    def made_up(decoder: Any, sheet: Any, **_: Any) -> SheetScore:
        return SheetScore(next(outcomes), ("0",) * 100, Stats(num_generated_tokens=100), Timing(total_s=1.0))

    monkeypatch.setattr("outrider.evals.multiplication.score", made_up)
    ended = outrider("eval", "multiplication", "--num-prompts", 100, "--json", "-")
    difference = only_document(ended.out, "eval-multiplication")["difference"]
    want = paired_difference([True] * 100, [False] * num_differing + [True] * (100 - num_differing), 0.05)
    assert (difference["only_first"], difference["only_second"]) == (num_differing, 0)
    assert difference["tost_p"] == pytest.approx(want.tost_p)
    assert difference["is_equivalent"] == (num_differing == 0)
    assert difference["difference"]["value"] == -num_differing / 100
    assert f"the arms are {verdict}" in " ".join(ended.err.split())
    assert f"Speculative minus plain: {-num_differing / 100:+.1%}" in ended.err.replace("-0.0%", "+0.0%")


def test_the_first_command_can_decide(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms that differ as those of the embedded pair did on 200 problems, 2% and 4.5% of them each way: that was not
    enough, and the verdict said so; the default sample is."""

    def made_up(decoder: Any, sheet: Any, **_: Any) -> SheetScore:
        low, high = (0.0, 0.02) if decoder.drafter.name == "none" else (0.02, 0.065)
        return SheetScore(
            tuple(low <= i / len(sheet) < high for i in range(len(sheet))),
            ("0",) * len(sheet),
            Stats(num_generated_tokens=100),
            Timing(total_s=1.0),
        )

    monkeypatch.setattr("outrider.evals.multiplication.score", made_up)
    assert "the arms are equivalent" in " ".join(outrider("eval", "multiplication").out.split())
    ended = outrider("eval", "multiplication", "--num-prompts", 200, "--json", "-")
    assert only_document(ended.out, "eval-multiplication")["num_to_decide"] == 353
    assert "not shown to be equivalent (about 353 prompts would decide)" in " ".join(ended.err.split())


def test_problems_are_not_left_out_of_the_progress(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm counts each problem once."""
    steps: list[int] = []

    class Bar:
        def __init__(self, what: str, total: int) -> None:
            steps.append(-total)

        def __enter__(self) -> Any:
            return steps.append

        def __exit__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr("outrider.cli.commands.eval_multiplication.progress_bar", Bar)
    outrider("eval", "multiplication", "--num-prompts", 3, "--batch-size", 2)
    assert steps == [-6, *[1] * 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-prompts", 0), "--num-prompts = 0 is invalid: a whole number >= 1"),
        (("--batch-size", 0), "--batch-size = 0 is invalid"),
        (("--margin", 0), "--margin = 0.0 is invalid: a number between 0 and 1"),
        (("--margin", "nan"), "--margin = nan is invalid"),
        (("--draft", "none"), "there is nothing to compare"),
        (("--draft", "ngram", "--draft", "fable"), "this command takes one draft"),
        (("-k", "1-3"), "this command takes one number"),
    ],
)
def test_bad_options(outrider: Outrider, tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    path = tmp_path / "out.json"
    assert message in outrider("eval", "multiplication", *arguments, "--json", path).error
    assert not path.exists()
