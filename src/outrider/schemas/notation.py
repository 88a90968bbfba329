"""A short notation for JSON Schema (2020-12, https://json-schema.org).

Objects are closed, and their keys required unless they are listed as ``optional``: a key that is missing, or not
described, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.schemas.titles import title_of

Schema = dict[str, Any]
Keys = Mapping[str, Schema]

_JSON_TYPES = ("string", "integer", "number", "boolean", "object", "null")


def of(types: str, about: str = "") -> Schema:
    """Schema of a value.

    Args:
        types: like "number or null", "list of stats". Names that are not JSON's are of shared definitions.
    """
    names = types.split(" or ")
    if all(name in _JSON_TYPES for name in names):
        made: Schema = {"type": names if len(names) > 1 else names[0]}
    elif len(names) > 1:
        made = {"anyOf": [of(name) for name in names]}
    elif types.startswith("list of "):
        made = {"type": "array", "items": of(types.removeprefix("list of "))}
    else:
        made = {"$ref": f"#/$defs/{types}"}
    return _described(made, about)


def anything(about: str) -> Schema:
    return {"description": about}


def list_of(items: Schema, about: str) -> Schema:
    return _described({"type": "array", "items": items}, about)


def pair_of(first: str, second: str, about: str) -> Schema:
    """A list of two."""
    return _described({"type": "array", "prefixItems": [of(first), of(second)], "items": False, "minItems": 2}, about)


def map_of(values: Schema, about: str) -> Schema:
    """An object whose keys are data."""
    return _described({"type": "object", "additionalProperties": values}, about)


def one_of(about: str, *values: str | None) -> Schema:
    return _described({"enum": list(values)}, about)


def record(about: str, keys: Keys, optional: Keys | None = None, *, either: tuple[str, ...] = ()) -> Schema:
    """A closed object.

    Args:
        optional: keys that may be missing.
        either: optional keys of which there is exactly one.
    """
    made: Schema = {"type": "object", "properties": {**keys, **(optional or {})}, "required": list(keys)}
    if either:
        made["oneOf"] = [{"required": [name]} for name in either]
    return _described(made | {"additionalProperties": False}, about)


def or_null(schema: Schema) -> Schema:
    about = schema.get("description", "")
    bare = {name: value for name, value in schema.items() if name != "description"}
    if isinstance(bare.get("type"), str) and len(bare) == 1:
        return of(f"{bare['type']} or null", about)
    is_nullable = "null" in bare.get("type", ()) or any(one == of("null") for one in bare.get("anyOf", ()))
    return schema if is_nullable else _described({"anyOf": [bare, of("null")]}, about)


def group(about: str, keys: Keys, optional: Keys | None = None) -> Schema:
    """An open object, for ``extended``."""
    return _described({"type": "object", "properties": {**keys, **(optional or {})}, "required": list(keys)}, about)


def extended(about: str, groups: Sequence[str], own: Keys | None = None, optional: Keys | None = None) -> Schema:
    """A closed object: shared groups, and keys of its own."""
    made = group(about, own or {}, optional)
    return made | {"allOf": [of(name) for name in groups], "unevaluatedProperties": False}


def options(groups: Sequence[str], own: Keys, optional: Keys | None = None) -> Schema:
    """Options of a run: shared groups, and the command's own."""
    about = "options of the run"
    return extended(about, groups, own, optional) if groups else record(about, own, optional)


def document(name: str, about: str, run: Schema, keys: Keys) -> Schema:
    """The document of a command: ``run`` are its options."""
    head = {"schema": {"const": title_of(name), "description": "name and version of this schema"}, "options": run}
    return record(about, {**head, **keys, "provenance": of("provenance")})


def _described(schema: Schema, about: str) -> Schema:
    return schema | {"description": about} if about else schema
