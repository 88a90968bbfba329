"""``outrider latency``: every target, draft and K, in turn."""

from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.text.example_prompts import PROMPTS


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.text.example_prompts.PROMPTS", PROMPTS[:3])


def test_the_document_the_table_and_the_page(outrider: Outrider, tmp_path: Path) -> None:
    """All arms measure the same number of tokens on the same prompts, whatever they say: end tokens are ignored."""
    page = tmp_path / "speed-up.html"
    drafts = "--draft", "fable-draft", "--draft", "ngram", "--draft", "none"
    ended = outrider("latency", "-n", 4, "-k", "1-2", *drafts, "--html", page, "--json", "-")
    document = only_document(ended.out, "latency")
    arms = document["arms"]
    assert [(arm["draft"], arm["k"]) for arm in arms] == [
        (None, None),
        ("fable-draft", None),
        ("fable-draft", 1),
        ("fable-draft", 2),
        ("ngram", 1),
        ("ngram", 2),
    ]
    assert document["baseline"] == arms[0]["name"] and document["num_prompts"] == 3
    assert len({arm["name"] for arm in arms}) == len(arms)
    for arm in arms:
        assert arm["num_cases"] == 3
        assert arm["stats"]["num_generated_tokens"] == 12
        assert (arm["stats"]["num_draft_tokens"] > 0) == (arm["k"] is not None)
        assert len(arm["stats"]["drafted_histogram"]) <= (arm["k"] or 0) + 1
        assert arm["ms_per_token"]["mean"] > 0 and arm["ms_per_token"]["std"] > 0 and arm["prefill_ms"]["mean"] > 0
        assert arm["tokens_per_s"] == pytest.approx(12 / (arm["time_s"]["total"] - arm["time_s"]["prefill"]))
    assert document["peak_memory_bytes"] > 2**24
    assert (document["options"]["num_draft_tokens"], document["options"]["max_new_tokens"]) == ([1, 2], 4)
    lines = [line.split() for line in ended.err.splitlines()]
    shown = [tuple(words[:2]) for words in lines if words and words[0] in ("fable", "fable-draft") and len(words) > 4]
    assert shown == [
        ("fable", "alone"),
        ("fable-draft", "alone"),
        ("fable-draft", "1"),
        ("fable-draft", "2"),
        ("fable", "alone:"),
    ]
    assert "fable, 3 prompts, 4 tokens each" in ended.err
    assert "mean ± standard deviation" in ended.err and "Peak memory" in ended.err
    assert page.read_text(encoding="utf-8").count("<svg") == 2 and f"Page: {page}" in ended.err.replace("\n", "")


def test_by_default_k_is_1_to_8_over_15_prompts(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.text.example_prompts.PROMPTS", PROMPTS)
    monkeypatch.setattr("outrider.bench.run.warm_up", lambda *_: None)
    asked: list[Any] = []

    def stop(arms: Any, cases: Any, options: dict[str, Any]) -> None:
        asked.extend((arms, cases, options))
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.bench.run.interleave", stop)
    assert outrider("latency").code == 130
    arms, cases, options = asked
    assert [arm.num_draft_tokens for arm in arms] == [None, None, 1, 2, 3, 4, 5, 6, 7, 8]
    assert [case.prompt for case in cases] == [arms[0].decoder.encode(one) for one in PROMPTS] and len(PROMPTS) == 15
    assert [case.seed for case in cases] == list(range(15))
    assert options["max_new_tokens"] == 64 and options["ignore_eos"] is True


def test_ctrl_c_reports_what_is_complete(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that every arm has done; exit code 130."""
    from outrider.bench import run

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
