"""``outrider compare``: the race, the verdict, and the check of a model against itself."""

import hashlib
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import Outrider, only_document
from heads import write_mtp
from outrider.cli.commands import compare as command
from outrider.errors import NumericsError
from outrider.measure.arms import Arm, Case, Measurement
from outrider.records import Chunk, Stats, Timing
from pairs import depend_on_columns, embedded, random_llama, save, word_tokenizer

QUICK = ("-n", "8", "--num-runs", "2", "--seed", "3")
PROMPT = "Once upon a time there was a miller"


def test_the_race_and_the_verdict(outrider: Outrider) -> None:
    """Not on a terminal: the prompt, the texts, then a table, the speed-up in words, and the next step; no colours, no
    cursor."""
    ended = outrider("compare", PROMPT, *QUICK, "--dtype", "float64", "--execution", "eager")
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    decoder = embedded("float64")
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 8}
    race = "".join(
        f"--- {name}\n{arm.generate(PROMPT, **options)[0].text}\n"
        for name, arm in (("plain", decoder.plain()), ("fable-draft, K = 4", decoder))
    )
    assert ended.out.startswith(f"{PROMPT}\n{race}")
    (line,) = [line for line in ended.out.splitlines() if "times as fast" in line]
    number = r"\d+\.\d\d"
    speed_up = rf"{number} \[{number}, {number}\] times as fast"
    assert re.fullmatch(rf"{speed_up}; sampled, so certify tests the distribution", line)
    for arm in ("plain +–", "fable-draft +4"):
        assert re.search(rf"{arm} +{number} ±{number} +\d+ ", ended.out)  # mean and standard deviation of each arm
    for part in ("prefill", "draft", "verify", "rest"):
        assert part in ended.out
    assert max(len(line.rstrip()) for line in ended.out.splitlines()[-12:]) <= 120
    words = "--target fable --draft fable-draft --dtype float64 --execution eager -n 8 --seed 3"
    commands = f"  outrider plan {words}\n  outrider certify {words} -k 4\n"
    assert ended.out.endswith(f"{line}\nNext, with your own prompts (--prompts FILE):\n{commands}")


def test_the_document_and_the_page(outrider: Outrider, tmp_path: Path) -> None:
    """They hold what the verdict says, and the race, whose texts are those of the document."""
    page, drafts = tmp_path / "race.html", ("--draft", "fable-draft", "--draft", "ngram")
    ended = outrider("compare", PROMPT, *QUICK, "-k", "1,3", *drafts, "--html", page, "--json", "-")
    document = only_document(ended.out, "compare")
    arms = document["arms"]
    names = ["plain", "fable-draft, K = 1", "fable-draft, K = 3", "ngram, K = 1", "ngram, K = 3"]
    assert [arm["name"] for arm in arms] == list(document["texts"]) == names
    assert [(arm["draft"], arm["k"]) for arm in arms[:3]] == [(None, None), ("fable-draft", 1), ("fable-draft", 3)]
    assert document["baseline"] == "plain" and arms[0]["speed_up"] is None
    for arm in arms:
        assert arm["num_cases"] == 2
        assert 2 <= arm["stats"]["num_generated_tokens"] <= 16
        times = arm["time_s"]
        parts = [times[part] for part in ("prefill", "draft", "verify", "rest")]
        assert times["total"] == pytest.approx(sum(parts)) and min(parts) > 0
    for arm in arms[1:]:
        interval = arm["speed_up"]
        assert interval["low"] < interval["value"] < interval["high"]
        line = f"{arm['name']}: {interval['value']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}] times as fast;"
        assert line in ended.err
    assert "--- plain" in ended.err  # what people read is on standard error then
    options = document["options"]
    assert (options["num_draft_tokens"], options["num_runs"], options["prompt"]) == ([1, 3], 2, PROMPT)
    (recording,) = re.findall(r'id="recording">(.*?)</script>', page.read_text(encoding="utf-8"))
    start, *rounds, end = json.loads(recording)
    assert [arm["name"] for arm in start["arms"]] == names
    for which, text in enumerate(document["texts"].values()):
        own = [event for event in rounds if event["arm"] == which]
        assert "".join(token["text"] for event in own for token in event["tokens"]) == text
        num_drafted = sum(len(event["drafted"]) for event in own if not event["is_truncated"])
        assert end["arms"][which]["stats"]["num_draft_tokens"] == num_drafted
    assert end["measured"] == arms


@pytest.mark.parametrize(("options", "num_texts"), [(("-t", 0), "1 text"), (("--acceptance", "gumbel"), "2 texts")])
def test_the_same_bytes(options: tuple[str, ...], num_texts: str, outrider: Outrider) -> None:
    """The last line says so, of the texts that differ from each other; the document has their SHA-256."""
    ended = outrider("compare", PROMPT, *QUICK, *options, "--json", "-")
    assert f" times as fast, same bytes ({num_texts}, sha256 equal)\n" in ended.err
    words = "-n 8 -t 0" if "-t" in options else "--acceptance gumbel -n 8"
    plan = f"outrider plan --target fable --draft fable-draft {words} --seed 3"
    assert ended.err.endswith(f"(--prompts FILE):\n  {plan}\n")
    document = only_document(ended.out, "compare")
    (same,) = document["same_bytes"]
    assert same["promise"] == document["provenance"]["same_bytes"] == "promised" and same["differences"] == []
    given = {"temperature": 0.0} if "-t" in options else {"acceptance": "gumbel"}
    texts = [embedded().generate(PROMPT, seed=seed, max_new_tokens=8, **given)[0].token_ids for seed in (3, 4)]
    checksum = hashlib.sha256(json.dumps([list(ids) for ids in texts]).encode()).hexdigest()
    assert [arm["texts_sha256"] for arm in document["arms"]] == [checksum] * 2


def test_other_bytes(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward whose rows depend on their number: how many texts differ, and where, and why."""
    monkeypatch.setattr("outrider.measure.arms.warm_up", lambda *_: depend_on_columns(monkeypatch))
    ended = outrider("compare", PROMPT, *QUICK, "-k", "1,3", "-t", 0, "--json", "-")
    assert ended.code == 1
    for arm in ("fable-draft, K = 1", "fable-draft, K = 3"):
        assert re.search(rf"\n{arm}: .* times as fast, but 1 of 1 text differs \(same bytes: promised\)\n", ended.err)
    assert len(re.findall(r"\ntext 0 differs from token \d+ on \(.* in plain decoding, .*: bug", ended.err)) == 2
    arms = only_document(ended.out, "compare")["arms"]
    assert arms[0]["texts_sha256"] not in [arm["texts_sha256"] for arm in arms[1:]]


@pytest.mark.parametrize(("error", "code"), [(NumericsError("no distribution"), 1), (KeyboardInterrupt(), 130)])
def test_measurements_outlive_an_explanation(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """That fails, or is interrupted: the report comes, and says which texts differ."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("outrider.certify.divergence.explain", fail)
    monkeypatch.setattr("outrider.measure.arms.warm_up", lambda *_: depend_on_columns(monkeypatch))
    ended = outrider("compare", PROMPT, *QUICK, "-t", 0, "--json", "-")
    assert ended.code == code and f"({type(error).__name__}: {error})" in ended.err
    document = only_document(ended.out, "compare")
    (same,) = document["same_bytes"]
    assert document["is_interrupted"] is (code == 130)
    assert [one["verdict"] for one in same["differences"]] == ["unexplained"]
    assert "but 1 of 1 text differs" in ended.err


def test_a_model_for_chats_gets_a_task(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In its template; and without a draft's name the race has one, of which a line tells. The target stands first."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = save(tmp_path / "model", random_llama(context_len=256), tokenizer)
    ended = outrider("compare", folder, "-n", 4, "--num-runs", 1, "--json", tmp_path / "a.json")
    assert ended.code == 0 and "draft: suffix (look-ups): no draft for model is on this machine\n" in ended.err
    options = json.loads((tmp_path / "a.json").read_text())["options"]
    assert options["chat"] and options["prompt"] == command._TASK and options["target"] == str(folder)
    assert f"  outrider plan --target {folder} --draft suffix --chat -n 4\n" in ended.out  # no sampling is stated
    assert "\nmodel, 1 run of each arm" in ended.out and str(folder) not in ended.out.split("Next")[0]


def test_the_next_commands_sample_as_this_one(outrider: Outrider, tmp_path: Path) -> None:
    """The options given win over those that the checkpoint states; MTP layers have a name; what cannot be handed on is
    named."""
    folder = save(tmp_path / "model", random_llama(context_len=256), word_tokenizer())
    write_mtp(folder, random_llama(context_len=256), layout="qwen")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 3}')
    ended = outrider("compare", folder, "a", "-n", 4, "--num-runs", 1, "-t", 1, "-k", 2, "--stop", "zzz")
    words = f"--target {folder} --draft mtp -n 4 -t 1 --top-k 3"
    next_ = f"Next, with your own prompts (--prompts FILE; they have no --stop):\n  outrider plan {words}\n"
    assert ended.code == 0 and ended.out.endswith(f"{next_}  outrider certify {words} -k 2\n")


def test_runs_differ_in_their_seeds_and_arms_do_not(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run i of every arm has seed + i: what is paired is the same task."""
    cases: list[tuple[str, int]] = []
    monkeypatch.setattr(command, "_show_race", lambda *_: [])

    def record(arm: Arm, case: Case, options: dict[str, Any]) -> Measurement:
        cases.append((arm.name, case.seed))
        stats = Stats(num_generated_tokens=4, acceptance_histogram=(2,))
        return Measurement(arm, case, stats, Timing(0.1, 0.1, 0.1, 1.0), "", ())

    monkeypatch.setattr("outrider.measure.arms.measure", record)
    monkeypatch.setattr("outrider.measure.arms.warm_up", lambda *_: None)
    outrider("compare", PROMPT, *QUICK, "--num-runs", 3)
    assert sorted(cases) == [(name, seed) for name in ("fable-draft, K = 4", "plain") for seed in (3, 4, 5)]


def test_the_embedded_pair_runs_once_on_a_built_in_prompt(outrider: Outrider, tmp_path: Path) -> None:
    """By default. One run has no interval."""
    ended = outrider("compare", "-n", 4, "--num-runs", 1, "--json", tmp_path / "a.json")
    options = json.loads((tmp_path / "a.json").read_text())["options"]
    assert (options["target"], options["draft"], options["num_draft_tokens"]) == ("fable", ["fable-draft"], [4])
    assert options["prompt"].strip() and "One run has no interval" in ended.out
    (line,) = [line for line in ended.out.splitlines() if "times as fast" in line]
    assert "[" not in line and "standard deviation" not in line


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is written to a terminal of 66 columns and 12 lines in place of the standard output."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=66, height=12, highlight=False, _environ={})
    monkeypatch.setattr("outrider.cli.shared.options.console_for", lambda *_, **__: console)
    yield file


def frames_on(screen: io.StringIO) -> list[str]:
    """Each picture that was drawn, without colours and cursor; the last also has what came after."""
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    return ["╭─ plain" + frame for frame in shown.split("╭─ plain")[1:]]


def test_on_a_terminal_the_arms_race_side_by_side(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    """Each has a panel with its text, of which the end is shown if it is long, and a rate; within the height of the
    terminal. At no moment is an arm further ahead in time than one round of its own, until the other has ended."""
    prompt, options = "Once [red] upon a time", {"seed": 3, "max_new_tokens": 64, "ignore_eos": True}
    spent = {"plain": 0.0, "fable-draft, K = 4": 0.0}
    lead: list[float] = []
    add = command._Panel.add

    def watched(panel: Any, chunk: Chunk) -> None:
        other = min(time for name, time in spent.items() if name != panel.name)
        lead.append(spent[panel.name] - other)
        spent[panel.name] = math.inf if chunk.finish_reason else spent[panel.name] + chunk.timing.total_s
        add(panel, chunk)

    monkeypatch.setattr(command._Panel, "add", watched)
    ended = outrider("compare", prompt, "-n", 64, "--num-runs", 1, "--seed", 3, "--ignore-eos")
    assert ended.code == 0 and max(lead) <= 0
    frames = frames_on(screen)
    assert len(frames) > 64  # one for each round at least
    assert max(frame[: frame.rindex("╯")].count("\n") for frame in frames) < 12
    both_under_way = r"plain: ([1-9]|[1-5]\d) tokens.*K = 4: ([1-9]|[1-5]\d) tokens"
    assert sum(re.search(both_under_way, frame, re.DOTALL) is not None for frame in frames) > 5
    for name, arm in (("plain", embedded().plain()), ("fable-draft, K = 4", embedded())):
        panel = frames[-1].split(f"╭─ {name}")[1].split("╰")[0]
        assert re.match(r": 64 tokens in \d+\.\d\d s, [\d.]+ tokens/s ?─*╮", panel)
        text = arm.generate(prompt, **options)[0].text
        assert len(text) > 3 * 62  # more than the panel has room for
        words, shown_words = text.split(), " ".join(panel.replace("│", " ").split())
        assert shown_words.endswith(words[-1]) and " ".join(words[:6]) not in shown_words
    assert "times as fast" in frames[-1]


def test_ctrl_c_in_the_race_leaves_the_terminal_as_it_was(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, screen: io.StringIO
) -> None:
    """The cursor is shown again, and the panels with what was written so far stay."""
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


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-runs", 0), "--num-runs = 0 is invalid: a whole number >= 1"),
        (("--draft", "none"), "there is nothing to compare"),
    ],
)
def test_a_race_that_is_none(outrider: Outrider, arguments: tuple[object, ...], message: str) -> None:
    assert message in outrider("compare", *arguments).error
