"""Make the page of Python names from signatures and docstrings of what is public (tests/support/public.py)."""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outrider

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from public import public

HEAD = """# Python names

Made from the docstrings, which `help(outrider.load)` shows. [Python](python.md) tells how these go together,
[errors](../guides/troubleshooting.md#errors) has the errors.

"""
ORDER = ("load", "Decoder", "Sampling", "Chat", "ChatOptions", "Session", "AsyncSession", "Chunk", "Completion")
ORDER += ("Stats", "Timing", "TokenLogprob", "DraftedToken", "Placement", "assisted", "generate")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):\n", re.MULTILINE)


def _prose(text: str) -> str:
    """Text of a docstring as Markdown: paragraphs on one line each."""
    paragraphs = (" ".join(one.split()) for one in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraphs).replace("``", "`").strip()


def _cell(text: str) -> str:
    return " ".join(_prose(text).split()).replace("|", "\\|")


def _sections(documented: Any) -> tuple[str, dict[str, str]]:
    """The prose of a docstring, and its sections by name."""
    text, *parts = _SECTION.split(inspect.getdoc(documented) or "")
    return _prose(text), {name: textwrap.dedent(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _entries(section: str) -> dict[str, str]:
    """Text by name, or by several names with commas."""
    found = {}
    for entry in re.split(r"\n(?=\S)", section.strip()):
        names, _, text = entry.partition(":")
        found[names] = text
    return found


def _table(kind: str, entries: dict[str, str], types: dict[str, str]) -> str:
    """Rows in the order of ``types``; names that the docstring explains together are one row."""
    together = {name: names for names in entries for name in names.split(", ")}
    rows: dict[str, list[str]] = {}
    for name in types:
        rows.setdefault(together.get(name.strip("*"), name), []).append(name)
    text = f"| {kind} | type | |\n|---|---|---|\n"
    for names, of_row in rows.items():
        first = ", ".join(f"`{name}`" for name in of_row)
        kinds = ", ".join(dict.fromkeys(f"`{_cell(types[name])}`" for name in of_row if types[name]))
        text += f"| {first} | {kinds} | {_cell(entries.get(names, ''))} |\n"
    return text + "\n"


def _type(one: inspect.Parameter) -> str:
    """The type, with the default where a value says it."""
    if one.kind is one.VAR_KEYWORD:
        return ""
    kind = getattr(one.annotation, "__forward_arg__", one.annotation)  # of a NamedTuple
    is_shown = one.default is not one.empty and not repr(one.default).startswith("<")
    return f"{kind} = {one.default!r}" if is_shown else str(kind)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [one for one in inspect.signature(function).parameters.values() if one.name not in ("self", "cls")]


def _name(one: inspect.Parameter) -> str:
    return {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name


def _signature(name: str, function: Callable[..., Any]) -> str:
    """The signature as Python, without types: the table has them."""
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in _parameters(function)]
    returned = inspect.signature(function).return_annotation
    line = f"def {name}{inspect.Signature(bare)}\xa0->\xa0{returned}:\xa0..."  # no line ends there
    lines = textwrap.fill(line, 88, subsequent_indent="    ").replace("\xa0", " ")
    return f"<!-- not run: a signature -->\n```python\n{lines}\n```\n\n"


def _function(name: str, function: Callable[..., Any]) -> str:
    prose, sections = _sections(function)
    text = _signature(name.rpartition(".")[2], function) + prose + "\n\n"
    if "Args" in sections:
        types = {_name(one): _type(one) for one in _parameters(function)}
        text += _table("argument", _entries(sections["Args"]), types)
    for title in ("Returns", "Yields"):
        text += f"{title}: {_prose(sections[title])}\n\n" if title in sections else ""
    if "Raises" in sections:
        text += "Raises:\n\n"
        for names, why in _entries(sections["Raises"]).items():
            text += f"- {', '.join(f'`{name}`' for name in names.split(', '))}" + (
                f": {_prose(why)}\n" if why else "\n"
            )
        text += "\n"
    return text


def _class(name: str, kind: type, members: list[str]) -> str:
    """Prose, fields and properties, then methods: those with one paragraph in a table."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("outrider")]
    written = [one for base in ours for one in vars(base) if one in members and one != "__init__"]
    parameters = {one.name: one for one in _parameters(kind)}
    types, entries, methods = {}, {}, {}
    for base in reversed(ours):
        entries |= _entries(_sections(base)[1].get("Attributes", ""))
    for one in dict.fromkeys([*(field for field in parameters if field in members), *written]):
        value = inspect.getattr_static(kind, one)
        if one in parameters:
            types[one] = _type(parameters[one])
        elif isinstance(value, property):
            types[one] = str(value.fget.__annotations__["return"])
            about = inspect.getdoc(value) or ""
            entries[one] = about[:1].lower() + about[1:]
        else:
            methods[one] = getattr(kind, one)
    text = f"## {name}\n\n{_sections(kind)[0]}\n\n" + (_table("field", entries, types) if types else "")
    long = [one for one, value in methods.items() if _sections(value)[1] or "\n\n" in _sections(value)[0]]
    if len(long) < len(methods):
        text += "| method | |\n|---|---|\n"
        for one, value in methods.items():
            if one not in long:
                text += f"| `{one}({', '.join(map(_name, _parameters(value)))})` | {_cell(_sections(value)[0])} |\n"
        text += "\n"
    return text + "".join(f"### {name}.{one}\n\n{_function(f'{name}.{one}', methods[one])}" for one in long)


def api() -> str:
    """The page."""
    listed = public()["python"]
    assert sorted(ORDER) == sorted(listed), sorted(set(ORDER) ^ set(listed))
    text = HEAD
    for name in ORDER:
        value, members = getattr(outrider, name), listed[name]
        is_class = isinstance(value, type)
        text += _class(name, value, list(members)) if is_class else f"## {name}\n\n{_function(name, value)}"
    return text.rstrip() + "\n"
