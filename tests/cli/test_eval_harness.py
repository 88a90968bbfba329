"""``outrider eval harness``: the harness's tasks, run for real on files of their own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from harness_tasks import CHOICES, PAGES, PROMPTS, write_groups, write_tasks
from outrider.drafters.base import NoDrafter
from outrider.evals import tasks

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
    assert exact[-2] == "1"
    assert rows["endings:", "acc"][0] == str(len(CHOICES)) and rows["endings:", "acc"][2:] == ["-"] * 5
    assert rows["pages:", "bits_per_byte"][0] == str(len(PAGES)) and rows["pages:", "bits_per_byte"][2:] == ["-"] * 5
    text = " ".join(ended.out.split())
    assert "difference of 0.6 or more" in text
    assert "Scored once: endings, pages. The likelihood of given text needs no draft" in text
    assert "Not a mean over documents, so not tested: answers: bleu." in text
    assert text.endswith("Verdict, 5% error per claim: all equivalent within 0.6 (1 of 1); none shown to differ.")


def test_groups(outrider: Outrider, tmp_path: Path) -> None:
    """Their aggregates are rows of their own, and are compared if the documents make them."""
    arguments = ("eval", "harness", "--tasks", "all", "--include-path", write_groups(tmp_path), "--dtype", "float64")
    ended = outrider(*arguments, "--json", tmp_path / "a.json")
    assert ended.code == 0
    document = only_document((tmp_path / "a.json").read_text(), "eval-harness")
    groups = {(score["task"], score["metric"]): score for score in document["scores"] if score["weighting"]}
    assert {key: score["weighting"] for key, score in groups.items()} == {
        ("all", "acc"): "size",
        ("all", "exact_match"): "size",
        ("fables", "exact_match"): "equal",
        ("fables", "bleu"): "equal",
    }
    assert groups["fables", "bleu"]["paired"] is None is groups["all", "acc"]["speculative"]
    paired = groups["fables", "exact_match"]["paired"]
    assert (paired["only_first"], paired["only_second"], paired["is_different"]) == (0, 0, False)
    assert document["groups"] == [
        {"group": "all", "tasks": ["endings", "answers", "few"]},
        {"group": "fables", "tasks": ["answers", "few"]},
    ]
    assert document["verdict"] == {
        "num_compared": 4,
        "num_equivalent": 0,
        "num_different": 0,
        "is_equivalent": False,
        "is_different": False,
    }
    text = " ".join(ended.out.split())
    assert "group fables: exact_match" in text
    assert "so not tested: answers: bleu; few: bleu; group fables: bleu." in text
    assert "not all shown to be equivalent within 0.05 (0 of 4 are, each by itself); none shown to differ." in text


def test_ctrl_c_reports_the_tasks_that_are_complete(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both arms; a group with another task has no row. Exit code 130."""
    folder = write_groups(tmp_path)
    num_left = 0
    run_task = tasks.run_task

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_left
        if num_left == 0:
            raise KeyboardInterrupt
        num_left -= 1
        return run_task(*arguments, **options)

    monkeypatch.setattr(tasks, "run_task", interrupted)
    command = ("eval", "harness", "--tasks", "fables,endings", "--include-path", folder, "--limit", 1)
    num_left = 3  # both arms of the first task, and one of the second
    ended = outrider(*command, "--json", tmp_path / "a.json")
    assert ended.code == 130 and "Interrupted: 1 of 3 tasks are complete." in ended.out
    assert "Verdict" in ended.out and "Scored once" not in ended.out
    document = only_document((tmp_path / "a.json").read_text(), "eval-harness")
    assert document["is_interrupted"]
    assert [(score["task"], score["metric"]) for score in document["scores"]] == [
        ("answers", "exact_match"),
        ("answers", "bleu"),
    ]
    assert [task["task"] for task in document["tasks"]] == ["answers"] == [one["task"] for one in document["documents"]]
    num_left = 1
    ended = outrider(*command, "--json", tmp_path / "b.json")
    assert (ended.code, ended.out) == (130, "Interrupted: 0 of 3 tasks are complete.\n")
    assert not (tmp_path / "b.json").exists()


def test_a_difference_is_named(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made up: one task in which speculation loses every document, of two."""
    folder = write_groups(tmp_path)
    run_task = tasks.run_task

    def made_up(lm: Any, task: Any, **options: Any) -> Any:
        result = run_task(lm, task, **options)
        value = float(task.task_name == "few" and isinstance(lm.decoder.drafter, NoDrafter))
        samples = [{**result.samples[0], "doc_id": i, "exact_match": value} for i in range(100)]
        return replace(result, samples=samples)

    monkeypatch.setattr(tasks, "run_task", made_up)
    ended = outrider("eval", "harness", "--tasks", "answers,few", "--include-path", folder, "--limit", 1)
    text = " ".join(ended.out.split())
    assert ended.code == 0
    assert text.endswith("equivalent within 0.05 (1 of 2 are, each by itself); 1 of 2 differs: few: exact_match.")


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
    assert first["paired"]["difference_p"] == 1 and document["groups"] == [] and not document["is_interrupted"]
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


def test_against_another_model(outrider: Outrider, folder: Path) -> None:
    """Here the target in fewer bits. Likelihoods differ too, so that every task has two arms."""
    options = ("--limit", 2, "-n", 6, "--against", "fable:int8", "--json", "-")
    document = only_document(outrider(*EVAL, folder, *options).out, "eval-harness")
    assert document["options"]["against"] == "fable:int8"
    assert [score["paired"] is not None for score in document["scores"][:2]] == [True, False]  # the second is BLEU
    pages = {score["metric"]: score for score in document["scores"] if score["task"] == "pages"}
    assert 0 < abs(pages["bits_per_byte"]["against"] - pages["bits_per_byte"]["plain"]) < 0.1
    assert set(document["documents"][0]["texts"]) == {"plain", "against"}
    tasks = {task["task"]: task for task in document["tasks"]}
    assert tasks["answers"]["against"]["num_draft_tokens"] == 0 < tasks["answers"]["against"]["num_generated_tokens"]
    ended = outrider(*EVAL, folder, "--against", "fable:int8", "--draft", "fable-draft")
    assert ended.code == 2 and "either a draft or another model: leave one out" in ended.err


def test_a_draft_is_not_needed_where_nothing_is_generated(
    outrider: Outrider, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load_draft", lambda *_: pytest.fail("loaded"))
    ended = outrider("eval", "harness", "--tasks", "endings", "--include-path", folder, "--limit", 2)
    assert ended.code == 0 and "fable-draft" not in ended.out and "Scored once: endings" in ended.out


def test_an_error_before_anything_is_loaded(
    outrider: Outrider, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", lambda *_: pytest.fail("loaded"))
    beams = write_tasks(tmp_path, generation_kwargs={"num_beams": 4, "until": []})
    *_, error = outrider(*EVAL, beams).err.splitlines()
    assert "generation_kwargs: num_beams = 4 is invalid: Outrider has no such option" in error
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert outrider(*EVAL, folder).error == "this needs lm-eval: pip install '.[eval]' in a clone of Outrider"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", " , "), "--tasks = ' , ' is invalid: name one or more"),
        (("--tasks", "a", "--limit", 0), "--limit = 0 is invalid: a whole number >= 1"),
        (("--tasks", "a", "--num-fewshot", -1), "--num-fewshot = -1 is invalid: a whole number >= 0"),
        (("--tasks", "a", "--margin", 0), "--margin = 0.0 is invalid: a number above 0"),
        (("--tasks", "a", "--margin", "nan"), "--margin = nan is invalid"),
        (("--tasks", "a", "--batch-size", 0), "--batch-size = 0 is invalid"),
        (("--tasks", "a", "--seed", -1), "seed = -1 is invalid"),
        (("--tasks", "a", "-t", -1), "temperature = -1.0 is invalid"),
        (("--tasks", "a", "-n", 0), "max_new_tokens = 0 is invalid"),
        (("--tasks", "a", "--logit-bias", "x"), "write TOKEN_ID=BIAS"),
        (("--tasks", "a", "--draft", "none"), "there is nothing to compare"),
        (("--tasks", "a", "-k", "1-3"), "this command takes one number"),
        (("--tasks", "a", "--include-path", "/nowhere"), "there is no such folder"),
    ],
)
def test_bad_options(outrider: Outrider, tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    path = tmp_path / "out.json"
    assert message in outrider("eval", "harness", *arguments, "--json", path).error
    assert not path.exists()
