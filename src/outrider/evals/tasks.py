"""Tasks of the harness: loading by name, and running both arms.

A draft can only affect generated text: tasks that score the likelihood of given text run once, with the target. Another
target runs all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval import evaluate
from lm_eval.api.group import Group
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager

from outrider.decoder import Decoder
from outrider.errors import OptionError
from outrider.evals.harness import OutriderLM, Progress, task_sampling
from outrider.evals.scores import ArmResult, TaskResult
from outrider.records import Stats
from outrider.text.chat import ChatOptions


def load_tasks(names: Sequence[str], include_path: Path | None) -> tuple[dict[str, Any], list[Group]]:
    """Load the harness's tasks by name, with the groups that aggregate their scores. A tag selects all of its tasks.

    Args:
        names: of tasks, groups and tags.
        include_path: a folder of task files, in addition to the harness's own.

    Raises:
        OptionError: the task is unknown, its data are not available, or it needs something unsupported.
    """
    manager = None
    if include_path is not None:
        if not include_path.is_dir():
            raise OptionError("--include-path", str(include_path), "there is no such folder")
        manager = TaskManager(include_path=include_path, include_defaults=False)
    if manager is None or not all(_is_complete(name, manager) for name in names):
        manager = TaskManager(include_path=include_path)  # with the harness's own: reading them takes seconds
    tasks: dict[str, Any] = {}
    groups: dict[str, Group] = {}
    for name in names:
        if name not in manager.all_tasks:
            nearest = difflib.get_close_matches(name, manager.all_tasks, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else "`lm_eval ls tasks` lists the known ones"
            raise OptionError("--tasks", name, remedy)
        try:
            loaded = manager.load([name])
        except Exception as error:  # any failure of the libraries on damaged files or missing data
            reason = " ".join(str(error).split())[:300]
            raise OptionError("--tasks", name, f"it cannot be loaded ({type(error).__name__}: {reason})") from None
        if not loaded["tasks"]:
            raise OptionError("--tasks", name, "it contains no task")
        groups |= loaded["groups"]
        members = [task for group in loaded["groups"].values() for task in group.get_all_tasks()]
        for task in [*loaded["tasks"].values(), *members]:
            if tasks.setdefault(task.task_name, task).dump_config() != task.dump_config():
                raise OptionError(
                    "--tasks", name, f"{task.task_name} occurs twice with different settings: run them one by one"
                )
    for name, task in tasks.items():
        for flag, what in (("UNSAFE_CODE", "runs generated code"), ("MULTIMODAL", "is not text-only")):
            if getattr(task, flag, False):
                raise OptionError("--tasks", name, f"it {what}, which is not supported")
    return tasks, list(groups.values())


def _is_complete(name: str, manager: TaskManager) -> bool:
    """Whether a manager without the harness's own files knows all members of a task or group. (Tags, and tasks defined
    inside a group, count as unknown.)"""
    if name in manager.all_groups:
        members = (manager.task_index[name].cfg or {}).get("task") or []
        return all(isinstance(member, str) and _is_complete(member, manager) for member in members)
    return name in manager.all_subtasks


def is_generated(task: Any) -> bool:
    """Whether a task generates, so that a draft can be used."""
    return bool(task.OUTPUT_TYPE == "generate_until")


def most_new_tokens(tasks: Mapping[str, Any], limit: int | None, overrides: Mapping[str, Any]) -> int:
    """Upper bound of the tokens that one arm generates for tasks.

    Raises:
        OptionError: a task uses an unsupported option.
    """
    total = 0
    for task in tasks.values():
        if is_generated(task):
            num_documents = len(task.eval_docs)
            each = task_sampling(task.get_config("generation_kwargs") or {}, overrides).max_new_tokens
            total += each * (num_documents if limit is None else min(limit, num_documents))
    return total


def set_fewshot(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    """Set the number of solved examples per prompt; None: the task's own. As in the harness, a task with 0 keeps it,
    and the default is 0."""
    for task in tasks.values():
        stated = task.get_config("num_fewshot")
        if stated != 0:
            task.set_config(key="num_fewshot", value=(stated or 0) if num_fewshot is None else num_fewshot)


def run_task(lm: OutriderLM, task: Any, *, limit: int | None, chat: ChatOptions | None) -> ArmResult:
    """Run a task in the harness. Can be repeated.

    Args:
        limit: documents; None for all.
        chat: options of the model's chat template, for prompts as chats; None: as text.

    Raises:
        OutriderError: see ``OutriderLM``.
    """
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)  # identical examples in every run
    name = task.task_name
    results: dict[str, Any] = evaluate(
        lm,
        {"tasks": {name: task}, "groups": {}},
        limit=limit,
        system_instruction=None if chat is None else chat.system,
        apply_chat_template=chat is not None,
        fewshot_as_multiturn=chat is not None,
        bootstrap_iters=0,
    )
    return ArmResult(results["results"][name], results["samples"][name])


def run_in_turn(
    tasks: Iterable[Any],
    plain: Decoder,
    other: Decoder | None,
    *,
    batch_size: int,
    seed: int,
    overrides: Mapping[str, Any],
    limit: int | None,
    chat: ChatOptions | None,
    progress: Progress,
) -> Iterator[TaskResult]:
    """Run each task with both arms, task by task, so that finished tasks can be reported.

    Args:
        other: the target with a draft, for tasks that generate (None if there are none); or another target.
        chat: options of the chat template; None: no chats.
        seed: of the first request to generate. The arms share their seeds; all requests of an arm have different ones.

    Raises:
        OutriderError: see ``OutriderLM``.
    """
    num_generated = 0
    arm = "speculative" if other is None or other.target is plain.target else "against"

    def run(task: Any, arm: str, decoder: Decoder) -> tuple[ArmResult, int]:
        """Also returns the number of requests to generate."""
        counts: list[Stats] = []
        lm = OutriderLM(
            decoder,
            batch_size=batch_size,
            seed=seed + num_generated,
            overrides=overrides,
            chat=chat,
            progress=lambda what, total: progress(f"{task.task_name}, {arm}: {what}", total),
            on_generated=lambda _, stats: counts.append(stats),
        )
        result = run_task(lm, task, limit=limit, chat=chat)
        return replace(result, stats=sum(counts, Stats()) if counts else None), len(counts)

    for task in tasks:
        first, num_requests = run(task, "plain", plain)
        second = None
        if is_generated(task) or arm == "against":
            assert other is not None
            second, _ = run(task, arm, other)
        num_generated += num_requests
        yield TaskResult(task.task_name, first, second, arm)
