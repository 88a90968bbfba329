"""Schemas are valid, describe each key, fit what commands write and nothing else, and change with their version."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from documents import KEYS, changes, check, described, keys, validator
from outrider.offline import prompt_row
from outrider.offline.prompt_row import prompt_of
from outrider.schemas.catalogue import DEFINITIONS, SCHEMAS, schema_of
from outrider.schemas.titles import title_of

# What each command has written, shortened: documents by schema.
DOCUMENTS = json.loads((Path(__file__).parents[1] / "golden" / "documents.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_valid_and_describe_each_key(name: str) -> None:
    schema = schema_of(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == title_of(name)
    assert schema["description"]
    assert [key for key, one in described(schema) if not one.get("description") and not _is_described(one)] == []


def _is_described(schema: Any) -> bool:
    """Whether it refers to definitions, which are described."""
    references = [schema, *schema.get("anyOf", ()), *schema.get("allOf", ()), schema.get("items", {})]
    names = [one["$ref"].rsplit("/")[-1] for one in references if "$ref" in one]
    return bool(names) and all(DEFINITIONS[one]["description"] for one in names)


def _objects(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The objects in a document with their places, the first of each list."""
    if isinstance(value, dict):
        yield path, value
        for name, inner in value.items():
            yield from _objects(inner, f"{path}.{name}")
    elif isinstance(value, list) and value:
        yield from _objects(value[0], path)


def _optional(schema: Any) -> set[str]:
    """Keys that some object may lack."""
    return {key for one in _parts(schema) for key in one.get("properties", {}) if key not in one.get("required", ())}


def _parts(schema: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        yield schema
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list) else ():
        yield from _parts(inner)


@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_with_a_key_too_many_or_too_few_fail(name: str) -> None:
    """At every place of a document."""
    optional, valid = _optional(schema_of(name)), validator(name).is_valid
    for document in DOCUMENTS[name]:
        check(document, name)
        for path, _ in list(_objects(document)):
            if _has_open_keys(name, path):
                continue
            changed = copy.deepcopy(document)
            inner = dict(_objects(changed))[path]
            inner["unknown"] = 1
            assert not valid(changed), f"{path}: one more"
            del inner["unknown"]
            for key in [key for key in inner if key not in optional]:
                value = inner.pop(key)
                assert not valid(changed), f"{path}.{key}: missing"
                inner[key] = value


def _has_open_keys(name: str, path: str) -> bool:
    """Objects whose keys are data: names of arms, schemas, messages, settings. A file of prompts may have notes."""
    data = "texts", "json_schema", "messages", "chat_template_kwargs", "settings", "logit_bias"
    is_open = any(part in data for part in path.split("."))
    return name == "prompts" or (name, path) == ("log", ".provenance") or (is_open and name != "plan")


def test_keys_change_with_the_version() -> None:
    """``python tests/documents.py`` writes the list; it refuses a key that has gone or changed in the same version."""
    assert keys() == json.loads(KEYS.read_text(encoding="utf-8"))


def test_changes_are_found() -> None:
    """The control: a key that has gone, another type, a required key that is optional now, in a definition too."""
    old = keys()
    new = copy.deepcopy(old)
    assert changes(old, new) == []
    new["outrider/costs/1"]["more"] = {}  # breaks nobody
    del new["outrider/compare/1"]["baseline"]
    new["outrider/alpha/1"]["alphas.draft"] = {"type": "integer"}
    new["check"]["seconds?"] = new["check"].pop("seconds")
    assert changes(old, new) == [
        "outrider/alpha/1: alphas.draft",
        "outrider/compare/1: baseline",
        "outrider/distill/1: check.seconds",
    ]
    new["outrider/distill/2"] = new.pop("outrider/distill/1")
    assert "outrider/distill/1: check.seconds" not in changes(old, new)


def test_the_schema_of_prompts_names_what_commands_read() -> None:
    names = {key for one in _parts(schema_of("prompts")) for key in one.get("properties", {})}
    assert names == {*prompt_row._FIELDS, *prompt_row._BATCH_FIELDS} - {"processor"}  # a function
    for row in DOCUMENTS["prompts"]:
        assert prompt_of("file", "line 1", row)
