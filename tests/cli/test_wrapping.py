"""Lines and tables on narrow terminals."""

import io
import logging
import shlex
import sys

import pytest
from rich.console import Console

from outrider.bench.tables import NameCell, new_table
from outrider.cli.commands.serve import _TerminalLines
from outrider.cli.shared.output import print_table
from outrider.cli.shared.wrapping import print_command, say, wrap

WORDS = "every word of this message, however long it may be, stays in one piece: /a/path/of/a/file-with-hyphens.json"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_messages_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen, file = Screen(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    say(WORDS)
    lines = screen.getvalue().splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 40 and " ".join(lines) == WORDS
    assert wrap(WORDS, file) == WORDS
    assert wrap("one\n" + WORDS, screen, "    ").splitlines()[3].startswith("    ")


def test_commands_can_be_copied() -> None:
    words = ["outrider", "plan", "--target", "a" * 30, "--draft", "b" * 30, "--system", "Be brief, please. " * 4]
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=60, force_terminal=is_terminal, color_system=None)
        print_command(console, shlex.join(words))
        text = console.file.getvalue()
        assert shlex.split(text.replace("\\\n", " ")) == words
        assert (text.count("\n") > 1) == is_terminal


def test_tables_on_a_narrow_terminal() -> None:
    """Names break at their joints, and no number is cut off."""
    console = Console(file=io.StringIO(), width=24)
    table = new_table("", "name", "K")
    table.add_row(NameCell("meta-llama/Llama-3.2-1B-Instruct"), "100000")
    print_table(console, table, width=24)
    rows = [line.split()[0] for line in console.file.getvalue().splitlines() if line.strip() and "─" not in line]
    assert rows == ["name", "meta-llama/", "Llama-3.2-1B-", "Instruct"]
    cells = "fable-draft", "1234.56789", "1.42 [1.11, 1.81]", "33.44 ±13.21", "22.33 ±44.55", "3.05"
    table = new_table("title", "arm", "tokens/s", "speed-up, 95%", "prefill ms", "verify ms", "tau")
    table.add_row(*cells)
    console = Console(file=io.StringIO(), width=40, legacy_windows=False)
    print_table(console, table)
    assert [cell for cell in cells if cell not in console.file.getvalue()] == []


def test_the_log_of_the_server_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", Screen())
    lines = _TerminalLines()
    record = logging.makeLogRecord({"msg": WORDS, "levelno": logging.INFO, "levelname": "INFO"})
    first, second, *_ = lines.format(record).splitlines()
    assert first[8:].startswith(" every word") and second.startswith(" " * 9) and len(first) <= 40
    try:
        raise ValueError("a fault")
    except ValueError:
        record = logging.makeLogRecord({"msg": "x", "levelno": 40, "levelname": "ERROR", "exc_info": sys.exc_info()})
    text = lines.format(record)
    assert " ERROR x\nTraceback" in text and text.endswith("ValueError: a fault")
