"""Text and progress on a terminal, in files and in pipes."""

import io
import os
import pty
import re
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from outrider.cli.shared import progress as module
from outrider.cli.shared.output import FILE_WIDTH, console_for, say, stderr_width
from outrider.cli.shared.progress import count_items, line_of, progress, until_first
from outrider.cli.shared.terminal import Writer, without_caret


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def _seen(text: str, width: int) -> list[str]:
    """Lines of a terminal, which knows the control codes of the writer."""
    lines = [""]
    for code, char in re.findall(r"(\x1b\[\d*[A-Za-z])|(.|\n)", text):
        if code.endswith("D"):
            lines[-1] = lines[-1][: len(lines[-1]) - int(code[2:-1])]
        elif char == "\n":
            lines.append("")
        elif char:
            assert len(lines[-1]) < width
            lines[-1] += char
    return lines


@pytest.mark.parametrize("size", [1, 3, 7, 200])
def test_lines_end_between_words(size: int) -> None:
    """However the text is cut into pieces, and though each is shown at once."""
    text = "The proper study of mankind is a supercalifragilistic\n\nman in all his  ways, he said"
    screen = _Screen()
    writer = Writer(Console(file=screen, force_terminal=True, width=16, color_system="standard", no_color=False))
    for place in range(0, len(text), size):
        writer.write(text[place : place + size], "underline" if place % 2 else "")
    shown = "The proper|study of|mankind is a|supercalifragil|istic||man in all his|ways, he said"
    assert [line.rstrip() for line in _seen(screen.getvalue(), 16)] == shown.split("|")


def test_tabs_are_written_as_they_are() -> None:
    """As in a Makefile."""
    screen = _Screen()
    writer = Writer(Console(file=screen, force_terminal=True, color_system="standard", no_color=False))
    writer.write("all:\n\tcc [bold]")
    writer.write("\tx.c", "underline")
    assert screen.getvalue() == "all:\n\tcc [bold]\x1b[4m\t\x1b[0m\x1b[4mx.c\x1b[0m"


def test_elsewhere_text_is_left_as_it_is() -> None:
    file = io.StringIO()
    Writer(Console(file=file, width=10)).write("a line that is longer\tthan ten \x07 [bold]", "underline")
    assert file.getvalue() == "a line that is longer\tthan ten \x07 [bold]"


def test_ctrl_c_leaves_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the terminal is ours; it is as before at the end."""
    termios = pytest.importorskip("termios")
    master, slave = pty.openpty()
    with open(slave) as stream:
        monkeypatch.setattr("sys.stdin", stream)

        def has_mark() -> bool:
            return bool(termios.tcgetattr(stream)[3] & termios.ECHOCTL)

        before = has_mark()
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        with pytest.raises(KeyboardInterrupt), without_caret():
            assert before and not has_mark()
            raise KeyboardInterrupt
        assert has_mark()
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: -1)
        with without_caret():
            assert has_mark()
    os.close(master)


def test_messages_are_as_wide_as_their_own_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output may be a file, or a terminal of another width; tables in pipes are as wide as COLUMNS."""
    assert console_for(None).width == FILE_WIDTH
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert stderr_width() == 80
    termios = pytest.importorskip("termios")
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        assert stderr_width() == 80  # it does not know
        termios.tcsetwinsize(slave, (24, 30))
        assert stderr_width() == 30
        say("seven words that do not fit there")
        monkeypatch.setenv("COLUMNS", "40")
        assert stderr_width() == console_for(None).width == 40
    expected = b"\r\x1b[Kseven words that do not fit\r\nthere\r\n"
    with open(master, "rb") as screen:  # its bytes may come in parts
        assert screen.read(len(expected)) == expected


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
    module._tell(lambda: "", Clock(), False)
    assert waits == [2, 2, 4, 8, 16, 32, 60, 60, 60]


def test_on_a_terminal_the_line_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first item, and it is no longer than a line; a message takes its place."""
    terminal, shown = _Screen(), threading.Event()
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
