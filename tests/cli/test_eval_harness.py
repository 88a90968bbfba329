"""``outrider eval harness``: the harness's tasks, run for real on files of their own."""

from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from harness_tasks import CHOICES, PAGES, PROMPTS, write_tasks

EVAL = ("eval", "harness", "--tasks", "answers,endings,pages", "--include-path")


@pytest.fixture(name="folder", scope="module")
def folder_of_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_the_table(outrider: Outrider, folder: Path) -> None:
    ended = outrider(*EVAL, folder, "--margin", 0.6)
    assert ended.code == 0
    lines = [line.split() for line in ended.out.splitlines()]
    rows = {tuple(line[:2]): line[2:] for line in lines if line and line[0].endswith(":") and len(line) > 5}
    assert "fable with fable-draft, K = 4, block" in ended.out
    exact = rows["answers:", "exact_match"]
    assert exact[:4] == [str(len(PROMPTS)), "0", "0", "0.000"] and 1 <= float(exact[-1]) <= 5
    assert rows["answers:", "bleu"][3:5] == ["-", "-"]
    assert rows["endings:", "acc"][0] == str(len(CHOICES)) and rows["endings:", "acc"][2:] == ["-"] * 4
    assert rows["pages:", "bits_per_byte"][0] == str(len(PAGES)) and rows["pages:", "bits_per_byte"][2:] == ["-"] * 4
    text = " ".join(ended.out.split())
    assert "difference of 0.6 or more" in text and "within that margin: 1 of 1" in text
    assert "Scored once: endings, pages. The likelihood of given text is the target's own" in text
    assert "No number for each document, so no test: answers bleu." in text


def test_the_document(outrider: Outrider, folder: Path) -> None:
    """Options of the user take the place of the task's, for both arms alike."""
    options = ("-t", 0.8, "-n", 6, "--top-k", 50, "--limit", 2, "-k", 2, "--acceptance", "gumbel", "--seed", 3)
    ended = outrider(*EVAL, folder, *options, "--dtype", "float64", "--json", "-")
    document = only_document(ended.out, "eval-harness")
    first, *_ = document["scores"]
    assert (first["task"], first["metric"], first["filter"], first["num_documents"]) == (
        "answers",
        "exact_match",
        "none",
        2,
    )
    assert first["paired"]["difference"]["value"] == 0 and not first["paired"]["is_equivalent"]
    assert [score["paired"] for score in document["scores"][1:]] == [None] * 4
    tasks = {task["task"]: task for task in document["tasks"]}
    assert tasks["answers"]["speculative"]["num_draft_tokens"] > 0
    assert tasks["answers"]["plain"]["num_draft_tokens"] == 0 < tasks["answers"]["plain"]["num_generated_tokens"] <= 12
    assert tasks["pages"]["plain"] is tasks["pages"]["speculative"] is None
    assert tasks["endings"]["output_type"] == "multiple_choice" and tasks["endings"]["num_fewshot"] == 0
    assert len(document["documents"]) == 6
    texts = [item["texts"] for item in document["documents"] if item["task"] == "answers"]
    assert all(item["plain"] == item["speculative"] for item in texts)  # gumbel: the seed makes the text
    settings = document["options"]
    assert settings["tasks"] == ["answers", "endings", "pages"] and settings["include_path"] == str(folder)
    assert (settings["temperature"], settings["max_new_tokens"], settings["top_k"]) == (0.8, 6, 50)
    assert settings["top_p"] is settings["num_fewshot"] is None
    assert (settings["limit"], settings["num_draft_tokens"], settings["seed"]) == (2, 2, 3)


def test_a_draft_is_not_needed_where_nothing_is_generated(
    outrider: Outrider, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.options.PairOptions.load_draft", lambda *_: pytest.fail("loaded"))
    ended = outrider("eval", "harness", "--tasks", "endings", "--include-path", folder, "--limit", 2)
    assert ended.code == 0 and "fable-draft" not in ended.out and "Scored once: endings" in ended.out


def test_an_error_before_anything_is_loaded(
    outrider: Outrider, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.options.PairOptions.load", lambda *_: pytest.fail("loaded"))
    beams = write_tasks(tmp_path, generation_kwargs={"num_beams": 4, "until": []})
    *_, error = outrider(*EVAL, beams).err.splitlines()
    assert "generation_kwargs: num_beams = 4 is not possible: Outrider has no such option" in error
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert outrider(*EVAL, folder).error == "this needs lm-eval: pip install 'outrider[eval]'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", " , "), "--tasks = ' , ' is not possible: name one or more"),
        (("--tasks", "a", "--limit", 0), "--limit = 0 is not possible: a whole number >= 1"),
        (("--tasks", "a", "--num-fewshot", -1), "--num-fewshot = -1 is not possible: a whole number >= 0"),
        (("--tasks", "a", "--margin", 0), "--margin = 0.0 is not possible: a number above 0"),
        (("--tasks", "a", "--margin", "nan"), "--margin = nan is not possible"),
        (("--tasks", "a", "--batch-size", 0), "--batch-size = 0 is not possible"),
        (("--tasks", "a", "--seed", -1), "seed = -1 is not possible"),
        (("--tasks", "a", "-t", -1), "temperature = -1.0 is not possible"),
        (("--tasks", "a", "-n", 0), "max_new_tokens = 0 is not possible"),
        (("--tasks", "a", "--logit-bias", "x"), "write TOKEN_ID=BIAS"),
        (("--tasks", "a", "--draft", "none"), "there would be nothing to compare"),
        (("--tasks", "a", "-k", "1-3"), "this command takes one number"),
        (("--tasks", "a", "--include-path", "/nowhere"), "there is no such folder"),
    ],
)
def test_bad_options(outrider: Outrider, tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    path = tmp_path / "out.json"
    assert message in outrider("eval", "harness", *arguments, "--json", path).error
    assert not path.exists()
