"""Documents held against their schemas, and the keys of all schemas.

python tests/documents.py     # writes tests/golden/schemas.json, unless a key has gone or changed without a new version
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from outrider.schemas.catalogue import DEFINITIONS, SCHEMAS, schema_of

KEYS = Path(__file__).parent / "golden" / "schemas.json"
_WORDS_AND_KEYS = "description", "properties", "required", "$schema", "$id", "$defs"

Keys = dict[str, dict[str, Any]]


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(schema_of(name))


def check(document: Any, name: str) -> None:
    """Fails for a document that is not of this schema."""
    faults = [f"{one.json_path}: {one.message}" for one in validator(name).iter_errors(document)]
    assert faults == []


def check_lines(text: str, name: str) -> None:
    for line in filter(None, text.split("\n")):  # texts may have other line separators
        check(json.loads(line), name)


def keys() -> Keys:
    """The keys of each version of a schema with their types, and the shared definitions that it uses; the same of each
    definition."""
    schemas = {schema["$id"]: schema for schema in map(schema_of, SCHEMAS)}
    return {
        title: {**dict(_keys(schema)), "": _type(schema)} | ({"$defs": [*schema["$defs"]]} if title in schemas else {})
        for title, schema in {**schemas, **DEFINITIONS}.items()
    }


def _keys(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and type of each key, at any depth. Optional ones end in a question mark."""
    if isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from _keys(one, f"{path}{number}/" if isinstance(one, dict) and "properties" in one else path)
    elif isinstance(schema, dict):
        for name, one in schema.get("properties", {}).items():
            place = f"{path}{name}" + "?" * (name not in schema.get("required", ()))
            yield place, _type(one)
            yield from _keys(one, f"{place}.")
        for word, inner in schema.items():
            if word not in _WORDS_AND_KEYS:
                yield from _keys(inner, path)


def _type(schema: Any) -> Any:
    """A schema without its words and keys."""
    if isinstance(schema, list):
        return [_type(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {word: _type(inner) for word, inner in schema.items() if word not in _WORDS_AND_KEYS}


def changes(old: Keys, new: Keys) -> list[str]:
    """Keys of the old versions that the new list lacks, or has with another type. New keys break nobody."""

    def differing(title: str) -> list[str]:
        after = new.get(title, {})
        return [key for key, kind in old[title].items() if key != "$defs" and after.get(key) != kind]

    found = []
    for title in old.keys() & new.keys():
        if "$defs" in old[title]:
            used = ((part, key) for part in (title, *old[title]["$defs"]) for key in differing(part))
            found += [f"{title}: {key}" if part == title else f"{title}: {part}.{key}" for part, key in used]
    return sorted(found)


def described(schema: Any) -> Iterator[tuple[str, Any]]:
    """Name and schema of each key, at any depth."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list) else ():
        yield from described(inner)


if __name__ == "__main__":
    new = keys()
    if KEYS.exists() and (gone := changes(json.loads(KEYS.read_text(encoding="utf-8")), new)):
        sys.exit("\n".join(["give these a new version:", *gone]))
    lines = [
        json.dumps(title) + ": {\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in below.items()) + "\n}"
        for title, below in new.items()
    ]
    KEYS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
