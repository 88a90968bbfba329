"""All schemas by name, each with the definitions that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.schemas.choose import CHOOSE, DEFINED_BY_CHOOSE
from outrider.schemas.files import FILES
from outrider.schemas.generate import GENERATE
from outrider.schemas.notation import Schema
from outrider.schemas.run_options import GROUPS
from outrider.schemas.shared import SHARED
from outrider.schemas.titles import title_of
from outrider.schemas.train_and_export import TRAIN_AND_EXPORT
from outrider.schemas.trust import DEFINED_BY_TRUST, TRUST

DEFINITIONS: dict[str, Schema] = {**SHARED, **DEFINED_BY_CHOOSE, **DEFINED_BY_TRUST, **GROUPS}
SCHEMAS: dict[str, Schema] = {**GENERATE, **CHOOSE, **TRAIN_AND_EXPORT, **TRUST, **FILES}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/"


def schema_of(name: str) -> Schema:
    """JSON Schema of a document, or of a file's line, with all definitions that it refers to.

    Args:
        name: one of SCHEMAS.
    """
    body = SCHEMAS[name]
    used: dict[str, Schema] = {}
    waiting = list(references(body))
    while waiting:
        one = waiting.pop()
        if one not in used:
            used[one] = DEFINITIONS[one]
            waiting += references(used[one])
    return {"$schema": _DIALECT, "$id": title_of(name), **body, "$defs": {one: used[one] for one in sorted(used)}}


def references(value: Any) -> Iterator[str]:
    """Names of the definitions that a schema refers to, directly."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"].removeprefix(_REF)
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)
