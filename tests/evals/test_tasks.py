"""Tasks by two arms: what is loaded, and which numbers are held against which."""

from pathlib import Path
from typing import Any

import pytest

from harness_tasks import CHOICES, PAGES, PROMPTS, write_tasks
from outrider.errors import OptionError
from outrider.evals.harness import OutriderLM
from outrider.evals.tasks import (
    compare,
    documents_json,
    is_generated,
    load_tasks,
    most_new_tokens,
    run_tasks,
    set_fewshot,
)
from outrider.intervals import paired_difference
from pairs import embedded


@pytest.fixture(name="folder", scope="module")
def folder_of_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def made_up(task: str, numbers: dict[int, dict[str, Any]], filter_: str = "none") -> dict[str, Any]:
    """Results of one task as the harness gives them: the metrics of each document, and their mean."""
    samples = [
        {"doc_id": i, "filter": filter_, "metrics": list(metrics), "resps": [["text"]], **metrics}
        for i, metrics in numbers.items()
    ]
    names = {name for metrics in numbers.values() for name in metrics}
    return {"samples": {task: samples}, "results": {task: {f"{name},{filter_}": 0.5 for name in names}}}


def test_documents_are_paired_whatever_their_order() -> None:
    plain = made_up("t", {i: {"f1": i / 10} for i in range(5)})
    speculative = made_up("t", {i: {"f1": i / 10 + 0.1 * (i == 2)} for i in (4, 2, 0, 1, 3)})
    (score,) = compare(plain, speculative, 0.05)
    want = paired_difference([0, 0.1, 0.2, 0.3, 0.4], [0, 0.1, 0.3, 0.3, 0.4], 0.05)
    assert score.paired is not None and score.paired.tost_p == pytest.approx(want.tost_p)
    assert (score.paired.only_first, score.paired.only_second, score.num_documents) == (0, 1, 5)
    with pytest.raises(AssertionError, match="other documents"):
        compare(plain, made_up("t", {i: {"f1": 0.0} for i in range(1, 6)}), 0.05)


def test_metrics_of_more_than_one_are_not_overrated() -> None:
    """Scores of 0 to 100 that agree everywhere are no more certain than scores of 0 to 1."""
    percent, share = (
        compare(*[made_up("t", {i: {"rouge": unit * (i % 2)} for i in range(40)})] * 2, 0.05 * unit)[0].paired
        for unit in (100, 1)
    )
    assert percent is not None and share is not None
    assert percent.tost_p == pytest.approx(share.tost_p)
    assert percent.difference.high == pytest.approx(100 * (share.difference.high or 0))


@pytest.mark.parametrize("value", [("a", "b"), [0.5], "0.5", float("nan"), None])
def test_metrics_without_a_number_for_each_document_are_not_paired(value: Any) -> None:
    results = made_up("t", {0: {"bleu": value, "em": True}, 1: {"bleu": 0.5, "em": False}})
    bleu, em = compare(results, results, 0.05)
    assert (bleu.metric, bleu.paired, bleu.speculative) == ("bleu", None, 0.5)
    assert em.paired is not None and em.paired.difference.value == 0


def test_what_a_draft_cannot_change_has_one_arm() -> None:
    plain = made_up("choice", {0: {"acc": 1.0}})
    (score,) = compare(plain, None, 0.05)
    assert (score.plain, score.speculative, score.paired) == (0.5, None, None)
    assert compare(plain, made_up("other", {0: {"acc": 1.0}}), 0.05) == [score]
    assert documents_json(plain, None) == [
        {"task": "choice", "doc_id": 0, "texts": None, "numbers": [{"metric": "acc", "filter": "none", "plain": 1.0}]}
    ]


def test_a_run_of_real_tasks(folder: Path) -> None:
    """Greedy, in float64: both arms say the same, and the record has it."""
    tasks = load_tasks(["endings", "pages", "answers"], folder)
    assert {name: is_generated(task) for name, task in tasks.items()} == {"endings": 0, "pages": 0, "answers": 1}
    set_fewshot(tasks, None)
    decoder = embedded("float64")
    plain = run_tasks(OutriderLM(decoder.plain(), batch_size=4), tasks, limit=3, is_chat=False)
    generated = {"answers": tasks["answers"]}
    speculative = run_tasks(OutriderLM(decoder, batch_size=4), generated, limit=3, is_chat=False)
    scores = compare(plain, speculative, 0.5)
    assert [(score.task, score.metric) for score in scores] == [
        ("endings", "acc"),
        ("endings", "acc_norm"),
        ("pages", "bits_per_byte"),
        ("answers", "exact_match"),
        ("answers", "bleu"),
    ]
    assert [score.num_documents for score in scores] == [3] * 5
    *_, exact, bleu = scores
    assert exact.paired is not None and exact.paired.only_first == exact.paired.only_second == 0
    assert bleu.paired is None
    documents = documents_json(plain, speculative)
    assert len(documents) == 9
    assert all(document["texts"] is None for document in documents[:6])
    for document, prompt in zip(documents[6:], PROMPTS, strict=False):
        (text,) = document["texts"]["plain"][0]
        assert document["texts"]["speculative"] == [[text]]
        options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "stop": ("e", "ou")}
        ids = embedded("float64").encode(prompt)
        assert text == decoder.generate([ids], **options)[0].text
        assert document["numbers"][0] == {"metric": "exact_match", "filter": "none", "plain": 0.0, "speculative": 0.0}


def test_solved_examples(tmp_path: Path) -> None:
    """As the task says, or the user; but a task that says 0 keeps it."""
    for stated, asked, want in [(None, None, 0), (None, 2, 2), (1, None, 1), (1, 2, 2), (0, 2, 0)]:
        folder = tmp_path / f"{stated}-{asked}"
        folder.mkdir()
        changes = {} if stated is None else {"num_fewshot": stated}
        tasks = load_tasks(["answers"], write_tasks(folder, fewshot_split="test", **changes))
        set_fewshot(tasks, asked)
        (task,) = tasks.values()
        prompts = []
        for _ in range(2):  # the same examples in every run
            lm = OutriderLM(embedded().plain(), batch_size=8, overrides={"max_new_tokens": 1})
            results = run_tasks(lm, tasks, limit=2, is_chat=False)
            prompts.append([sample["arguments"][0][0] for sample in results["samples"]["answers"]])
        assert prompts[0] == prompts[1]
        assert prompts[0][0].count(" no\n\n") == want


def test_how_much_there_is_to_generate(folder: Path) -> None:
    tasks = load_tasks(["endings", "answers"], folder)
    assert most_new_tokens(tasks, None, {}) == 12 * len(PROMPTS)
    assert most_new_tokens(tasks, 2, {}) == 24
    assert most_new_tokens(tasks, 1000, {"max_new_tokens": 5}) == 5 * len(PROMPTS)
    assert len(tasks["endings"].eval_docs) == len(CHOICES) < len(PAGES)


def test_tasks_that_cannot_be_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = __import__("lm_eval.tasks", fromlist=["TaskManager"]).TaskManager
    monkeypatch.setattr(  # without the harness's own tasks, whose files take seconds to read
        "outrider.evals.tasks.TaskManager",
        lambda include_path, **_: manager(None, include_path, include_defaults=False),
    )
    with pytest.raises(OptionError, match="--tasks = 'anwsers' is not possible: did you mean answers?"):
        load_tasks(["anwsers"], folder)
    with pytest.raises(OptionError, match="`lm_eval ls tasks` lists"):
        load_tasks(["zzz"], folder)
    with pytest.raises(OptionError, match="--include-path = '.*nowhere' is not possible: there is no such folder"):
        load_tasks(["answers"], tmp_path / "nowhere")
    damaged = write_tasks(tmp_path)
    (damaged / "answers.jsonl").unlink()
    with pytest.raises(OptionError, match=r"--tasks = 'answers' is not possible: it cannot be loaded \(\w+: .*answers"):
        load_tasks(["answers"], damaged)
    unsafe = write_tasks(tmp_path, unsafe_code=True)
    with pytest.raises(OptionError, match="it runs code that the model writes, which is not done here"):
        load_tasks(["answers"], unsafe)
