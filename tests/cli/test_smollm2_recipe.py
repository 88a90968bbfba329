"""The recipe of drafts for SmolLM2: its prompts, and its table on the embedded pair."""

import json
import sys
from pathlib import Path

import pytest

from commands import Outrider
from scripts import script


def test_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and none both for training and held out."""
    questions = [f"How many are {i} and {i}?" for i in range(40)]
    files = {
        "gsm8k_test": [{"question": one} for one in questions],
        "hellaswag_prompts": [{"prompt": f"Someone sits on {i} roofs."} for i in range(12)],
        "humaneval": [{"prompt": f"def f{i}():"} for i in range(11)],
        "spec_bench": [{"category": "math_reasoning", "turns": [one]} for one in questions[:20]]
        + [{"category": "writing", "turns": [f"Write {i} lines.", "Again."]} for i in range(15)],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "stories.txt").write_text("\n\n".join(f"Once {i} kings " + "rode away " * 50 for i in range(30)))
    monkeypatch.setattr(sys, "argv", ["prompts.py", str(tmp_path), str(tmp_path / "out"), "33"])
    script("recipes/smollm2/prompts.py").main()
    found = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in (tmp_path / "out").iterdir()
    }
    assert {name: len(rows) for name, rows in found.items()} == {
        "chat-train": 33,  # of 30 questions, 2 roofs, 1 function and 5 to write
        "chat-held-out": 40,
        "text-train": 20,
        "text-held-out": 10,
    }
    prompts = [row["prompt"] for rows in found.values() for row in rows]
    assert len(set(prompts)) == len(prompts) and {*prompts} & {*questions}
    tasks = [row["category"] for row in found["chat-held-out"]]
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(
        ("gsm8k", "hellaswag", "humaneval", "mt_bench"), 10
    )
    assert all(len(row["prompt"].split()) == 40 for row in found["text-train"])


def test_the_table(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tau is that of ``replay``, by task; a faster target gains from the same draft what its costs allow."""
    prompts = tmp_path / "prompts"
    rows = [{"prompt": f"Once upon a time there {word}", "category": word} for word in ("was", "lived")]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "logs").mkdir()
    for kind in ("chat", "text"):
        for temperature in (0, 1):
            log = tmp_path / "logs" / f"{kind}-held-out-t{temperature}.jsonl"
            how = "-t", temperature, "-n", 6, "--probs"
            assert outrider("generate", "--prompts", prompts, "--output", log, *how).code == 0
    module = script("recipes/smollm2/table.py")
    options = "--drafts fable-draft suffix --k 1 2 --tokens 4 --larger fable suffix".split()
    monkeypatch.setattr(sys, "argv", ["table.py", "fable", str(tmp_path), *options])
    module.main()
    printed = capsys.readouterr().out
    assert "tau (alpha) by task, temperature 1" in printed and "speed-up over plain decoding" in printed
    document = json.loads(printed.splitlines()[-1])
    greedy = document["measured"][0]["drafts"]
    assert greedy.keys() == {"fable-draft", "suffix"} and greedy["suffix"]["tasks"].keys() == {"was", "lived"}
    to = tmp_path / "json"
    replayed = outrider(
        *("replay", tmp_path / "logs" / "chat-held-out-t0.jsonl", "--draft", "fable-draft", "-k", 1, "--json", to)
    )
    assert replayed.code == 0
    alpha = json.loads(to.read_text())["drafts"][0]["alpha"]["value"]
    tasks = greedy["fable-draft"]["tasks"].values()
    assert sum(task["alpha"] for task in tasks) / 2 == pytest.approx(alpha)  # as many tokens each
    assert all(len(row["speed_up"]) == 3 and row["predicted"]["k"] in (1, 2) for row in greedy.values())
    assert greedy["fable-draft"]["larger"].keys() == {"same time", "same part"}
