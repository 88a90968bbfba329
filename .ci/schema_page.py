"""The page of the JSON documents, from their schemas."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from outrider.schemas.catalogue import DEFINITIONS, SCHEMAS

HEAD = """# The JSON documents of the commands

Every command accepts `--json FILE`, or `--json -` for standard output (the human-readable output then goes to standard
error), and writes one document. This page is made from the documents' [JSON Schemas](https://json-schema.org):

```bash
outrider schema                  # their names
outrider schema generate         # one of them
```

A document has three keys that are not repeated below: `schema`, its name and version, like `outrider/compare/1`;
`options` of the run; and [`provenance`](#provenance). The tests hold every document against its schema, which is
closed: no key is missing or not described. New keys may be added, so ignore those that you do not know. The version
changes when a key is removed, or changes its type or meaning.

Keys of inner objects are written `outer.inner`, and `list[].inner` in lists. An undefined ratio or rate (no tokens were
drafted, a single run has no interval) is `null`. Times are in seconds unless the name contains `ms`, sizes in bytes,
logarithms natural.

If the reader of standard output leaves (`| head`), generation stops, files are still written, and the exit code is 141,
as after SIGPIPE. If standard output is closed or its disk is full, the exit code is 2, with one line of error.

"""
FEW = 3  # documents with the same option: it is written once


def _type(schema: dict[str, Any]) -> str:
    """Type of a value, in words, with links to definitions."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/")[-1]
        return f"[{name}](#{name})"
    if "allOf" in schema:
        more = "and more" if schema["properties"] else ""
        return " ".join([" and ".join(map(_type, schema["allOf"])), more]).strip()
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join("null" if value is None else f"`{value}`" for value in values)
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema["items"] else "pair"
    types = schema.get("type", "any")
    return types if isinstance(types, str) else " or ".join(types)


def _object(schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The object inside a list or beside null, and how it is reached: "" or "[]"."""
    if schema.get("type") == "array" and schema["items"]:
        suffix, inner = _object(schema["items"])
        return "[]" + suffix, inner
    for one in schema.get("anyOf", ()):
        if "properties" in one:
            return "", one
    return "", schema


def _keys(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Place, type and content of each key, at any depth."""
    for name, one in schema["properties"].items():
        if "const" in one or name in ("options", "provenance"):
            continue
        optional = "" if name in schema.get("required", ()) else ", optional"
        yield prefix + name, _type(one) + optional, one.get("description", "")
        suffix, inner = _object(one)
        if "properties" in inner:
            yield from _keys(inner, f"{prefix}{name}{suffix}.")


def _table(keys: Iterable[tuple[str, str, str]]) -> str:
    rows = "".join(f"| `{key}` | {kind} | {about} |\n" for key, kind, about in keys)
    return f"| key | type | content |\n|---|---|---|\n{rows}\n"


def _shared_options() -> list[tuple[str, str, str]]:
    """Options that a few documents or more have."""
    documents = [one for schema in SCHEMAS.values() for one in schema.get("oneOf", [schema])]
    runs = [one["properties"]["options"] for one in documents if "options" in one["properties"]]
    counts = Counter(key for run in runs for key in _keys(run))
    return [key for key in counts if counts[key] >= FEW]


def _options(schema: dict[str, Any]) -> str:
    """The options of a run; those that others have too by name only."""
    names, shared = [_type(one) for one in schema.get("allOf", ())], _shared_options()
    for key in _keys(schema):
        name, kind, about = key
        names.append(f"`{name}`" if key in shared else f"`{name}` ({kind}{': ' if about else ''}{about})")
    return f"Options: {', '.join(names)}.\n\n"


def _section(schema: dict[str, Any]) -> str:
    text = schema.get("description", "") + "\n\n"
    for one in schema.get("oneOf", ()):
        if "properties" in one:
            text += _section(one)
    if "properties" in schema:
        run = schema["properties"].get("options")
        if run:
            text += _options(run)
        elif "allOf" in schema:
            text += f"The keys of {' and '.join(map(_type, schema['allOf']))}, and:\n\n"
        text += _table(_keys(schema)) if any(_keys(schema)) else ""
    elif "oneOf" not in schema:
        text = f"{_type(schema)}: {text}"
    return text


def page() -> str:
    text = HEAD
    for name, schema in SCHEMAS.items():
        text += f"## {name}\n\n" + _section(schema)
    text += "## Recurring pieces\n\n"
    for name, schema in DEFINITIONS.items():
        text += f"### {name}\n\n{_section(schema)}"
    text += "### Options of several commands\n\n" + _table(_shared_options())
    return text.rstrip() + "\n"
