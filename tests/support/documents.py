"""Documents held against golden examples of what each command writes (golden/documents.json)."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "golden" / "documents.json"
# Objects whose keys are data: names of arms, schemas, messages, settings.
_DATA = {"texts", "json_schema", "messages", "tools", "chat_template_kwargs", "settings", "logit_bias"}

_ANY = {"id", "custom_id"}  # values that the user gives


@cache
def examples() -> dict[str, list[Any]]:
    """Documents, or lines of a file, by their name. Lists are shortened."""
    found: dict[str, list[Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def check(document: Any, name: str) -> None:
    """Hold a document against the examples: at every place, it has the keys that all of them have, none that no example
    has, and values of JSON types that examples have, or null. Null alone stands for any value."""
    _check(document, examples()[name], name)


def _check(value: Any, like: Sequence[Any], place: str) -> None:
    name = place.rpartition(".")[2]
    kinds = set() if name in _ANY else {_kind(one) for one in like if one is not None}
    assert value is None or not kinds or _kind(value) in kinds, f"{place}: {value!r} is none of {sorted(kinds)}"
    if isinstance(value, dict):
        known = [one for one in like if isinstance(one, dict)]
        if not known or name in _DATA:
            return
        lacking = set.intersection(*map(set, known)) - value.keys()
        unknown = value.keys() - set().union(*known)
        assert not lacking and not unknown, f"{place}: lacks {sorted(lacking)}, has {sorted(unknown)}"
        for key, inner in value.items():
            _check(inner, [one[key] for one in known if key in one], f"{place}.{key}")
    elif isinstance(value, list):
        items = [item for one in like if isinstance(one, list) for item in one]
        for item in value:
            _check(item, items, f"{place}[]")


def _kind(value: Any) -> str:
    return {bool: "boolean", int: "number", float: "number"}.get(type(value), type(value).__name__)


def check_lines(text: str, name: str) -> None:
    for line in filter(None, text.split("\n")):  # texts may have other line separators
        check(json.loads(line), name)
