"""The lm-evaluation-harness as a client: its ``local-completions`` gets the numbers of our model of the harness."""

from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from servers import running

from harness_tasks import TASKS, write_tasks
from outrider.evals.harness import OutriderLM
from pairs import embedded


def _numbers(value: Any) -> list[float]:
    """All that the model answered to a document: numbers as they are."""
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, bool | int | float) else []


def test_scores_through_the_server_are_those_without(tmp_path: Path) -> None:
    """With the server's tokenizer alone."""
    decoder = embedded("float64")
    folder = write_tasks(tmp_path)

    def samples(lm: Any) -> dict[str, Any]:
        tasks = TaskManager(include_path=str(folder), include_defaults=False)
        found = lm_eval.simple_evaluate(lm, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0)
        return {name: [one["resps"] for one in found["samples"][name]] for name in TASKS}

    with running(decoder, context_len=decoder.target.context_len) as server:
        client = get_model("local-completions")(
            base_url=f"{server.url}/v1/completions",
            model="toy",
            tokenizer_backend="remote",
            max_length=decoder.target.context_len,
            batch_size=4,
        )
        through_server = samples(client)
    without = samples(OutriderLM(decoder.plain(), batch_size=4))
    assert through_server["answers"] == without["answers"]
    for name in ("endings", "pages"):
        assert _numbers(through_server[name]) == pytest.approx(_numbers(without[name]), abs=1e-9)
        assert len(_numbers(without[name])) >= len(without[name])
