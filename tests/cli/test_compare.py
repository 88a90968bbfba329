"""``outrider compare``: the race, the verdict, and the check of a model against itself."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import Ended, Outrider, only_document
from outrider.bench.run import Arm, Case, Measurement
from outrider.cli.commands import compare as command
from outrider.records import Chunk, Stats, Timing
from pairs import embedded, zoo

QUICK = ("-n", "8", "--num-runs", "2", "--seed", "3")
PROMPT = "Once upon a time there was a miller"


def document_of(ended: Ended) -> dict[str, Any]:
    return only_document(ended.out, "compare")


def test_the_race_and_the_verdict(outrider: Outrider) -> None:
    """Not on a terminal: the prompt, the texts, then a table, then the speed-up in words; no colours, no cursor."""
    ended = outrider("compare", PROMPT, *QUICK)
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    decoder = embedded()
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 8}
    race = "".join(
        f"--- {name}\n{arm.generate(PROMPT, **options)[0].text}\n"
        for name, arm in (("plain", decoder.plain()), ("fable-draft, K = 4", decoder))
    )
    assert ended.out.startswith(f"{PROMPT}\n{race}")
    (line,) = [line for line in ended.out.splitlines() if "times as fast as plain" in line]
    number = r"\d+\.\d\d"
    assert re.fullmatch(rf"fable-draft, K = 4: {number} \[{number}, {number}\] times as fast as plain", line)
    for arm in ("fable +plain", "fable-draft +4"):
        assert re.search(rf"{arm} +\d+ +{number} ±{number} ", ended.out)  # mean and standard deviation of each arm
    for part in ("prefill", "draft", "verify", "rest"):
        assert part in ended.out
    assert max(len(line.rstrip()) for line in ended.out.splitlines()[-12:]) <= 120


def test_the_document(outrider: Outrider, tmp_path: Path) -> None:
    """Holds what the verdict says; the race is in it, but not in the measurements."""
    ended = outrider(
        "compare", PROMPT, *QUICK, "-k", "1,3", "--draft", "fable-draft", "--draft", "ngram", "--json", "-"
    )
    document = document_of(ended)
    arms = document["arms"]
    names = ["plain", "fable-draft, K = 1", "fable-draft, K = 3", "ngram, K = 1", "ngram, K = 3"]
    assert [arm["name"] for arm in arms] == list(document["texts"]) == names
    assert [(arm["draft"], arm["k"]) for arm in arms[:3]] == [(None, None), ("fable-draft", 1), ("fable-draft", 3)]
    assert document["baseline"] == "plain" and arms[0]["speed_up"] is None
    assert document["same_model_checks"] == []
    for arm in arms:
        assert arm["num_cases"] == 2
        assert 2 <= arm["stats"]["num_generated_tokens"] <= 16
        times = arm["time_s"]
        parts = [times[part] for part in ("prefill", "draft", "verify", "rest")]
        assert times["total"] == pytest.approx(sum(parts)) and min(parts) > 0
    for arm in arms[1:]:
        interval = arm["speed_up"]
        assert interval["low"] < interval["value"] < interval["high"]
        line = f"{arm['name']}: {interval['value']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}] times as fast"
        assert line in ended.err
    assert "--- plain" in ended.err  # what people read is on standard error then
    options = document["options"]
    assert (options["num_draft_tokens"], options["num_runs"], options["prompt"]) == ([1, 3], 2, PROMPT)


def test_runs_differ_in_their_seeds_and_arms_do_not(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run i of every arm has seed + i: what is paired is the same task."""
    cases: list[tuple[str, int]] = []
    monkeypatch.setattr(command, "_show_race", lambda *_: [])

    def record(arm: Arm, case: Case, options: dict[str, Any], on_chunk: Any = None) -> Measurement:
        cases.append((arm.name, case.seed))
        stats = Stats(num_generated_tokens=4, acceptance_histogram=(2,))
        return Measurement(arm, case, stats, Timing(0.1, 0.1, 0.1, 1.0), "")

    monkeypatch.setattr("outrider.bench.run.measure", record)
    monkeypatch.setattr("outrider.bench.run.warm_up", lambda *_: None)
    outrider("compare", PROMPT, *QUICK, "--num-runs", 3)
    assert sorted(cases) == [(name, seed) for name in ("fable-draft, K = 4", "plain") for seed in (3, 4, 5)]


def test_one_run_has_no_interval(outrider: Outrider) -> None:
    ended = outrider("compare", PROMPT, "-n", 6, "--num-runs", 1)
    assert "One run has no interval" in ended.out
    (line,) = [line for line in ended.out.splitlines() if "times as fast as plain" in line]
    assert "[" not in line and "standard deviation" not in line


def test_a_model_that_drafts_for_itself_is_never_rejected(outrider: Outrider) -> None:
    ended = outrider("compare", PROMPT, *QUICK, "--draft", "fable", "--dtype", "float64", "--json", "-")
    assert ended.code == 0
    message = "Sanity check: fable drafts for itself, and no token was rejected."
    assert message in ended.err
    (check,) = document_of(ended)["same_model_checks"]
    assert check == {
        "draft": "fable",
        "num_rejected": 0,
        "num_by_rounding": 0,
        "worst_ratio": None,
        "is_ok": True,
        "message": message,
    }


def test_the_check_knows_a_model_by_its_files(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another name, or a path from where one stands, it is still the same model."""
    monkeypatch.chdir(zoo("fable").parent)
    ended = outrider("compare", PROMPT, *QUICK, "--target", "./fable", "--draft", "fable", "--draft", "ngram")
    assert "Sanity check: fable drafts for itself" in ended.out
    assert "Sanity check: ngram" not in ended.out


@pytest.mark.parametrize(
    ("ratios", "code", "message"),
    [
        ((0.9995, 0.9992), 0, "Sanity check: fable drafts for itself; 4 rejections, all by rounding"),
        ((0.9995, 0.7), 1, "SANITY CHECK FAILED: fable drafts for itself, and 2 tokens were rejected"),
    ],
)
def test_rejections_of_a_model_by_itself(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, ratios: tuple[float, ...], code: int, message: str
) -> None:
    """By rounding they are counted, for other reasons they are a loud failure; the document is written all the same."""
    monkeypatch.setattr(command, "_show_race", lambda *_: [])

    def made_up(arm: Arm, case: Case, options: dict[str, Any], on_chunk: Any = None) -> Measurement:
        stats = Stats(num_generated_tokens=8, acceptance_histogram=(2,))
        return Measurement(arm, case, stats, Timing(0.1, 0.1, 0.1, 1.0), "", ratios if arm.draft else ())

    monkeypatch.setattr("outrider.bench.run.measure", made_up)
    ended = outrider("compare", PROMPT, *QUICK, "--draft", "fable", "--json", "-")
    assert ended.code == code
    (check,) = document_of(ended)["same_model_checks"]
    assert check["is_ok"] == (code == 0) and check["message"] in " ".join(ended.err.split())
    assert check["message"].startswith(message)
    assert (check["num_rejected"], check["worst_ratio"]) == (4, min(ratios))


def test_a_wrong_rule_is_found_out(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at work: a model that drafts for itself with probabilities that are not its own."""
    rows_of = __import__("outrider.drafters.drawing").drafters.drawing.rows_of

    def flattened(logits: Any, *others: Any) -> Any:
        return rows_of(0.5 * logits, *others)

    monkeypatch.setattr("outrider.drafters.drawing.rows_of", flattened)
    ended = outrider("compare", PROMPT, *QUICK, "--draft", "fable")
    assert ended.code == 1
    assert "SANITY CHECK FAILED" in ended.out


def terminal(monkeypatch: pytest.MonkeyPatch, *, width: int, height: int) -> io.StringIO:
    """What is written to a terminal of this size in place of the standard output."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, height=height, highlight=False, _environ={})
    monkeypatch.setattr(command, "console_for", lambda *_, **__: console)
    return screen


def frames_on(screen: io.StringIO) -> list[str]:
    """Each picture that was drawn, without colours and cursor; the last also has what came after."""
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    return ["╭─ plain" + frame for frame in shown.split("╭─ plain")[1:]]


def test_on_a_terminal_the_arms_have_panels(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its text, of which the end is shown if it is long, and a rate; within the height of the terminal."""
    screen = terminal(monkeypatch, width=66, height=12)
    prompt, options = "Once [red] upon a time", {"seed": 3, "max_new_tokens": 64, "ignore_eos": True}
    ended = outrider("compare", prompt, "-n", 64, "--num-runs", 1, "--seed", 3, "--ignore-eos")
    assert ended.code == 0
    frames = frames_on(screen)
    assert len(frames) > 64  # one for each round at least
    assert max(frame[: frame.rindex("╯")].count("\n") for frame in frames) < 12
    for name, arm in (("plain", embedded().plain()), ("fable-draft, K = 4", embedded())):
        panel = frames[-1].split(f"╭─ {name}")[1].split("╰")[0]
        assert re.match(r": 64 tokens in \d+\.\d\d s, [\d.]+ tokens/s ?─*╮", panel)
        text = arm.generate(prompt, **options)[0].text
        assert len(text) > 3 * 62  # more than the panel has room for
        words, shown_words = text.split(), " ".join(panel.replace("│", " ").split())
        assert shown_words.endswith(words[-1]) and " ".join(words[:6]) not in shown_words
    assert "times as fast as plain" in frames[-1]


def test_on_a_terminal_the_arms_race_side_by_side(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment is an arm further ahead in time than one round of its own, until the other has ended."""
    screen = terminal(monkeypatch, width=80, height=24)
    spent = {"plain": 0.0, "fable-draft, K = 4": 0.0}
    lead: list[float] = []
    add = command._Panel.add

    def watched(panel: Any, chunk: Chunk) -> None:
        other = min(time for name, time in spent.items() if name != panel.name)
        lead.append(spent[panel.name] - other)
        spent[panel.name] = math.inf if chunk.finish_reason else spent[panel.name] + chunk.timing.total_s
        add(panel, chunk)

    monkeypatch.setattr(command._Panel, "add", watched)
    outrider("compare", PROMPT, "-n", 24, "--num-runs", 1, "--ignore-eos")
    assert max(lead) <= 0
    both_under_way = r"plain: ([1-9]|1\d|2[0-3]) tokens.*K = 4: ([1-9]|1\d|2[0-3]) tokens"
    assert sum(re.search(both_under_way, frame, re.DOTALL) is not None for frame in frames_on(screen)) > 5


def test_ctrl_c_in_the_race_leaves_the_terminal_as_it_was(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cursor is shown again, and the panels with what was written so far stay."""
    screen = terminal(monkeypatch, width=80, height=24)
    add = command._Panel.add

    def interrupted(panel: Any, chunk: Chunk) -> None:
        add(panel, chunk)
        if panel.num_tokens > 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(command._Panel, "add", interrupted)
    ended = outrider("compare", PROMPT, *QUICK, "-n", 24, "--json", tmp_path / "a.json")
    assert ended.code == 130
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")
    assert "fable-draft, K = 4: " in frames_on(screen)[-1]
    assert not (tmp_path / "a.json").exists()


def test_the_race_as_a_page(outrider: Outrider, tmp_path: Path) -> None:
    """The page has all arms and measurements; its texts are those of the document."""
    page = tmp_path / "race.html"
    ended = outrider("compare", PROMPT, *QUICK, "-k", "1,3", "--html", page, "--json", "-")
    document = document_of(ended)
    (recording,) = re.findall(r'id="recording">(.*?)</script>', page.read_text(encoding="utf-8"))
    start, *rounds, end = json.loads(recording)
    assert [arm["name"] for arm in start["arms"]] == list(document["texts"])
    for which, text in enumerate(document["texts"].values()):
        own = [event for event in rounds if event["arm"] == which]
        assert "".join(token["text"] for event in own for token in event["tokens"]) == text
        num_drafted = sum(len(event["drafted"]) for event in own if not event["is_truncated"])
        assert end["arms"][which]["stats"]["num_draft_tokens"] == num_drafted
        assert (num_drafted > 0) == (which > 0)
    assert end["measured"] == document["arms"]


def test_a_page_that_cannot_be_written(outrider: Outrider, tmp_path: Path) -> None:
    assert "cannot write" in outrider("compare", "--html", tmp_path / "none" / "race.html").error
    path = tmp_path / "race"
    assert "another option" in outrider("compare", "--html", path, "--json", path).error


def test_the_default_is_the_embedded_pair_on_a_built_in_prompt(outrider: Outrider, tmp_path: Path) -> None:
    outrider("compare", "-n", 4, "--num-runs", 1, "--json", tmp_path / "a.json")
    options = json.loads((tmp_path / "a.json").read_text())["options"]
    assert (options["target"], options["draft"], options["num_draft_tokens"]) == ("fable", ["fable-draft"], [4])
    assert options["prompt"].strip()


def test_ctrl_c_ends_the_race(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_show_race", interrupted)
    ended = outrider("compare", PROMPT, *QUICK, "--json", tmp_path / "a.json")
    assert ended.code == 130
    assert not (tmp_path / "a.json").exists()


def test_a_race_without_a_draft_names_drafts(outrider: Outrider) -> None:
    """At once, before anything is loaded."""
    assert "qwen3-0.6b, qwen3-1.7b; or ngram" in outrider("compare", "--target", "qwen3-8b").error
    assert "a smaller model with the tokenizer of phi-4" in outrider("compare", "--target", "phi-4").error


def test_the_race_ends_with_the_next_step(outrider: Outrider) -> None:
    """With the options of the pair."""
    ended = outrider("compare", PROMPT, "-n", 4, "--num-runs", 1, "--dtype", "float64", "--execution", "eager")
    words = "--target fable --draft fable-draft --dtype float64 --execution eager"
    assert f"  outrider plan {words}\n  outrider certify {words}\n" in ended.out
