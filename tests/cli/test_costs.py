"""``outrider costs``, and what is told of measuring."""

import json
import os
import time
from pathlib import Path

import pytest

from commands import Outrider, only_document
from outrider.decoding import cost_cache as kept_module
from outrider.sampling.rules import RULES
from toys import measured, table_pair

COSTS = {0: 0.001, 1: 0.0015, 2: 0.002, 3: 0.0025, 4: 0.003, 6: 0.004, 8: 0.005}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Costs of one pair at two loads, of which one is old; and a file of another version."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_module, "measure_round_costs", lambda *_: measured(COSTS))
    folder = tmp_path / "outrider" / "costs"
    target, drafter = table_pair(5)
    kept_module.round_costs(target, drafter, RULES["block"], 2, 60)
    (old,) = folder.iterdir()
    os.utime(old, (time.time() - 31 * 24 * 3600,) * 2)
    kept_module.round_costs(target, drafter, RULES["block"], 1, 60)
    (folder / "other.json").write_text(json.dumps({"0": 1.0}))
    return folder


def test_what_is_kept_is_listed(outrider: Outrider, folder: Path) -> None:
    done = outrider("costs", "--json", "-")
    document = only_document(done.out, "costs")
    new, old = document["costs"]
    assert (new["target"], new["draft"], new["num_rows"], new["is_used"]) == ("target", "draft", 1, True)
    assert (old["num_rows"], old["is_used"], document["num_unreadable"]) == (2, False, 1)
    assert new["by_k"][1] == {"k": 1, "round_ms": 1.5, "spread": 0.02, "num_rounds": 20} and new["load"] == 0.5
    assert "K=1 1.5 ±2%" in done.err and "no longer used" in done.err and "2 files in" in done.err
    assert outrider("costs", "--target", "target", "--draft", "draft").out.count("K=8 5") == 2


def test_what_is_kept_is_deleted(outrider: Outrider, folder: Path) -> None:
    assert "--target = 'fable'" in outrider("costs", "--target", "fable", "--clear").error
    assert "--draft = 'ngram'" in outrider("costs", "--draft", "ngram", "--clear").error
    assert len(list(folder.iterdir())) == 3
    assert outrider("costs", "--draft", "draft", "--clear").code == 0
    assert [file.name for file in folder.iterdir()] == ["other.json"]
    assert "--draft = 'draft'" in outrider("costs", "--draft", "draft").error
    done = outrider("costs", "--clear")
    assert done.code == 0 and "1 unreadable" in done.out and not list(folder.iterdir())
    again = outrider("costs", "--clear")
    assert again.code == 0 and "0 files in" in again.out and "Nothing to delete." in again.out


def test_what_cannot_be_deleted_is_reported(outrider: Outrider, folder: Path) -> None:
    """After all the others have been deleted."""
    for name in ("0.json", "z.json"):
        (folder / name).mkdir()
    done = outrider("costs", "--clear")
    assert done.code == 2 and "2 files in" in done.out and "3 unreadable" in done.out
    assert done.err == f"error: cannot delete {folder / '0.json'}: Is a directory (and 1 more)\n"
    assert sorted(file.name for file in folder.iterdir()) == ["0.json", "z.json"]


def test_a_folder_that_cannot_be_read(outrider: Outrider, folder: Path) -> None:
    """Rather than that nothing is kept."""
    folder.rename(folder.with_name("moved"))
    folder.write_text("")
    assert outrider("costs").error == f"cannot read {folder}: Not a directory"


def test_names_are_shown_as_they_are(outrider: Outrider, folder: Path) -> None:
    """Brackets in them are no markup."""
    for file in folder.iterdir():
        whole = json.loads(file.read_text())
        if "of" in whole:
            file.write_text(json.dumps(whole | {"of": whole["of"] | {"target": "[b]a[/c]"}}))
    assert outrider("costs").out.count("[b]a[/c]") == 2


@pytest.mark.usefixtures("costs_are_measured")
def test_measuring_is_told(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard error, once: a later run has the costs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = "generate", "The king", "-n", 4, "--draft", "fable-draft", "-k", "auto"
    line = "measuring rounds of fable with fable-draft (1 row, K = 0, 1, 2, 3, 4, 6, 8)"
    first, second = outrider(*arguments), outrider(*arguments)
    assert first.code == second.code == 0
    assert first.err.splitlines().count(line) == 1 and line not in first.out and line not in second.err
