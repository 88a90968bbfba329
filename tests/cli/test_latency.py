"""``outrider latency``: every target, draft and K, in turn."""

from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.measure import arms as run
from outrider.text.example_prompts import PROMPTS


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.text.example_prompts.PROMPTS", PROMPTS[:3])


def test_the_document_and_the_table(outrider: Outrider) -> None:
    """All arms measure the same number of tokens on the same prompts, whatever they say: end tokens are ignored."""
    drafts = "--draft", "fable-draft", "--draft", "ngram", "--draft", "none"
    ended = outrider("latency", "-n", 4, "-k", "1-2", *drafts, "--json", "-")
    document = only_document(ended.out, "latency")
    arms = document["arms"]
    drafts = [(None, None), *(("fable-draft", k) for k in (None, 1, 2)), ("ngram", 1), ("ngram", 2)]
    assert [(arm["draft"], arm["k"]) for arm in arms] == drafts
    assert document["baseline"] == arms[0]["name"] and document["num_prompts"] == 3
    assert len({arm["name"] for arm in arms}) == len(arms)
    for arm in arms:
        assert arm["num_cases"] == 3
        assert arm["stats"]["num_generated_tokens"] == 12
        assert (arm["stats"]["num_draft_tokens"] > 0) == (arm["k"] is not None)
        assert len(arm["stats"]["drafted_histogram"]) <= (arm["k"] or 0) + 1
        assert arm["ms_per_token"]["mean"] > 0 and arm["ms_per_token"]["std"] > 0 and arm["prefill_ms"]["mean"] > 0
        assert arm["tokens_per_s"] == pytest.approx(12 / (arm["time_s"]["total"] - arm["time_s"]["prefill"]))


def test_ctrl_c_reports_what_is_complete(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that every arm has done; exit code 130."""
    interleave = run.interleave

    def interrupted(*arguments: Any) -> Any:
        measurements = interleave(*arguments)
        for _ in range(8):  # three arms: two cases, and two thirds of another
            yield next(measurements)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "interleave", interrupted)
    ended = outrider("latency", "-k", "2", "-n", 4, "--json", tmp_path / "a.json")
    document = only_document((tmp_path / "a.json").read_text(), "latency")
    assert ended.code == 130 and "fable, 2 prompts" in ended.out
    assert document["is_interrupted"] and {arm["num_cases"] for arm in document["arms"]} == {2}
