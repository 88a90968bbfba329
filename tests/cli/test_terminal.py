"""Text and progress on a terminal, in files and in pipes."""

import threading

import pytest

from outrider.cli.shared import progress as module
from outrider.cli.shared.progress import count_items, line_of, progress


def test_a_pipe_is_told_of_slow_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And of nothing that is quick."""
    told = threading.Event()
    say = module.say

    def saying(line: str) -> None:
        say(line)
        told.set()

    monkeypatch.setattr(module, "say", saying)
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    with progress("runs", 3, done=1) as advance:
        assert [*count_items("ab", advance)] == ["a", "b"]
        told.clear()  # a line may have come before
        assert told.wait(60)
    assert capsys.readouterr().err.splitlines()[-1].startswith("runs: 3 of 3, ")
    assert line_of("runs", 20.0, 40, 30, 10) == "runs: 30 of 40, 20 s, about 20 s left"  # 20 are of earlier runs
    monkeypatch.setattr(module, "FIRST_S", 1e6)
    with progress("runs", 3):
        pass
    assert capsys.readouterr().err == ""
