"""Tasks of the harness by two arms, and the scores of the two held against each other document by document.

A draft can change only what is generated. Tasks that score the likelihood of given text are run once, by the target.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import evaluate
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager

from outrider.errors import OptionError
from outrider.evals.harness import OutriderLM, task_sampling
from outrider.intervals import PairedDifference, paired_difference


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task.

    Attributes:
        filter: by which the harness takes the answer out of the text.
        plain, speculative: as the harness aggregates them; None for an arm that was not run.
        paired: speculative minus plain, in the mean of the documents' own numbers; None where there is one arm, or
            where the metric has no number for each document (BLEU over a corpus, say).
    """

    task: str
    metric: str
    filter: str
    num_documents: int
    plain: float
    speculative: float | None
    paired: PairedDifference | None

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "metric": self.metric,
            "filter": self.filter,
            "num_documents": self.num_documents,
            "plain": self.plain,
            "speculative": self.speculative,
            "paired": asdict(self.paired) | {"is_equivalent": self.paired.is_equivalent} if self.paired else None,
        }


def load_tasks(names: Sequence[str], include_path: Path | None) -> dict[str, Any]:
    """The harness's tasks by name; groups and tags are the tasks in them.

    Args:
        include_path: a folder of task files, beside the harness's own.

    Raises:
        OptionError: there is no such task, its data cannot be had, or it needs what is not done here.
    """
    manager = None
    if include_path is not None:
        if not include_path.is_dir():
            raise OptionError("--include-path", str(include_path), "there is no such folder")
        manager = TaskManager(include_path=include_path, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_subtasks):  # reading all of the harness's takes seconds
        manager = TaskManager(include_path=include_path)
    tasks: dict[str, Any] = {}
    for name in names:
        if name not in manager.all_tasks:
            nearest = difflib.get_close_matches(name, manager.all_tasks, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else "`lm_eval ls tasks` lists those there are"
            raise OptionError("--tasks", name, remedy)
        try:
            tasks |= manager.load([name])["tasks"]
        except Exception as error:  # whatever a damaged file or missing data makes the libraries stumble over
            reason = " ".join(str(error).split())[:300]
            raise OptionError("--tasks", name, f"it cannot be loaded ({type(error).__name__}: {reason})") from None
    for name, task in tasks.items():
        for flag, what in (("UNSAFE_CODE", "runs code that the model writes"), ("MULTIMODAL", "is not of text alone")):
            if getattr(task, flag, False):
                raise OptionError("--tasks", name, f"it {what}, which is not done here")
    return tasks


def is_generated(task: Any) -> bool:
    """Whether a task's answers are generated, so that a draft has a part in them."""
    return bool(task.OUTPUT_TYPE == "generate_until")


def most_new_tokens(tasks: Mapping[str, Any], limit: int | None, overrides: Mapping[str, Any]) -> int:
    """At most so many tokens will be generated for tasks, by one arm.

    Raises:
        OptionError: a task wants what Outrider does not do.
    """
    total = 0
    for task in tasks.values():
        if is_generated(task):
            num_documents = len(task.eval_docs)
            each = task_sampling(task.get_config("generation_kwargs") or {}, overrides).max_new_tokens
            total += each * (num_documents if limit is None else min(limit, num_documents))
    return total


def set_fewshot(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    """Solved examples in each prompt; None: as the task says. The harness's rules: a task that says 0 keeps it, and one
    that says nothing has none."""
    for task in tasks.values():
        stated = task.get_config("num_fewshot")
        if stated != 0:
            task.set_config(key="num_fewshot", value=(stated or 0) if num_fewshot is None else num_fewshot)


def run_tasks(lm: OutriderLM, tasks: Mapping[str, Any], *, limit: int | None, is_chat: bool) -> dict[str, Any]:
    """What the harness says of tasks, with its record of every document. The same tasks may be run again.

    Args:
        limit: documents of each task; None for all.
        is_chat: prompts are put into the model's chat template.

    Raises:
        OutriderError: see ``OutriderLM``.
    """
    for task in tasks.values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)  # the same examples in every run
    results: dict[str, Any] = evaluate(
        lm,
        {"tasks": dict(tasks), "groups": {}},
        limit=limit,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=is_chat,
        bootstrap_iters=0,
    )
    return results


def compare(plain: Mapping[str, Any], speculative: Mapping[str, Any] | None, margin: float) -> list[Score]:
    """The scores of two runs, paired by document.

    Args:
        plain: results of all tasks.
        speculative: of those that are generated; None if there are none.
        margin: means closer than this are equivalent, in the unit of each metric.
    """
    scores: list[Score] = []
    for task, samples in plain["samples"].items():
        others = speculative["samples"].get(task) if speculative else None
        for metric, filter_ in _metrics(samples):
            key = f"{metric},{filter_}"
            first = _numbers(samples, metric, filter_)
            second = _numbers(others, metric, filter_) if others else None
            paired = None
            if first is not None and second is not None:
                assert first.keys() == second.keys(), "the arms have run other documents"
                values = list(first.values()), [second[doc_id] for doc_id in first]
                span = max(1.0, max(map(max, values)) - min(map(min, values)))
                paired = paired_difference(*values, margin, span=span)
            scores.append(
                Score(
                    task=task,
                    metric=metric,
                    filter=filter_,
                    num_documents=sum(sample["filter"] == filter_ for sample in samples),
                    plain=plain["results"][task][key],
                    speculative=speculative["results"][task][key] if speculative and others else None,
                    paired=paired,
                )
            )
    return scores


def documents_json(plain: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Every document: what the arms wrote, and its numbers in each metric."""
    documents = []
    for task, samples in plain["samples"].items():
        arms = {"plain": samples}
        if speculative and task in speculative["samples"]:
            arms["speculative"] = speculative["samples"][task]
        numbers = {
            (metric, filter_): [_numbers(arm, metric, filter_) or {} for arm in arms.values()]
            for metric, filter_ in _metrics(samples)
        }
        texts = {arm: {sample["doc_id"]: sample["resps"] for sample in arms[arm]} for arm in arms}
        for doc_id in texts["plain"]:
            documents.append(
                {
                    "task": task,
                    "doc_id": doc_id,
                    "texts": {arm: texts[arm][doc_id] for arm in arms} if len(arms) > 1 else None,
                    "numbers": [
                        {"metric": metric, "filter": filter_}
                        | {arm: values.get(doc_id) for arm, values in zip(arms, by_arm, strict=True)}
                        for (metric, filter_), by_arm in numbers.items()
                    ],
                }
            )
    return documents


def _metrics(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The metrics of a task, each with its filter."""
    return list(dict.fromkeys((metric, sample["filter"]) for sample in samples for metric in sample["metrics"]))


def _numbers(samples: Sequence[Mapping[str, Any]], metric: str, filter_: str) -> dict[int, float] | None:
    """A metric's number for each document; None where a document has none, or none that is finite."""
    values = {
        sample["doc_id"]: sample[metric]
        for sample in samples
        if sample["filter"] == filter_ and metric in sample["metrics"]
    }
    if not all(isinstance(value, (Real, np.bool_)) and math.isfinite(value) for value in values.values()):
        return None
    return {doc_id: float(value) for doc_id, value in values.items()}
