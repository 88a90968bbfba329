"""Generated text on a terminal."""

import io
import os
import pty
import re

import pytest
from rich.console import Console

from outrider.cli.shared.output import FILE_WIDTH, console_for, say, stderr_width
from outrider.cli.shared.terminal import Writer, without_caret


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def _seen(text: str, width: int) -> list[str]:
    """Lines of a terminal: of the control codes it knows those of the writer."""
    lines, column = [""], 0
    for code, char in re.findall(r"(\x1b\[\d*[A-Za-z])|(.|\n)", text):
        if code.endswith("D"):
            column -= int(code[2:-1])
            assert column >= 0
        elif code.endswith("K"):
            lines[-1] = lines[-1][:column]
        elif char == "\n":
            lines.append("")
            column = 0
        elif char:
            assert column < width
            lines[-1] = lines[-1][:column] + char
            column += 1
    return lines


def _written(pieces: list[str], width: int) -> list[str]:
    screen = _Screen()
    console = Console(file=screen, force_terminal=True, width=width, color_system="standard", no_color=False)
    writer = Writer(console)
    for place, piece in enumerate(pieces):
        writer.write(piece, "underline" if place % 2 else "")
    return _seen(screen.getvalue(), width)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 200])
def test_lines_end_between_words(size: int) -> None:
    """However the text is cut into pieces, and though each is shown at once."""
    text = "The proper study of mankind is a supercalifragilistic\n\nman in all his  ways, he said"
    lines = _written([text[i : i + size] for i in range(0, len(text), size)], 16)
    assert [line.rstrip() for line in lines] == [
        "The proper",
        "study of",
        "mankind is a",
        "supercalifragil",
        "istic",
        "",
        "man in all his",
        "ways, he said",
    ]


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


def test_tables_in_pipes_are_as_wide_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert console_for(None).width == 72
    monkeypatch.delenv("COLUMNS")
    assert console_for(None).width == FILE_WIDTH


def test_messages_are_as_wide_as_their_own_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output may be a file, or a terminal of another width."""
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
        assert stderr_width() == 40
    expected = b"\r\x1b[Kseven words that do not fit\r\nthere\r\n"
    with open(master, "rb") as screen:  # its bytes may come in parts
        assert screen.read(len(expected)) == expected
