"""Text and progress on a terminal, in files and in pipes."""

import io
import re
import threading

import pytest
from rich.console import Console

from outrider.cli.shared import progress as module
from outrider.cli.shared.progress import count_items, line_of, progress
from outrider.cli.shared.terminal import Writer


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


def test_lines_end_between_words_on_a_terminal_alone() -> None:
    """However the text is cut into pieces, and though each is shown at once."""
    text = "The proper study of mankind is a supercalifragilistic\n\nman in all his  ways, he said"
    shown = "The proper|study of|mankind is a|supercalifragil|istic||man in all his|ways, he said"
    for size in (1, 3, 200):
        screen = _Screen()
        writer = Writer(Console(file=screen, force_terminal=True, width=16, color_system="standard", no_color=False))
        for place in range(0, len(text), size):
            writer.write(text[place : place + size], "underline" if place % 2 else "")
        assert [line.rstrip() for line in _seen(screen.getvalue(), 16)] == shown.split("|")
    file = io.StringIO()
    Writer(Console(file=file, width=10)).write("a line that is longer\tthan ten \x07 [bold]", "underline")
    assert file.getvalue() == "a line that is longer\tthan ten \x07 [bold]"


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
