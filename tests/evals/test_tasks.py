"""Tasks and groups as they are loaded, and run by two arms."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lm_eval import evaluate
from lm_eval.tasks import TaskManager

from harness_tasks import CHOICES, PAGES, PROMPTS, write_group, write_groups, write_tasks
from outrider.decoder import Decoder
from outrider.errors import OptionError
from outrider.evals.harness import OutriderLM
from outrider.evals.scores import TaskResult, compare, documents_json
from outrider.evals.tasks import is_generated, load_tasks, most_new_tokens, run_in_turn, run_task, set_fewshot
from pairs import embedded


@pytest.fixture(name="folder", scope="module")
def folder_of_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_groups(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(name="reads_defaults")
def without_defaults(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The harness's own tasks are not read, which takes seconds: a list to see when they would have been."""
    reads: list[bool] = []

    def noted(include_path: Path, include_defaults: bool = True) -> TaskManager:
        reads.append(include_defaults)
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("outrider.evals.tasks.TaskManager", noted)
    return reads


def run(decoder: Decoder, tasks: dict[str, Any], **options: Any) -> list[TaskResult]:
    settings = {"batch_size": 4, "seed": 0, "overrides": {}, "limit": 3, "chat": None} | options
    return list(run_in_turn(tasks.values(), decoder.plain(), decoder, progress=lambda *_: nullcontext(id), **settings))


def test_a_run_of_real_tasks(folder: Path) -> None:
    """Greedy, in float64: both arms say the same, and the record has it."""
    tasks, groups = load_tasks(["endings", "pages", "answers"], folder)
    assert {name: is_generated(task) for name, task in tasks.items()} == {"endings": 0, "pages": 0, "answers": 1}
    assert groups == []
    set_fewshot(tasks, None)
    decoder = embedded("float64")
    results = run(decoder, tasks)
    scores = compare(results, [], 0.5)
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
    documents = documents_json(results)
    assert len(documents) == 9
    assert all(document["texts"] is None for document in documents[:6])
    for document, prompt in zip(documents[6:], PROMPTS, strict=False):
        (text,) = document["texts"]["plain"][0]
        assert document["texts"]["speculative"] == [[text]]
        options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "stop": ("e", "ou")}
        ids = embedded("float64").encode(prompt)
        assert text == decoder.generate([ids], **options)[0].text
        assert document["numbers"][0] == {"metric": "exact_match", "filter": "none", "plain": 0.0, "speculative": 0.0}


def test_no_two_requests_have_the_same_seed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across all tasks of an arm; the arms share their seeds."""
    tasks, _ = load_tasks(["few", "endings", "answers"], folder)
    seeds: list[list[int]] = []
    complete = Decoder.complete

    def noted(self: Decoder, prompts: Any, **options: Any) -> Any:
        seeds.append(sorted(own["seed"] for _, own in prompts))
        return complete(self, prompts, **options)

    monkeypatch.setattr(Decoder, "complete", noted)
    *_, result = run(embedded(), tasks, seed=7)
    assert seeds == [[7, 8], [7, 8], [9, 10, 11], [9, 10, 11]]
    assert result.other is not None and result.other.stats is not None and result.plain.stats is not None
    assert result.other.stats.num_draft_tokens > 0 == result.plain.stats.num_draft_tokens


def test_groups_and_tags(folder: Path, reads_defaults: list[bool]) -> None:
    """A local group needs none of the harness's own files; its aggregates are those that the harness makes."""
    tasks, groups = load_tasks(["all"], folder)
    assert reads_defaults == [False]
    assert list(tasks) == ["endings", "answers", "few"] and [group.name for group in groups] == ["all", "fables"]
    assert list(load_tasks(["short"], folder)[0]) == ["few"]
    assert reads_defaults[1:] == [False, True], "another task of the harness may have the same tag"
    assert list(load_tasks(["fables", "answers"], folder)[0]) == ["answers", "few"]

    scores = {(score.task, score.metric): score for score in compare(run(embedded("float64"), tasks), groups, 0.5)}
    lm = OutriderLM(embedded("float64").plain(), batch_size=4)
    whole: Any = evaluate(lm, {"tasks": tasks, "groups": {g.name: g for g in groups}}, limit=3, bootstrap_iters=0)
    for (name, metric), weighting, num_documents in [
        (("fables", "exact_match"), "equal", 5),
        (("fables", "bleu"), "equal", 5),
        (("all", "acc"), "size", 3),
        (("all", "exact_match"), "size", 5),
    ]:
        score = scores[name, metric]
        assert (score.weighting, score.num_documents) == (weighting, num_documents)
        assert score.plain == pytest.approx(whole["groups"][name][f"{metric},none"])
        assert score.other == (None if metric == "acc" else pytest.approx(score.plain))
        assert (score.paired is not None) == (metric == "exact_match")
    assert list(scores)[-4:] == [("all", "acc"), ("all", "exact_match"), ("fables", "exact_match"), ("fables", "bleu")]


@pytest.mark.usefixtures("reads_defaults")
def test_a_task_with_two_settings_has_no_one_score(tmp_path: Path) -> None:
    write_group(write_groups(tmp_path), "more", [{"task": "few", "num_fewshot": 1}], [{"metric": "bleu"}])
    with pytest.raises(OptionError, match="--tasks = 'more' is invalid: few occurs twice with different settings"):
        load_tasks(["few", "more"], tmp_path)


def test_solved_examples(tmp_path: Path) -> None:
    """As the task says, or the user; but a task that says 0 keeps it."""
    for stated, asked, want in [(None, None, 0), (None, 2, 2), (1, None, 1), (1, 2, 2), (0, 2, 0)]:
        folder = tmp_path / f"{stated}-{asked}"
        folder.mkdir()
        changes = {} if stated is None else {"num_fewshot": stated}
        tasks, _ = load_tasks(["answers"], write_tasks(folder, fewshot_split="test", **changes))
        set_fewshot(tasks, asked)
        (task,) = tasks.values()
        prompts = []
        for _ in range(2):  # the same examples in every run
            lm = OutriderLM(embedded().plain(), batch_size=8, overrides={"max_new_tokens": 1})
            result = run_task(lm, task, limit=2, chat=None)
            prompts.append([sample["arguments"][0][0] for sample in result.samples])
        assert prompts[0] == prompts[1]
        assert prompts[0][0].count(" no\n\n") == want


def test_how_much_there_is_to_generate(folder: Path) -> None:
    tasks, _ = load_tasks(["endings", "answers"], folder)
    assert most_new_tokens(tasks, None, {}) == 12 * len(PROMPTS)
    assert most_new_tokens(tasks, 2, {}) == 24
    assert most_new_tokens(tasks, 1000, {"max_new_tokens": 5}) == 5 * len(PROMPTS)
    assert len(tasks["endings"].eval_docs) == len(CHOICES) < len(PAGES)


@pytest.mark.usefixtures("reads_defaults")
def test_tasks_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--tasks = 'anwsers' is invalid: did you mean answers?"):
        load_tasks(["anwsers"], folder)
    with pytest.raises(OptionError, match="`lm_eval ls tasks` lists"):
        load_tasks(["zzz"], folder)
    with pytest.raises(OptionError, match="--include-path = '.*nowhere' is invalid: there is no such folder"):
        load_tasks(["answers"], tmp_path / "nowhere")
    write_group(tmp_path, "empty", [], [])
    with pytest.raises(OptionError, match="--tasks = 'empty' is invalid: it contains no task"):
        load_tasks(["empty"], tmp_path)
    damaged = write_tasks(tmp_path)
    (damaged / "answers.jsonl").unlink()
    with pytest.raises(OptionError, match=r"--tasks = 'answers' is invalid: it cannot be loaded \(\w+: .*answers"):
        load_tasks(["answers"], damaged)
    unsafe = write_tasks(tmp_path, unsafe_code=True)
    with pytest.raises(OptionError, match="it runs generated code, which is not supported"):
        load_tasks(["answers"], unsafe)
