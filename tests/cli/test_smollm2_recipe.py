"""The recipe of drafts for SmolLM2: its prompts, and its table on the embedded pair."""

import json
import sys
from pathlib import Path

import pytest

from commands import Outrider
from scripts import script


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
