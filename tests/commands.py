"""How commands end, and the JSON documents that they write, held against their description."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DESCRIPTION = Path(__file__).parents[1] / "docs" / "reference" / "json.md"
_KEYS_ARE_DATA = {"json_schema", "texts", "messages", "tools", "chat_template_kwargs"}  # texts: names of arms
PROVENANCE = {
    "outrider",
    "commit",
    "python",
    "torch",
    "transformers",
    "platform",
    "processor",
    "device",
    "num_threads",
    "num_processes",
    "argv",
    "time",
}


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


def keys_of(value: Any) -> set[str]:
    """Every key in a document, at any depth."""
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item)}
    if not isinstance(value, dict):
        return set()
    inner = {key for name, item in value.items() if name not in _KEYS_ARE_DATA for key in keys_of(item)}
    return set(value) | inner


def only_document(text: str, command: str) -> dict[str, Any]:
    """The one document that a text is: with provenance, and without a key that is not described."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert document["schema"] == f"outrider/{command}/1"
    has_model = command not in ("models", "analyze", "export", "costs") and "what_if" not in document["options"]
    assert set(document["provenance"]) == PROVENANCE | ({"dtype"} if has_model else set())
    description = DESCRIPTION.read_text(encoding="utf-8")
    assert [key for key in sorted(keys_of(document)) if f"`{key}`" not in description] == []
    return document
