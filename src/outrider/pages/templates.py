"""Templates of pages: where they are found, and how numbers are written in them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def render(template: str, document: Mapping[str, Any], **more: Any) -> str:
    """Render a page from a template.

    Args:
        document: of a command, as read from JSON; its entries are variables of the template.
        more: further variables.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: tables for terminals need none of it

    environment = Environment(
        loader=PackageLoader("outrider.pages", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(value=value_text)
    command = shlex.join(["outrider", *document["provenance"]["argv"]])
    return environment.get_template(template).render(document, command=command, **more)


def tables_style() -> str:
    """Style sheet of tables, for a page with a frame of its own."""
    return (files("outrider.pages") / "tables.css").read_text(encoding="utf-8")


def value_text(value: Any) -> str:
    """Format the value of an option."""
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "–"
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
