"""The lm-evaluation-harness as a client: its ``local-completions`` gets the scores and texts of the target itself."""

from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from servers import running

from harness_tasks import TASKS, write_tasks
from outrider.measure.teacher_forcing import Text, force
from pairs import embedded


def test_scores_and_texts_through_the_server_are_the_targets(tmp_path: Path) -> None:
    """With the server's tokenizer alone."""
    decoder = embedded("float64")
    tasks = TaskManager(include_path=str(write_tasks(tmp_path)), include_defaults=False)

    def logprobs(ids: list[int], num_given: int) -> float:
        (chunk,) = force(decoder.target, [Text(ids, num_given)])
        return sum(float(one) for one in chunk.logprobs())

    with running(decoder, context_len=decoder.target.context_len) as server:
        client: Any = get_model("local-completions")(
            base_url=f"{server.url}/v1/completions",
            model="toy",
            tokenizer_backend="remote",
            max_length=decoder.target.context_len,
            batch_size=4,
        )
        found = lm_eval.simple_evaluate(client, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0)["samples"]
        num_scored = 0
        for one in found["endings"]:
            for (text, ending), [(logprob, is_greedy)] in zip(one["arguments"], one["resps"], strict=True):
                if text:
                    given, scored = client._encode_pair(text, ending)
                    assert float(logprob) == pytest.approx(logprobs([*given, *scored], len(given)), abs=1e-9)
                    (chosen,) = decoder.plain().generate([given], temperature=0.0, max_new_tokens=len(scored))
                    assert bool(is_greedy) is (chosen.token_ids == tuple(scored))
                    num_scored += 1
    assert num_scored >= 6
    for one in found["answers"]:
        ((prompt, options),) = one["arguments"]
        (done,) = decoder.plain().generate(prompt, temperature=0.0, max_new_tokens=12, stop=options["until"])
        assert one["resps"] == [[done.text]]
