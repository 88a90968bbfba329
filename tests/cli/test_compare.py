"""``outrider compare``: the race, the verdict, and the check of a model against itself."""

import hashlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import Outrider, only_document
from outrider.cli.commands import compare as command
from pairs import depend_on_columns, embedded, random_llama, save, word_tokenizer

QUICK = ("-n", "8", "--num-runs", "2", "--seed", "3")
PROMPT = "Once upon a time there was a miller"


def test_the_race_the_verdict_the_document_and_the_page(outrider: Outrider, tmp_path: Path) -> None:
    """The document has the numbers, and the page has the race, whose texts are those of the document."""
    page, to = tmp_path / "race.html", tmp_path / "a.json"
    drafts = ("--draft", "fable-draft", "--draft", "ngram", "-k", "1,3", "--dtype", "float64", "--execution", "eager")
    ended = outrider("compare", "fable", PROMPT, *QUICK, *drafts, "--html", page, "--json", to)
    assert (ended.code, ended.err) == (0, "") and "\x1b" not in ended.out
    document = only_document(to.read_text(), "compare")
    arms, texts = document["arms"], document["texts"]
    names = ["plain", "fable-draft, K = 1", "fable-draft, K = 3", "ngram, K = 1", "ngram, K = 3"]
    assert [arm["name"] for arm in arms] == list(texts) == names
    assert ended.out.startswith(f"{PROMPT}\n" + "".join(f"--- {name}\n{text}\n" for name, text in texts.items()))
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 8}
    assert texts["plain"] == embedded("float64").plain().generate(PROMPT, **options)[0].text
    assert texts[names[2]] == embedded("float64").generate(PROMPT, num_draft_tokens=3, **options)[0].text
    assert document["baseline"] == "plain" and arms[0]["speed_up"] is None
    for arm in arms:
        times = arm["time_s"]
        parts = [times[part] for part in ("prefill", "draft", "verify", "rest")]
        assert times["total"] == pytest.approx(sum(parts)) and min(parts) > 0 and arm["num_cases"] == 2
    for arm in arms[1:]:
        speed = arm["speed_up"]
        assert speed["low"] < speed["value"] < speed["high"]
        line = f"{arm['name']}: {speed['value']:.2f} [{speed['low']:.2f}, {speed['high']:.2f}] times as fast; sampled,"
        assert line in ended.out
    (recording,) = re.findall(r'id="recording">(.*?)</script>', page.read_text(encoding="utf-8"))
    start, *rounds, end = json.loads(recording)
    assert [arm["name"] for arm in start["arms"]] == names and end["measured"] == arms
    for which, text in enumerate(texts.values()):
        own = [event for event in rounds if event["arm"] == which]
        assert "".join(token["text"] for event in own for token in event["tokens"]) == text
        num_drafted = sum(len(event["drafted"]) for event in own if not event["is_truncated"])
        assert end["arms"][which]["stats"]["num_draft_tokens"] == num_drafted


@pytest.mark.parametrize(("options", "num_texts"), [(("-t", 0), "1 text"), (("--acceptance", "gumbel"), "2 texts")])
def test_the_same_bytes(options: tuple[str, ...], num_texts: str, outrider: Outrider) -> None:
    """The last line says so, of the texts that differ from each other; the document has their SHA-256."""
    ended = outrider("compare", "--target", "fable", PROMPT, *QUICK, *options, "--json", "-")
    assert ended.err.endswith(f" times as fast, same bytes ({num_texts}, sha256 equal)\n")
    document = only_document(ended.out, "compare")
    (same,) = document["same_bytes"]
    assert same["promise"] == document["provenance"]["same_bytes"] == "promised" and same["differences"] == []
    given = {"temperature": 0.0} if "-t" in options else {"acceptance": "gumbel"}
    texts = [embedded().generate(PROMPT, seed=seed, max_new_tokens=8, **given)[0].token_ids for seed in (3, 4)]
    checksum = hashlib.sha256(json.dumps([list(ids) for ids in texts]).encode()).hexdigest()
    assert [arm["texts_sha256"] for arm in document["arms"]] == [checksum] * 2


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_other_bytes(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    """How many texts differ, and where, and why. An explanation that is interrupted loses no measurement."""

    def fail(*_: object, **__: object) -> None:
        raise error  # type: ignore[misc]

    if error is not None:
        monkeypatch.setattr("outrider.certify.divergence.explain", fail)
    monkeypatch.setattr("outrider.measure.arms.warm_up", lambda *_: depend_on_columns(monkeypatch))
    ended = outrider("compare", "fable", PROMPT, *QUICK, "-t", 0, "--json", "-")
    is_stopped = isinstance(error, KeyboardInterrupt)
    assert ended.code == (130 if is_stopped else 1)
    assert " times as fast, but 1 of 1 text differs (same bytes: promised)\n" in ended.err
    document = only_document(ended.out, "compare")
    assert document["arms"][0]["texts_sha256"] != document["arms"][1]["texts_sha256"]
    (found,) = document["same_bytes"][0]["differences"]
    assert (found["verdict"], document["is_interrupted"]) == ("unexplained" if is_stopped else "bug", is_stopped)
    if not is_stopped:
        assert re.search(r"\ntext 0 differs from token \d+ on \(.* in plain decoding, .*: bug", ended.err)


def test_what_is_raced_by_default(outrider: Outrider, tmp_path: Path) -> None:
    """The embedded pair on a built-in text; a model for chats on a task, in its template, with the draft that auto
    chooses, of which a line tells."""
    quick, to = ("-n", 4, "--num-runs", 1, "--json", tmp_path / "a.json"), tmp_path / "a.json"
    ended = outrider("compare", *quick)
    options = json.loads(to.read_text())["options"]
    assert (options["target"], options["draft"], options["num_draft_tokens"]) == ("fable", ["fable-draft"], [4])
    assert options["prompt"] == command._PROMPT and "One run has no interval" in ended.out
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = save(tmp_path / "model", random_llama(context_len=256), tokenizer)
    ended = outrider("compare", folder, *quick)
    assert ended.code == 0 and "draft: suffix (look-ups): no draft for model is on this machine\n" in ended.err
    options = json.loads(to.read_text())["options"]
    assert options["chat"] and options["prompt"] == command._TASK and options["target"] == str(folder)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The text of a terminal of 66 columns and 12 lines in place of the standard output."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=66, height=12, highlight=False, _environ={})
    monkeypatch.setattr(command, "console_for", lambda *_, **__: console)
    yield file


def frames_on(screen: io.StringIO) -> list[str]:
    """Each drawn picture, without colours and cursor; the last also has the lines that came after."""
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    return ["╭─ plain" + frame for frame in shown.split("╭─ plain")[1:]]


def test_on_a_terminal_the_arms_race_side_by_side(outrider: Outrider, screen: io.StringIO) -> None:
    """Each has a panel with its text, of which the end is shown if it is long; within the height of the terminal."""
    prompt, options = "Once [red] upon a time", {"seed": 3, "max_new_tokens": 64, "ignore_eos": True}
    assert outrider("compare", "fable", prompt, "-n", 64, "--num-runs", 1, "--seed", 3, "--ignore-eos").code == 0
    frames = frames_on(screen)
    assert max(frame[: frame.rindex("╯")].count("\n") for frame in frames) < 12
    both_under_way = r"plain: ([1-9]|[1-5]\d) tokens.*K = 4: ([1-9]|[1-5]\d) tokens"
    assert sum(re.search(both_under_way, frame, re.DOTALL) is not None for frame in frames) > 5
    for name, arm in (("plain", embedded().plain()), ("fable-draft, K = 4", embedded())):
        panel = frames[-1].split(f"╭─ {name}")[1].split("╰")[0]
        words, shown = arm.generate(prompt, **options)[0].text.split(), " ".join(panel.replace("│", " ").split())
        assert shown.endswith(words[-1]) and " ".join(words[:6]) not in shown


def test_ctrl_c_in_the_race_leaves_the_terminal_as_it_was(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, screen: io.StringIO
) -> None:
    """The cursor is shown again, and the panels stay, with the text so far."""
    monkeypatch.setattr("outrider.race.events.RaceEvents.round", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    ended = outrider("compare", *QUICK, "--html", tmp_path / "a.html", "--json", tmp_path / "a.json")
    assert ended.code == 130
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")
    assert "fable-draft, K = 4: " in frames_on(screen)[-1]
    assert not (tmp_path / "a.json").exists()
