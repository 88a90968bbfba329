"""``outrider compare``: the race, the verdict, and the check of a model against itself."""

import hashlib
import io
import json
import re
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


def test_compare_reports_equal_bytes(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line says so, or how many texts differ, where and why; the document has their SHA-256."""
    words = "compare", "--target", "fable", PROMPT, *QUICK, "--acceptance", "gumbel", "--json", "-"
    ended = outrider(*words)
    assert ended.err.endswith(" times as fast, same bytes (2 texts, sha256 equal)\n")
    document = only_document(ended.out, "compare")
    (same,) = document["same_bytes"]
    assert same["promise"] == document["provenance"]["same_bytes"] == "promised" and same["differences"] == []
    texts = [embedded().generate(PROMPT, seed=seed, max_new_tokens=8, acceptance="gumbel")[0] for seed in (3, 4)]
    checksum = hashlib.sha256(json.dumps([list(one.token_ids) for one in texts]).encode()).hexdigest()
    assert [arm["texts_sha256"] for arm in document["arms"]] == [checksum] * 2
    monkeypatch.setattr("outrider.measure.arms.warm_up", lambda *_: depend_on_columns(monkeypatch))
    ended = outrider("compare", "fable", PROMPT, *QUICK, "-t", 0, "--json", "-")
    assert ended.code == 1 and " times as fast, but 1 of 1 text differs (same bytes: promised)\n" in ended.err
    document = only_document(ended.out, "compare")
    assert document["arms"][0]["texts_sha256"] != document["arms"][1]["texts_sha256"]
    assert [one["verdict"] for one in document["same_bytes"][0]["differences"]] == ["bug"]
    assert re.search(r"\ntext 0 differs from token \d+ on \(.* in plain decoding, .*: bug", ended.err)


def test_compare_races_default_arms(outrider: Outrider, tmp_path: Path) -> None:
    """The embedded pair on a built-in text; a model for chats on a task, with the draft that auto chooses."""
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


def test_on_a_terminal_arms_race_in_panels(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within the height of the terminal. Ctrl-C shows the cursor again, and the panels stay."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=66, height=12, highlight=False, _environ={})
    monkeypatch.setattr("outrider.cli.shared.options.console_for", lambda *_, **__: console)

    def frames() -> list[str]:
        """Each drawn picture, without colours and cursor; the last also has the lines that came after."""
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", file.getvalue()).split("╭─ plain")[1:]

    prompt, options = "Once [red] upon a time", {"seed": 3, "max_new_tokens": 64, "ignore_eos": True}
    words = "compare", "fable", prompt, "-n", 64, "--num-runs", 1, "--seed", 3, "--ignore-eos"
    assert outrider(*words).code == 0
    assert max(frame[: frame.rindex("╯")].count("\n") for frame in frames()) < 12
    both_under_way = r": ([1-9]|[1-5]\d) tokens.*K = 4: ([1-9]|[1-5]\d) tokens"
    assert sum(re.match(both_under_way, frame, re.DOTALL) is not None for frame in frames()) > 5
    text = embedded().generate(prompt, **options)[0].text.split()
    shown = " ".join(frames()[-1].split("╭─ fable-draft, K = 4")[1].split("╰")[0].replace("│", " ").split())
    assert shown.endswith(text[-1]) and " ".join(text[:6]) not in shown
    monkeypatch.setattr("outrider.race.events.RaceEvents.round", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert outrider(*words, "--html", tmp_path / "race.html").code == 130
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")
