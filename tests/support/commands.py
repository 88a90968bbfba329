"""How commands end, and the JSON documents that they write, held against examples."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from documents import check, check_lines
from outrider.cli import app
from outrider.cli.shared.output import title_of

_WITHOUT_MODELS = "models", "analyze", "export"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The message of one that was refused: one line, and nothing else anywhere."""
        assert self.code == 2 and self.out == "", self
        (line,) = self.err.splitlines()
        assert line.startswith("error: "), self.err
        return line.removeprefix("error: ")


Outrider = Callable[..., Ended]


@cache
def command_of(words: str) -> Any:
    first, *others = words.split() or [""]
    command: Any = app.command_of(first) if first else get_command(app.app)
    for word in others:
        command = command.commands[word]
    return command


def rows_of(text: str) -> list[dict[str, Any]]:
    """Lines of JSON, in the order of the prompts."""
    assert text.endswith("\n")
    return sorted(map(json.loads, text.removesuffix("\n").split("\n")), key=lambda row: row["index"])


def only_document(text: str, command: str) -> dict[str, Any]:
    """The one document that a text is: like its examples, and with the type of the model that ran."""
    document: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)  # NaN is not JSON
    assert document["schema"] == title_of(command)
    check(document, command)
    has_model = command not in _WITHOUT_MODELS and "what_if" not in document["options"]
    assert ("dtype" in document["provenance"]) == has_model
    return document


def check_written(words: Sequence[str], out: str) -> None:
    """Hold what a command wrote, to files and to standard output, against the examples."""
    values = dict(zip(words, words[1:], strict=False))
    target, output = values.get("--json"), values.get("--output")
    if target == "-" or (target and Path(target).is_file()):  # devices and pipes are not read
        document = json.loads(out if target == "-" else Path(target).read_text(encoding="utf-8"))
        check(document, document["schema"].split("/")[1])
    if words[0] == "generate" and output and Path(output).is_file():
        check_lines(Path(output).read_text(encoding="utf-8"), "generate-output")
