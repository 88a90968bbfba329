"""Templates of pages: where they are found, and how numbers are written in them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def render(package: str, template: str, document: Mapping[str, Any], **more: Any) -> str:
    """Render a page from a template.

    Args:
        package: it has the template; those of outrider.pages are found, too.
        document: of a command, as read from JSON; its entries are variables of the template.
        more: further variables.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, ""), PackageLoader("outrider.pages", "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(whole=whole_text, share=share_text, number=number_text, gap=gap_text, value=value_text)
    command = shlex.join(["outrider", *document["provenance"]["argv"]])
    return environment.get_template(template).render(document, command=command, **more)


def tables_style() -> str:
    """Style sheet of tables, for a page with a frame of its own."""
    return (files("outrider.pages") / "tables.css").read_text(encoding="utf-8")


def whole_text(value: int) -> str:
    """Write a whole number."""
    return f"{value:,}"


def share_text(value: float) -> str:
    """Write a part of one, in per cent."""
    return f"{value:.2%}"


def number_text(value: float | None) -> str:
    """Format a p-value or a statistic."""
    return "–" if value is None else f"{value:.3g}"


def gap_text(value: float | None) -> str:
    """Write a small deviation."""
    return "–" if value is None else f"{value:.0e}" if value else "0"


def value_text(value: Any) -> str:
    """Format the value of an option."""
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "–"
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
