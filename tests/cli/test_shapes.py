"""``outrider shapes``."""

from pathlib import Path

from commands import Outrider, only_document


def test_the_table_and_the_document(outrider: Outrider, tmp_path: Path) -> None:
    plot = tmp_path / "shapes.svg"
    arguments = "--shape", "1x64", "--shape", "4x128x256", "--context", 8, "--plot", plot, "--json", tmp_path / "json"
    ended = outrider("shapes", *arguments)
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] in (["1"], ["4"])]
    assert [row[:3] for row in rows] == [["1", "x", "64"], ["4", "x", "128"]]
    assert "outrider distill fable --layers " in ended.out
    small, deep = only_document((tmp_path / "json").read_text(), "shapes")["shapes"]
    assert small["draft_ms"] > 0 and (small["is_worth_training"] or deep["is_worth_training"])
    assert (deep["layers"], deep["hidden_size"], deep["intermediate_size"]) == (4, 128, 256)
    assert small["num_params"] < deep["num_params"]
    assert plot.stat().st_size > 5000


def test_nothing_within_the_budget(outrider: Outrider) -> None:
    ended = outrider("shapes", "--shape", "1x64", "--context", 8, "--budget-ms", "1e-6")
    assert "No shape drafts a token within 1e-06 ms." in ended.out


def test_bad_options(outrider: Outrider) -> None:
    assert "like 2x192" in outrider("shapes", "--shape", "wide").error
    assert "hidden_size = 0" in outrider("shapes", "--shape", "1x0").error
    assert "above 0" in outrider("shapes", "--budget-ms", "-1").error
    assert "accepts 1024" in outrider("shapes", "--context", 1020).error
