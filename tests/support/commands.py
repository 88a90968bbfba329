"""How commands end, and the JSON documents that they write, held against examples."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.main import get_command

from documents import check, check_lines
from outrider.cli.app import app
from outrider.cli.shared.output import title_of

_WITHOUT_MODELS = "models", "analyze", "export"
_LINES = {"generate": "generate-output"}  # of --output


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

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
    """A command by its words."""
    command: Any = get_command(app)
    for word in words.split():
        command = command.commands[word]
    return command


def rows_of(text: str) -> list[dict[str, Any]]:
    """Lines of JSON, in the order of the prompts."""
    assert text.endswith("\n")
    return sorted(map(json.loads, text.removesuffix("\n").split("\n")), key=lambda row: row["index"])


def only_document(text: str, command: str) -> dict[str, Any]:
    """The one document that a text is: like its examples, and with the type of the model that ran."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert document["schema"] == title_of(command)
    check(document, command)
    has_model = command not in _WITHOUT_MODELS and "what_if" not in document["options"]
    assert ("dtype" in document["provenance"]) == has_model
    return document


def check_written(words: Sequence[str], out: str) -> None:
    """Hold what a command wrote against the examples.

    Args:
        words: of the command line.
        out: standard output.
    """
    values = dict(zip(words, words[1:], strict=False))
    if target := values.get("--json"):
        text = out if target == "-" else _text_of(target)
        if text is not None:
            document = json.loads(text)
            check(document, document["schema"].split("/")[1])
    if output := values.get("--output"):
        if words[0] in _LINES:
            check_lines(_text_of(output) or "", _LINES[words[0]])


def _text_of(file: str) -> str | None:
    """None of devices and pipes."""
    return Path(file).read_text(encoding="utf-8") if Path(file).is_file() else None
