"""``outrider latency``: every target, draft and K, in turn."""

from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.text.example_prompts import PROMPTS

QUICK = ("-n", "4", "-k", "1-2")


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.text.example_prompts.PROMPTS", PROMPTS[:3])


def test_the_table(outrider: Outrider) -> None:
    """The target alone, the draft alone, then each K; and what the numbers mean."""
    ended = outrider("latency", *QUICK)
    assert (ended.code, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    arms = [tuple(words[:2]) for words in lines if words and words[0] in ("fable", "fable-draft") and len(words) > 4]
    assert arms == [("fable", "alone"), ("fable-draft", "alone"), ("fable-draft", "1"), ("fable-draft", "2")]
    assert "fable, 3 prompts, 4 tokens each" in ended.out
    assert "standard deviation over the prompts" in ended.out and "peak memory" in ended.out


def test_the_document(outrider: Outrider) -> None:
    """All arms measure the same number of tokens on the same prompts, whatever they say: end tokens are ignored."""
    ended = outrider("latency", *QUICK, "--draft", "fable-draft", "--draft", "ngram", "--json", "-")
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


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot(outrider: Outrider, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"speed-up.{suffix}"
    ended = outrider("latency", "-n", 2, "-k", 1, "--plot", path)
    assert ended.code == 0
    assert path.stat().st_size > 1000
    assert str(path) in ended.out


def test_drafts_that_are_no_model_have_no_time_of_their_own(outrider: Outrider) -> None:
    document = only_document(outrider("latency", "-n", 2, "-k", 1, "--draft", "none", "--json", "-").out, "latency")
    assert [arm["draft"] for arm in document["arms"]] == [None]


def test_by_default_k_is_1_to_8_over_15_prompts(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.text.example_prompts.PROMPTS", PROMPTS)
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


def test_bad_plot_files_are_refused_before_the_work(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", lambda self: pytest.fail("loaded"))
    (tmp_path / "folder.png").mkdir()
    assert "the name must end in .png" in outrider("latency", "--plot", tmp_path / "plot.jpeg").error
    assert "there is no folder" in outrider("latency", "--plot", tmp_path / "no" / "plot.png").error
    assert "folder.png" in outrider("latency", "--plot", tmp_path / "folder.png").error
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "pip install '.[plot]'" in outrider("latency", "--plot", tmp_path / "plot.png").error


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
