"""Progress on standard error: a line that changes on a terminal, lines at growing intervals elsewhere."""

import io
import threading
from collections.abc import Iterator

import pytest

from outrider.cli.shared import progress as module
from outrider.cli.shared.progress import count_items, line_of, progress, until_first


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_tell_what_is_done_and_what_is_left() -> None:
    assert line_of("loading a", 4.4, None, 0, 0) == "loading a: 4 s"
    assert line_of("runs", 3.0, 2000, 0, 0) == "runs: 0 of 2,000, 3 s"
    assert line_of("runs", 20.0, 40, 30, 10) == "runs: 30 of 40, 20 s, about 20 s left"  # 20 are of earlier runs
    assert line_of("runs", 300.0, 4, 2, 2) == "runs: 2 of 4, 5 min, about 5 min left"


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
    monkeypatch.setattr(module, "FIRST_S", 1e6)
    with progress("runs", 3):
        pass
    assert capsys.readouterr().err == ""


def test_waits_between_lines_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) > 8

    monkeypatch.setattr(module, "FIRST_S", 2.0)
    module._write(lambda: "", Clock())
    assert waits == [2, 2, 4, 8, 16, 32, 60, 60, 60]


def test_on_a_terminal_the_line_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first item, and it is no longer than a line; a message takes its place."""
    terminal, shown = _Terminal(), threading.Event()
    write = terminal.write

    def writing(text: str) -> int:
        if "reading" in text:
            shown.set()
        return write(text)

    monkeypatch.setattr(terminal, "write", writing)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(module, "_SHORT_S", 0.01)
    monkeypatch.setenv("COLUMNS", "40")

    def items() -> Iterator[int]:
        assert shown.wait(60)
        module.say("a warning of six words or so, which is folded")
        yield 1
        yield 2

    assert [*until_first(items(), "reading " + "many " * 20)] == [1, 2]
    lines = terminal.getvalue().replace("\x1b[K", "").split("\r")
    assert max(map(len, lines[1].splitlines())) == 37
    assert "a warning of six words or so, which is\nfolded\n" in lines and lines[-1] == ""
